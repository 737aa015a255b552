"""Which package a file belongs to, by the image's own databases: dpkg's, Python's, conda's.

A file has one owner: the first of Debian, Python and conda that lists it. An unlisted file below /opt/rocm*
belongs to a component of ROCm.
"""

import posixpath
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice

from buildtool.core.json_text import members, strings
from buildtool.image.layer import LayerIndex, join_path
from buildtool.image.merge import Finder, Merged
from probes.core.quoting import terminal

# Owners.

UNOWNED = 0
_MOST_PACKAGES = 50_000  # Debian has some 65,000 in all; each takes memory, in every report too
_MOST_COMPONENTS = 1000  # of ROCm; names from a path need a bound
_PYC = re.compile(rb"(.+)\.cpython-[0-9]+[a-z]*(\.opt-[12])?\.pyc$")


class Manager(Enum):
    """Who installed a package."""

    DEB = "deb"
    PYTHON = "python"
    CONDA = "conda"
    ROCM = "rocm tree"  # not listed anywhere, recognised by its path


@dataclass(frozen=True)
class Package:
    """An installed package, before its bytes are known."""

    manager: Manager
    name: str
    version: str
    place: str = ""  # the directory it is installed in, where that isn't the whole system
    architecture: str = ""  # of a Debian package
    source: str = ""  # the source package that a Debian package was built from, where its name differs


@dataclass(frozen=True)
class PackageRow:
    """An installed package and the bytes of its files: in all layers, and the visible part of them.

    `used_bytes` are of those that a keep-list names; None without such a list.
    """

    manager: str
    name: str
    version: str
    place: str
    unpacked_bytes: int
    visible_bytes: int
    n_files: int
    used_bytes: int | None = None


@dataclass
class Ownership:
    """`owner[row]` is a position in `packages`; position 0 means none.

    `left_out` counts those beyond the limit.
    """

    packages: list[Package]
    owner: "array[int]"
    left_out: int = 0


def find_owners(merged: Merged) -> Ownership:
    """Who owns each member of the image's final tree."""
    databases = list(_databases(merged))
    ownership = Ownership([Package(Manager.DEB, "", "")], array("i", bytes(4 * len(merged.visible))))
    finder = Finder(merged)
    for package, paths in chain(
        _deb_packages(databases, finder), _python_packages(databases), _conda_packages(databases)
    ):
        if len(ownership.packages) > _MOST_PACKAGES:
            ownership.left_out += 1
            continue
        number = len(ownership.packages)
        ownership.packages.append(_readable(package))
        for path in paths:
            row = finder.row(path)
            if row is not None and ownership.owner[row] == UNOWNED:
                ownership.owner[row] = number
    return ownership


def _readable(package: Package) -> Package:
    """The package with names fit to be shown: they come from the image and may hold anything."""
    fields = package.name, package.version, package.place, package.architecture, package.source
    return Package(package.manager, *map(terminal, fields))


# Files that no database lists.


def assign_unlisted_files(merged: Merged, ownership: Ownership) -> None:
    """Assign owners to unlisted files: hard links' content, bytecode, what later layers replaced, ROCm."""
    for link, row in merged.links.items():
        if ownership.owner[row] == UNOWNED:
            ownership.owner[row] = ownership.owner[link]
    _assign_bytecode(merged, ownership)
    _assign_hidden(merged, ownership)
    _assign_rocm(merged, ownership)


def _assign_bytecode(merged: Merged, ownership: Ownership) -> None:
    """Bytecode that no list names belongs to the owner of its source."""
    finder = Finder(merged)
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, (directory, name) in enumerate(zip(index.dirs, index.names, strict=True)):
            if name[-4:] == b".pyc" and ownership.owner[start + at] == UNOWNED:
                source = _PYC.match(name)
                if source and directory.endswith(b"__pycache__"):
                    row = finder.row(directory[: -len(b"__pycache__")] + source[1] + b".py")
                    if row is not None:
                        ownership.owner[start + at] = ownership.owner[row]


def _assign_hidden(merged: Merged, ownership: Ownership) -> None:
    """A replaced file belongs to the owner of the file that is there now."""
    finder = Finder(merged)
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, size in enumerate(index.sizes):
            if size and not merged.visible[start + at]:
                row = finder.row(index.path(at))
                if row is not None:
                    ownership.owner[start + at] = ownership.owner[row]


def _assign_rocm(merged: Merged, ownership: Ownership) -> None:
    """What is left below /opt/rocm* belongs to ROCm's components, each of them a package."""
    numbers: dict[Component, int] = {}
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, (directory, name, size) in enumerate(zip(index.dirs, index.names, index.sizes, strict=True)):
            if not size or ownership.owner[start + at] != UNOWNED or directory[:8] != b"opt/rocm":
                continue
            part = component_of(directory, name)
            if part is None:
                continue
            if part not in numbers and len(numbers) >= _MOST_COMPONENTS:
                part = Component(part.place, part.version, "rocm")
            if part not in numbers:
                numbers[part] = len(ownership.packages)
                package = Package(Manager.ROCM, part.name, part.version, part.place)
                ownership.packages.append(_readable(package))
            ownership.owner[start + at] = numbers[part]


