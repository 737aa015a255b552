"""Package databases as images hold them: dpkg's status and lists, Python's RECORD and METADATA, conda's JSON.

Their text comes from strangers: each reader takes time linear in it, holds one line of it at a time (conda's
JSON, which has no lines, once as text), and skips what it can't read.
"""

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from buildtool.jsontext import members, strings

LINE_BYTES = 16 << 10  # of a line that are read: a path has at most 4 KiB, in RECORD with quotes and a digest
_MOST_MEMBERS = 1000  # members of a conda-meta file's object that are read; conda writes about 30
_STATUS_FIELDS = frozenset({b"Package", b"Version", b"Architecture", b"Status"})
_METADATA_FIELDS = frozenset({b"Name", b"Version"})


@dataclass(frozen=True)
class DebPackage:
    """A package that dpkg has installed."""

    name: str
    version: str
    architecture: str


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
        found = (rest + piece).split(b"\n")
        rest = found.pop()[:LINE_BYTES]
        for line in found:
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
            yield DebPackage(_text(name), _text(fields.get(b"Version", b"")), _text(architecture))


def python_name(metadata: Iterable[bytes]) -> tuple[str | None, str | None]:
    """Name and version in the lines of a METADATA file; None for what it doesn't contain."""
    fields = next(_stanzas(metadata, _METADATA_FIELDS), {})
    name, version = fields.get(b"Name"), fields.get(b"Version")
    return _text(name) if name is not None else None, _text(version) if version is not None else None


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


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
