"""What kind of bytes a file holds, judged by its path: one kind per file. Directories first, then endings."""

import re
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from buildtool.audit.count.spot import Pattern
from buildtool.gpucode.names import gfx_targets_of_path


class Kind(Enum):
    """Kinds of content."""

    GPU_CODE = "gpu code"
    LIBRARY = "shared libraries"
    PROGRAM = "programs"
    PYTHON = "python source"
    BYTECODE = "python bytecode"
    HEADER = "headers"
    STATIC_LIBRARY = "static libraries"
    BUILD_FILE = "build files (cmake, pkg-config)"
    TEST = "tests"
    DEBUG = "debug information"
    DOC = "documentation"
    LOCALE = "translations"
    CACHE = "caches of package managers"
    MODEL = "model weights"
    DATA = "other data"


@dataclass(frozen=True)
class Place:
    """A file's kind, and what a remedy would name: a directory with only that kind, or one and an ending."""

    kind: Kind
    anchor: bytes | Pattern
    targets: tuple[str, ...] = ()


_UNDER = (
    (b"var/lib/apt/lists", Kind.CACHE),
    (b"var/cache/apt", Kind.CACHE),
    (b"var/cache/debconf", Kind.CACHE),
    (b"var/cache/dnf", Kind.CACHE),
    (b"var/cache/yum", Kind.CACHE),
    (b"var/cache/ldconfig", Kind.CACHE),
    (b"usr/lib/debug", Kind.DEBUG),
    (b"usr/share/doc", Kind.DOC),
    (b"usr/share/man", Kind.DOC),
    (b"usr/share/info", Kind.DOC),
    (b"usr/share/gtk-doc", Kind.DOC),
    (b"usr/share/locale", Kind.LOCALE),
    (b"usr/share/i18n", Kind.LOCALE),
)
_PART = {
    b".cache": Kind.CACHE,
    b"__pycache__": Kind.BYTECODE,
    b"include": Kind.HEADER,
    b"cmake": Kind.BUILD_FILE,
    b"pkgconfig": Kind.BUILD_FILE,
    b"test": Kind.TEST,
    b"tests": Kind.TEST,
}
_ENDING = {
    b"so": Kind.LIBRARY,
    b"py": Kind.PYTHON,
    b"pyi": Kind.PYTHON,
    b"pyc": Kind.BYTECODE,
    b"h": Kind.HEADER,
    b"hpp": Kind.HEADER,
    b"hh": Kind.HEADER,
    b"hxx": Kind.HEADER,
    b"cuh": Kind.HEADER,
    b"a": Kind.STATIC_LIBRARY,
    b"cmake": Kind.BUILD_FILE,
    b"pc": Kind.BUILD_FILE,
    b"mo": Kind.LOCALE,
    b"debug": Kind.DEBUG,
    b"safetensors": Kind.MODEL,
    b"gguf": Kind.MODEL,
    b"onnx": Kind.MODEL,
    b"pt": Kind.MODEL,
    b"pth": Kind.MODEL,  # except Python's path files, see _PATH_FILES
}
_SONAME = re.compile(rb"\.so(\.[0-9][^/]*)?$")
_GPU_NAME = re.compile(rb"gfx[0-9]")
_PATH_FILES = re.compile(  # a .pth that is a line of text for Python's start, by directory or name
    rb"((^|/)(site|dist)-packages/[^/]*|(^|/)(distutils-precedence|easy-install|__editable__[^/]*|_?virtualenv"
    rb"|[^/]*-nspkg))\.pth$"
)
_CONDAS = (b"conda", b"mamba", b"miniforge")
_PROGRAMS = re.compile(rb"(^|/)s?bin$")


class Classifier:
    """Classifies files, examining each directory once."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Place | None, bool, bool]] = {}

    def place(self, directory: bytes, name: bytes) -> Place:
        """A file's kind and anchor."""
        known = self._known.get(directory)
        if known is None:
            known = (
                _of_directory(directory),
                bool(_GPU_NAME.search(directory)),
                bool(_PROGRAMS.search(directory)),
            )
            self._known[directory] = known
        by_directory, maybe_gpu, programs = known
        if maybe_gpu or b"gfx" in name:
            path = (directory + b"/" + name).decode("utf-8", "replace")
            targets = gfx_targets_of_path(path)
            if targets:
                return Place(Kind.GPU_CODE, directory, targets)
        if by_directory is not None and name != b"copyright":  # licences must stay
            return by_directory
        stem, _, ending = name.rpartition(b".")
        kind = _ENDING.get(ending) if stem else None  # a file called `a` or `.h` has no ending
        if ending == b"pth" and _PATH_FILES.search(directory + b"/" + name):
            kind = Kind.PYTHON
        if kind is not None:
            return Place(kind, Pattern(directory, ending))
        if _SONAME.search(name):
            return Place(Kind.LIBRARY, directory)
        return Place(Kind.PROGRAM if programs else Kind.DATA, directory)


def _of_directory(directory: bytes) -> Place | None:
    for prefix, kind in _UNDER:
        if directory == prefix or directory.startswith(prefix + b"/"):
            return Place(kind, prefix)
    parts = directory.split(b"/")
    for depth, (above, part) in enumerate(pairwise(parts), 2):
        if part == b"pkgs" and any(word in above for word in _CONDAS):
            return Place(Kind.CACHE, b"/".join(parts[:depth]))
    for depth, part in enumerate(parts, 1):
        if part in _PART:
            return Place(_PART[part], b"/".join(parts[:depth]))
    return None