# What each manager lists.


@dataclass(frozen=True)
class _Database:
    """A captured file of the final tree, kept compressed: all of them at once would take too much memory."""

    directory: str
    name: str
    index: LayerIndex
    row: int

    def lines(self) -> Iterator[bytes]:
        """Return the file's lines."""
        return lines(self.index.pieces(self.row))

    def text(self) -> str:
        """Return the file's content as text."""
        return b"".join(self.index.pieces(self.row)).decode("utf-8", "replace")


def _databases(merged: Merged) -> Iterator[_Database]:
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at in index.captured:
            if merged.visible[start + at]:
                directory = index.dirs[at].decode("utf-8", "surrogateescape")
                yield _Database(directory, index.names[at].decode("utf-8", "surrogateescape"), index, at)


_ListedFiles = tuple[Package, Iterable[bytes]]


def _deb_packages(databases: list[_Database], finder: Finder) -> Iterator[_ListedFiles]:
    lists = {row.name.removesuffix(".list"): row for row in databases if row.directory.endswith("dpkg/info")}
    distroless = {row.name: row for row in databases if row.directory.endswith("dpkg/status.d")}
    for row in databases:
        if row.directory == "var/lib/dpkg":  # only its status is captured
            info = _info_files(finder)
            for deb in deb_packages(row.lines()):
                stems = (f"{deb.name}:{deb.architecture}", deb.name)
                listing = next((lists.pop(stem) for stem in stems if stem in lists), None)
                own = [path for stem in stems for path in info.pop(stem, ())]
                files = _DPKG_FILES if deb.name == "dpkg" else ()
                listed = map(_relative, listing.lines()) if listing else ()
                yield deb.package(), chain(listed, own, files)
    for row in distroless.values():
        for deb in deb_packages(row.lines()):
            listing = distroless.get(f"{row.name}.md5sums")
            paths = (line.partition(b"  ")[2] for line in listing.lines()) if listing else ()
            yield deb.package(), map(_relative, paths)


def _info_files(finder: Finder) -> dict[str, list[bytes]]:
    """dpkg's own files about packages, by what stands before their ending: `name` or `name:architecture`."""
    files_of: dict[str, list[bytes]] = {}
    for name in finder.names(_DPKG_INFO):
        stem, _, end = name.rpartition(b".")
        if end in _DPKG_ENDS:
            files_of.setdefault(stem.decode("utf-8", "surrogateescape"), []).append(
                join_path(_DPKG_INFO, name)
            )
    return files_of


_DPKG_INFO = b"var/lib/dpkg/info"
_DPKG_ENDS = frozenset(
    b"list md5sums conffiles shlibs symbols triggers templates preinst postinst prerm postrm config".split()
)
_DPKG_FILES = (b"var/lib/dpkg/status", b"var/lib/dpkg/status-old", b"var/lib/dpkg/available")
_INSTALLERS = (b"INSTALLER", b"RECORD", b"REQUESTED", b"direct_url.json")


def _python_packages(databases: list[_Database]) -> Iterator[_ListedFiles]:
    metadata = {row.directory: row for row in databases if row.name == "METADATA"}
    for row in databases:
        if row.name == "RECORD" and row.directory.endswith(".dist-info"):
            site, _, info = row.directory.rpartition("/")
            name, _, version = info.removesuffix(".dist-info").partition("-")
            metadata_file = metadata.get(row.directory)
            declared = python_name(metadata_file.lines()) if metadata_file else (None, None)
            package = Package(Manager.PYTHON, declared[0] or name, declared[1] or version, site)
            # installers list neither bytecode that was compiled later nor always their own files
            unlisted = (join_path(_raw(row.directory), end) for end in _INSTALLERS)
            yield package, chain(recorded_paths(row.lines(), _raw(site)), unlisted)


def _conda_packages(databases: list[_Database]) -> Iterator[_ListedFiles]:
    for row in databases:
        if row.directory.endswith("conda-meta"):  # only its JSON is captured
            conda = conda_package(row.text())
            if conda:
                prefix = row.directory.removesuffix("conda-meta")
                paths = (prefix + path for path in chain(conda.files, (f"conda-meta/{row.name}",)))
                package = Package(Manager.CONDA, conda.name, conda.version, prefix.removesuffix("/"))
                yield package, (_relative(_raw(path)) for path in paths)


def _relative(path: bytes) -> bytes:
    return path.lstrip(b"/")


