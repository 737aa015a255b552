"""Where an image's blobs come from: an engine's stream, an archive file, an OCI layout directory.

All give the same: named blobs, each hashed and, where it is a layer, indexed.
"""

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from buildtool.audit.read.blob import Blob, Bounds, read_blob
from buildtool.audit.read.openfile import CHUNK, FORMS, files_below, headers_of, opened, span
from buildtool.audit.tar.faults import (
    ImageFault,
    LimitExceeded,
    MalformedDocument,
    MalformedStream,
    MalformedTar,
    Truncated,
)
from buildtool.audit.tar.limits import LIMITS, Limits
from buildtool.audit.tar.tarwalk import FILE, HARDLINK, SYMLINK, TarReader
from buildtool.audit.tar.unpack import Allowance, Form, decompressed, peek, sniff
from buildtool.errors import DataError
from buildtool.places import Place, place_at

_LISTS = ("index.json", "manifest.json", "oci-layout", "repositories")  # one of them marks a layout
Tick = Callable[[int], None]  # is called with the number of further bytes read


class Archive(Protocol):
    """Named blobs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Oddities of the tar that holds them, which was read nevertheless."""

    def paths(self) -> frozenset[str]:
        """Every blob's path in the archive."""

    def blob(self, path: str) -> Blob:
        """Read one blob. Raises KeyError for a path that isn't there."""


class StreamArchive:
    """A tar stream that is read once: each blob is read as it passes, before it is known what it is."""

    def __init__(
        self, chunks: Iterator[bytes], *, label: str, limits: Limits = LIMITS, tick: Tick = lambda _: None
    ) -> None:
        self._blobs: dict[str, Blob] = {}
        self._aliases: dict[str, str] = {}
        index_room, document_room = limits.index_bytes, limits.documents_bytes
        allowance = Allowance(limits)
        reader = _outer_reader(allowance.counted(_ticking(chunks, tick)), label, limits, allowance)
        for path, _ in _files(reader, self._blobs, self._aliases, place=label, limits=limits):
            outer: list[ImageFault] = []
            bounds = Bounds(limits, index_room, allowance)
            blob = read_blob(_noting_faults(reader.content(), outer), path, bounds)
            if outer:  # a fault of the archive, not of the blob
                raise outer[0]
            index_room -= blob.index.index_bytes if blob.index else 0
            document_room -= len(blob.document or b"")
            if document_room < 0:
                raise LimitExceeded("more JSON documents than an image has", place=label)
            self._blobs[path] = blob
        self.notes = tuple(reader.notes)

    def paths(self) -> frozenset[str]:
        """Every blob's path."""
        return frozenset(self._blobs) | frozenset(self._aliases)

    def blob(self, path: str) -> Blob:
        """The blob as it was read. Raises KeyError."""
        return self._blobs[_resolved(path, self._aliases)]


class _SeekableArchive:
    """Blobs that can be read when asked for, in any order."""

    def __init__(self, limits: Limits, tick: Tick) -> None:
        self._limits, self._tick = limits, tick
        self._room_bytes = limits.index_bytes
        self._allowance = Allowance(limits)

    def _read(self, handle: int, path: str, start: int, length: int) -> Blob:
        chunks = _ticking(span(handle, start, length), self._tick)
        blob = read_blob(chunks, path, Bounds(self._limits, self._room_bytes, self._allowance))
        self._room_bytes -= blob.index.index_bytes if blob.index else 0
        return blob


