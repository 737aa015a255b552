"""Which component of ROCm an unlisted file below /opt/rocm* belongs to, judged by its path."""

import re
from dataclasses import dataclass

_ROOT = re.compile(rb"opt/rocm(?:-([0-9][^/]*))?(?=/|$)")
_SHARED = re.compile(rb"\.so(?=\.|$)")
_COMMON = {b"bin", b"lib", b"lib64", b"libexec", b"include", b"share"}  # hold every component's files
_BELOW_COMMON = {b"cmake", b"doc", b"pkgconfig"}
_ONE_COMPONENT = {"amdhip64": "hip", "hiprtc": "hip", "hiprtc-builtins": "hip"}


@dataclass(frozen=True)
class Component:
    """A part of ROCm. `version` is that of the whole tree, empty where its directory doesn't contain it."""

    place: str
    version: str
    name: str


def component_of(directory: bytes, name: bytes) -> Component | None:
    """The component by a file's directory and name; None outside ROCm's tree."""
    root = _ROOT.match(directory)
    if not root:
        return None
    place, version = _text(root[0]), _text(root[1] or b"")
    parts = directory[root.end() + 1 :].split(b"/")
    common = b""
    while parts and parts[0] in (_COMMON if not common else _BELOW_COMMON):
        common = parts.pop(0)
    part = parts[0] if parts else _library(name) or common
    lower = _text(part).lower()
    return Component(place, version, _ONE_COMPONENT.get(lower, lower) or "rocm")


def _library(name: bytes) -> bytes | None:
    """A library's name without `lib` and its ending; None for other files."""
    if not name.startswith(b"lib"):
        return None
    shared = _SHARED.search(name, 4)
    if shared:
        return name[3 : shared.start()]
    return name[3:-2] if name.endswith(b".a") else None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