def _raw(text: str) -> bytes:
    """A path's bytes. Lone surrogates of a JSON text name no file, but must not stop anything."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


# The databases' formats.

LINE_BYTES = 16 << 10  # of a line that are read: a path has at most 4 KiB, in RECORD with quotes and a digest
_MOST_MEMBERS = 1000  # members of a conda-meta file's object that are read; conda writes about 30
_STATUS_FIELDS = frozenset({b"Package", b"Version", b"Architecture", b"Source", b"Status"})
_METADATA_FIELDS = frozenset({b"Name", b"Version"})


@dataclass(frozen=True)
class DebPackage:
    """A package that dpkg has installed."""

    name: str
    version: str
    architecture: str
    source: str = ""

    def package(self) -> Package:
        """It, as an installed package."""
        return Package(
            Manager.DEB, self.name, self.version, architecture=self.architecture, source=self.source
        )


@dataclass(frozen=True)
class CondaPackage:
    """A package of a conda environment; `files` are relative to the environment and can be read once."""

    name: str
    version: str
    files: Iterator[str]


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a text that comes in pieces, without their ends, each cut at LINE_BYTES."""
    rest = b""
    for piece in pieces:
        whole = (rest + piece).split(b"\n")
        rest = whole.pop()[:LINE_BYTES]
        for line in whole:
            yield line[:LINE_BYTES].rstrip(b"\r")
    if rest:
        yield rest.rstrip(b"\r")


def deb_packages(status: Iterable[bytes]) -> Iterator[DebPackage]:
    """The installed packages in the lines of a dpkg status file, each name and architecture once."""
    seen: set[tuple[bytes, bytes]] = set()
    for fields in _stanzas(status):
        name, architecture = fields.get(b"Package", b""), fields.get(b"Architecture", b"")
        installed = fields.get(b"Status", b"ok installed").endswith(b" installed")
        if name and installed and (name, architecture) not in seen:
            seen.add((name, architecture))
            rest = (fields.get(key, b"") for key in (b"Version", b"Architecture", b"Source"))
            yield DebPackage(_decoded(name), *map(_decoded, rest))


def python_name(metadata: Iterable[bytes]) -> tuple[str | None, str | None]:
    """Name and version in the lines of a METADATA file; None for what it doesn't contain."""
    fields = next(_stanzas(metadata, _METADATA_FIELDS), {})
    name, version = fields.get(b"Name"), fields.get(b"Version")
    return _decoded(name) if name is not None else None, _decoded(version) if version is not None else None


def recorded_paths(record: Iterable[bytes], site: bytes) -> Iterator[bytes]:
    """The files in the lines of a RECORD, which are relative to `site`, as paths without a leading slash."""
    for line in record:
        if line.startswith(b'"'):
            path = line[1:].partition(b'",')[0].replace(b'""', b'"')
        else:
            path = line.partition(b",")[0]
        if path:
            whole = path if path.startswith(b"/") else site + b"/" + path
            odd = b"/." in whole or b"//" in whole
            yield posixpath.normpath(b"/" + whole).lstrip(b"/") if odd else whole.lstrip(b"/")


def conda_package(text: str) -> CondaPackage | None:
    """The package in a file of conda-meta; None for an unrelated file in that directory."""
    try:
        spans = dict(islice(members(text), _MOST_MEMBERS))
        name = next(strings(text, spans["name"]))
        version = next(strings(text, spans["version"]))
        for _ in strings(text, spans["files"]):  # all of them must be strings before any is used
            pass
    except (ValueError, KeyError, StopIteration):
        return None
    return CondaPackage(name, version, strings(text, spans["files"]))


def _stanzas(
    text: Iterable[bytes], wanted: frozenset[bytes] = _STATUS_FIELDS
) -> Iterator[dict[bytes, bytes]]:
    """The wanted fields of each stanza; blank lines part them, and of equal fields the last one counts."""
    fields: dict[bytes, bytes] = {}
    for line in text:
        key, colon, value = line.partition(b":")
        if colon and key in wanted:  # continuations of fields begin with a blank, and no key does
            fields[key] = value.strip()
        elif fields and not line.strip():
            yield fields
            fields = {}
    if fields:
        yield fields


# Components of ROCm, by path.

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
    place, version = _decoded(root[0]), _decoded(root[1] or b"")
    parts = directory[root.end() + 1 :].split(b"/")
    common = b""
    while parts and parts[0] in (_COMMON if not common else _BELOW_COMMON):
        common = parts.pop(0)
    part = parts[0] if parts else _library(name) or common
    lower = _decoded(part).lower()
    return Component(place, version, _ONE_COMPONENT.get(lower, lower) or "rocm")


def _library(name: bytes) -> bytes | None:
    """A library's name without `lib` and its ending; None for other files."""
    if not name.startswith(b"lib"):
        return None
    shared = _SHARED.search(name, 4)
    if shared:
        return name[3 : shared.start()]
    return name[3:-2] if name.endswith(b".a") else None


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
