"""Which component of ROCm a file below /opt/rocm* belongs to, where no package says: told by its path."""

import re
from dataclasses import dataclass

_ROOT = re.compile(rb"opt/rocm(?:-([0-9][^/]*))?(?=/|$)")
_LIBRARY = re.compile(rb"lib([^/]+?)(?:\.so(?:\..*)?|\.a)$")
_COMMON = {b"bin", b"lib", b"lib64", b"libexec", b"include", b"share"}  # hold every component's files
_BELOW_COMMON = {b"cmake", b"doc", b"pkgconfig"}
_ONE_COMPONENT = {"amdhip64": "hip", "hiprtc": "hip", "hiprtc-builtins": "hip"}


@dataclass(frozen=True)
class Component:
    """A part of ROCm. `version` is of the whole tree, empty where its directory doesn't tell it."""

    place: str
    version: str
    name: str


def component_of(directory: bytes, name: bytes) -> Component | None:
    """The component by a file's directory and name; None outside of ROCm's tree."""
    root = _ROOT.match(directory)
    if not root:
        return None
    place, version = root[0].decode(), (root[1] or b"").decode("utf-8", "backslashreplace")
    parts = directory[root.end() + 1 :].split(b"/")
    common = b""
    while parts and parts[0] in (_COMMON if not common else _BELOW_COMMON):
        common = parts.pop(0)
    library = _LIBRARY.match(name) if not parts else None
    part = parts[0] if parts else library[1] if library else common
    told = part.decode("utf-8", "backslashreplace").lower()
    return Component(place, version, _ONE_COMPONENT.get(told, told) or "rocm")
