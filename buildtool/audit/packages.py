"""Which package a file belongs to, by the image's own databases: dpkg's, Python's, conda's.

A file has one owner: the first of Debian, Python, conda that lists it. What nobody lists below /opt/rocm*
belongs to a component of ROCm. Bytes are real file sizes.
"""

import json
import posixpath
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from buildtool.audit.layer import LayerIndex, split
from buildtool.audit.merge import Finder, Merged
from buildtool.audit.rocmtree import Component, component_of
from buildtool.quoting import terminal

UNOWNED = 0
_MOST_COMPONENTS = 1000  # of ROCm; names from a path need a bound
_PYC = re.compile(rb"(.+)\.cpython-[0-9]+[a-z]*(\.opt-[12])?\.pyc$")


class Manager(Enum):
    """Who installed a package."""

    DEB = "deb"
    PYTHON = "python"
    CONDA = "conda"
    ROCM = "rocm tree"  # nobody's list, told by the path


@dataclass(frozen=True)
class Package:
    """An installed package, before its bytes are known."""

    manager: Manager
    name: str
    version: str
    place: str = ""  # the directory it is installed in, where that isn't the whole system


@dataclass
class Ownership:
    """`owner[row]` is a position in `packages`; position 0 stands for none."""

    packages: list[Package] = field(default_factory=list)
    owner: "array[int]" = field(default_factory=lambda: array("i"))


@dataclass(frozen=True)
class _Database:
    """A captured file of the final tree, kept compressed: all of them at once would take too much memory."""

    directory: str
    name: str
    index: LayerIndex
    row: int

    @property
    def text(self) -> str:
        """Its content."""
        return self.index.text(self.row)


def find_owners(merged: Merged) -> Ownership:
    """Who owns each member of the image's final tree."""
    databases = list(_databases(merged))
    ownership = Ownership([Package(Manager.DEB, "", "")], array("i", bytes(4 * len(merged.visible))))
    finder = Finder(merged)
    for package, paths in chain(
        _deb_packages(databases), _python_packages(databases), _conda_packages(databases)
    ):
        number = len(ownership.packages)
        ownership.packages.append(_readable(package))
        for path in paths:
            row = finder.row(path)
            if row is not None and ownership.owner[row] == UNOWNED:
                ownership.owner[row] = number
    return ownership


def claim_leftovers(merged: Merged, ownership: Ownership) -> None:
    """Give owners to what no list names: hard links' content, bytecode, what later layers replaced, ROCm."""
    for link, row in merged.links.items():
        if ownership.owner[row] == UNOWNED:
            ownership.owner[row] = ownership.owner[link]
    _claim_bytecode(merged, ownership)
    _claim_hidden(merged, ownership)
    _claim_rocm(merged, ownership)


def _claim_bytecode(merged: Merged, ownership: Ownership) -> None:
    """Bytecode that no list names belongs to whoever owns its source."""
    finder = Finder(merged)
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, (directory, name) in enumerate(zip(index.dirs, index.names, strict=True)):
            if name[-4:] == b".pyc" and ownership.owner[start + at] == UNOWNED:
                source = _PYC.match(name)
                if source and directory.endswith(b"__pycache__"):
                    row = finder.row(directory[: -len(b"__pycache__")] + source[1] + b".py")
                    if row is not None:
                        ownership.owner[start + at] = ownership.owner[row]


def _claim_hidden(merged: Merged, ownership: Ownership) -> None:
    """What a later layer replaced belongs to the owner of what is there now."""
    finder = Finder(merged)
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, size in enumerate(index.sizes):
            if size and not merged.visible[start + at]:
                row = finder.row(index.path(at))
                if row is not None:
                    ownership.owner[start + at] = ownership.owner[row]


def _claim_rocm(merged: Merged, ownership: Ownership) -> None:
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


def _readable(package: Package) -> Package:
    """The package with names fit to be shown: they come from the image and may hold anything."""
    fields = terminal(package.name), terminal(package.version), terminal(package.place)
    return Package(package.manager, *fields)


def _databases(merged: Merged) -> Iterator[_Database]:
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at in index.captured:
            if merged.visible[start + at]:
                directory = index.dirs[at].decode("utf-8", "surrogateescape")
                yield _Database(directory, index.names[at].decode("utf-8", "surrogateescape"), index, at)