class FileArchive(_SeekableArchive):
    """An uncompressed archive file: its headers are walked once, its blobs are read in place."""

    def __init__(self, file: Path, *, limits: Limits = LIMITS, tick: Tick = lambda _: None) -> None:
        super().__init__(limits, tick)
        self._file = file
        self._spans: dict[str, tuple[int, int]] = {}
        self._aliases: dict[str, str] = {}
        with opened(file) as handle:
            self._allowance = Allowance(limits, os.fstat(handle).st_size)
            reader = headers_of(handle, place=str(file), limits=limits)
            for path, length in _files(reader, self._spans, self._aliases, place=str(file), limits=limits):
                self._spans[path] = (reader.offset, length)
            self.notes = tuple(reader.notes)

    def paths(self) -> frozenset[str]:
        """Every blob's path."""
        return frozenset(self._spans) | frozenset(self._aliases)

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each blob is in the file: offset and bytes."""
        return tuple(self._spans.values())

    def blob(self, path: str) -> Blob:
        """Read one blob. Raises KeyError, DataError and as `read_blob` does."""
        start, length = self._spans[_resolved(path, self._aliases)]
        with opened(self._file) as handle:
            return self._read(handle, path, start, length)


class DirectoryArchive(_SeekableArchive):
    """An OCI layout, or an unpacked `docker save`, in a directory. Links are not followed."""

    notes: tuple[str, ...] = ()

    def __init__(self, root: Path, *, limits: Limits = LIMITS, tick: Tick = lambda _: None) -> None:
        super().__init__(limits, tick)
        self._root = root
        try:
            self._paths = frozenset(files_below(root))
        except OSError as error:
            message = f"can't read {error.filename}: {error.strerror}"
            raise DataError(message, "check its permissions") from error
        if self._paths.isdisjoint(_LISTS):
            raise MalformedDocument(
                f"no image layout: none of {', '.join(_LISTS)}", place=str(root), hint=FORMS
            )

    def paths(self) -> frozenset[str]:
        """Every regular file's path."""
        return self._paths

    def blob(self, path: str) -> Blob:
        """Read one file. Raises KeyError, DataError and as `read_blob` does."""
        if path not in self._paths:
            raise KeyError(path)
        with opened(self._root / path) as handle:
            return self._read(handle, path, 0, os.fstat(handle).st_size)


def open_archive(path: Path, *, limits: Limits = LIMITS, tick: Tick = lambda _: None) -> Archive:
    """The image archive or layout at a path. Raises DataError where there is none, ImageFault."""
    if place_at(path) is Place.DIRECTORY:
        return DirectoryArchive(path, limits=limits, tick=tick)
    with opened(path) as handle:
        if sniff(os.read(handle, 512)) is Form.TAR:
            return FileArchive(path, limits=limits, tick=tick)
        os.lseek(handle, 0, os.SEEK_SET)
        chunks = iter(partial(os.read, handle, CHUNK), b"")
        return StreamArchive(chunks, label=str(path), limits=limits, tick=tick)


def member_path(raw: bytes) -> str:
    """A member's path in an image archive, without leading `./`."""
    return posixpath.normpath("/" + raw.decode("utf-8", "surrogateescape")).lstrip("/")


def _link_target(path: str, kind: int, link: bytes) -> str:
    folder = posixpath.dirname(path).encode("utf-8", "surrogateescape")
    return member_path(posixpath.join(folder, link) if kind == SYMLINK else link)


def _resolved(path: str, aliases: Mapping[str, str]) -> str:
    """Where a path leads after eight links at most; a longer chain, or a circle, leads to no blob."""
    for _ in range(8):
        path = aliases.get(path, path)
    return path


def _files(
    reader: TarReader, known: Mapping[str, object], aliases: dict[str, str], *, place: str, limits: Limits
) -> Iterator[tuple[str, int]]:
    """Path and bytes of each file in an archive, which has to be whole; links are added to `aliases`.

    `known` are the files so far. Raises LimitExceeded, MalformedTar, Truncated.
    """
    for raw, kind, length, link in reader:
        path = member_path(raw)
        if len(known) + len(aliases) > limits.index_bytes // 1024:
            raise LimitExceeded("more members than an image archive has", place=place)
        if kind in (SYMLINK, HARDLINK):
            aliases[path] = _link_target(path, kind, link)
        elif kind == FILE:
            # blobs are identified by digest, others by name alone
            if path in known and not path.startswith("blobs/"):
                raise MalformedTar(f"the archive holds {path} twice", place=place)
            yield path, length
    if not reader.ended:
        raise Truncated("the archive has no end marker", place=place)
    reader.drain()


def _outer_reader(chunks: Iterator[bytes], label: str, limits: Limits, allowance: Allowance) -> TarReader:
    head, rest = peek(chunks)
    form = sniff(head)
    if form not in (Form.TAR, Form.GZIP, Form.ZSTD):
        raise MalformedStream("not a tar archive, compressed or plain", place=label, hint=FORMS)
    if form is not Form.TAR:
        rest = decompressed(rest, form, place=label, limits=limits, allowance=allowance)
    return TarReader(rest, place=label, limits=limits)


def _noting_faults(chunks: Iterator[bytes], faults: list[ImageFault]) -> Iterator[bytes]:
    """The chunks up to a fault, which is added to `faults`."""
    try:
        yield from chunks
    except ImageFault as fault:
        faults.append(fault)


def _ticking(chunks: Iterator[bytes], tick: Tick) -> Iterator[bytes]:
    for chunk in chunks:
        tick(len(chunk))
        yield chunk