_Claim = tuple[Package, Iterable[bytes]]


def _deb_packages(databases: list[_Database]) -> Iterator[_Claim]:
    lists = {row.name.removesuffix(".list"): row for row in databases if row.directory.endswith("dpkg/info")}
    sums = {row.name: row for row in databases if row.name.endswith(".md5sums")}
    for row in databases:
        if row.directory == "var/lib/dpkg" and row.name == "status":
            for name, version, architecture in parse_dpkg_status(row.text):
                found = lists.get(f"{name}:{architecture}") or lists.get(name)
                listed = found.text.splitlines() if found else ()
                stems = (name, f"{name}:{architecture}")
                own = [f"var/lib/dpkg/info/{stem}.{end}" for stem in stems for end in _DPKG_ENDS]
                paths = [*listed, *own, *(_DPKG_FILES if name == "dpkg" else ())]
                yield Package(Manager.DEB, name, version), map(_relative, paths)
        elif row.directory.endswith("dpkg/status.d") and not row.name.endswith(".md5sums"):  # distroless
            for name, version, _ in parse_dpkg_status(row.text):
                found = sums.get(f"{row.name}.md5sums")
                paths = [line.partition("  ")[2] for line in found.text.splitlines()] if found else []
                yield Package(Manager.DEB, name, version), map(_relative, paths)


_DPKG_SCRIPTS = ("preinst", "postinst", "prerm", "postrm", "config")
_DPKG_ENDS = ("list", "md5sums", "conffiles", "shlibs", "symbols", "triggers", "templates", *_DPKG_SCRIPTS)
_DPKG_FILES = ("var/lib/dpkg/status", "var/lib/dpkg/status-old", "var/lib/dpkg/available")


def parse_dpkg_status(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and architecture of each installed package in a dpkg status file."""
    for stanza in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): *(.*?) *$", stanza, re.MULTILINE))
        if "Package" in fields and fields.get("Status", "ok installed").endswith(" installed"):
            yield fields["Package"], fields.get("Version", ""), fields.get("Architecture", "")


def _python_packages(databases: list[_Database]) -> Iterator[_Claim]:
    metadata = {row.directory: row for row in databases if row.name == "METADATA"}
    for row in databases:
        if row.name == "RECORD" and row.directory.endswith(".dist-info"):
            site, _, info = row.directory.rpartition("/")
            name, _, version = info.removesuffix(".dist-info").partition("-")
            told = metadata.get(row.directory)
            head = told.text.partition("\n\n")[0] if told else ""
            fields = dict(re.findall(r"^(Name|Version): *(.*?) *$", head, re.MULTILINE))
            package = Package(Manager.PYTHON, fields.get("Name", name), fields.get("Version", version), site)
            yield package, _record_paths(row.text, site, row.directory)


def _record_paths(record: str, site: str, info: str) -> Iterator[bytes]:
    """The files that a RECORD lists, and the bytecode that was compiled from them after installation."""
    for line in record.splitlines():
        path = (
            line[1:].partition('",')[0].replace('""', '"') if line.startswith('"') else line.split(",", 1)[0]
        )
        whole = posixpath.normpath(path if path.startswith("/") else f"{site}/{path}").lstrip("/")
        yield whole.encode("utf-8", "surrogateescape")
    for name in ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json"):
        yield f"{info}/{name}".encode("utf-8", "surrogateescape")


def _conda_packages(databases: list[_Database]) -> Iterator[_Claim]:
    for row in databases:
        if row.directory.endswith("conda-meta") and row.name.endswith(".json"):
            prefix = row.directory.removesuffix("conda-meta")
            try:
                told = json.loads(row.text)
                name, version, files = str(told["name"]), str(told["version"]), list(map(str, told["files"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # somebody's own file in that directory
            paths = [prefix + path for path in (*files, f"conda-meta/{row.name}")]
            yield Package(Manager.CONDA, name, version, prefix.rstrip("/")), map(_relative, paths)


def _relative(path: str) -> bytes:
    raw = path.encode("utf-8", "surrogateescape")
    return raw.removeprefix(b"/").removeprefix(b"./") if b"/." not in raw else b"/".join(split(raw))
