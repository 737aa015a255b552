"""Where an image's blobs come from: an engine's stream, an archive file, an OCI layout directory.

All give the same: named blobs, each read once, hashed, and indexed where it is a layer.
"""

import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from buildtool.core.errors import DataError
from buildtool.core.files import PathKind, kind_of_path, reading
from buildtool.image.errors import (
    LIMITS,
    ImageError,
    LimitExceeded,
    Limits,
    MalformedDocument,
    MalformedStream,
    MalformedTar,
    Truncated,
)
from buildtool.image.layer import Inspect, LayerIndex, index_layer
from buildtool.image.streams import LAYER_FORMS, Allowance, Form, Meter, ReadAhead, decompressed, peek, sniff
from buildtool.image.tar import FILE, HARDLINK, SYMLINK, TarReader, normal_path

MISSING = "check the path and its permissions; the engine's images: docker images"
FORMS = "an image archive is what `docker save IMAGE -o FILE` writes, or an OCI layout"
_TREE = f"{FORMS}; for GPU code in a tree of files: weir prune --dry-run --targets GFX DIRECTORY"
CHUNK = 1 << 18
Tick = Callable[[int], None]  # is called with the number of further bytes read

# Blobs.


@dataclass(frozen=True)
class Blob:
    """One blob, after it was read.

    `digest` and `stored_bytes` are of the blob as the archive stores it, `diff_id` and `tar_bytes`
    after decompression. A blob that looked like a layer and couldn't be read keeps its error, since
    only a manifest can say whether it matters.
    """

    form: Form
    digest: str | None = None
    stored_bytes: int = 0
    document: bytes | None = None
    index: LayerIndex | None = None
    diff_id: str | None = None
    tar_bytes: int = 0
    error: ImageError | None = None


@dataclass(frozen=True)
class Bounds:
    """The limits of one blob, which has `stored_bytes` (None where that isn't known).

    `room_bytes` is memory for its index, `allowance` that of the whole archive.
    """

    limits: Limits = LIMITS
    room_bytes: int | None = None
    allowance: Allowance | None = None
    inspect: Inspect | None = None
    stored_bytes: int | None = None

    @property
    def most_unpacked_bytes(self) -> int | None:
        """What the files of a compressed layer may take."""
        if self.stored_bytes is None:
            return None
        free = max(self.limits.unpacked_free_bytes, self.limits.layer_free_bytes)
        return max(free, self.limits.unpacked_ratio * self.stored_bytes)


def read_blob(chunks: Iterator[bytes], path: str, bounds: Bounds) -> Blob:
    """Read a blob once: hash it, keep it if it is JSON, index it if it is a layer."""
    meter = Meter()
    head, rest = peek(meter.through(chunks))
    form = sniff(head)
    blob = Blob(form)
    if form is Form.JSON:
        most = bounds.limits.document_bytes
        kept = [piece for piece in rest if meter.n_bytes <= most]
        blob = replace(blob, document=b"".join(kept) if meter.n_bytes <= most else None)
    elif form not in LAYER_FORMS:
        for _ in rest:
            pass
    else:
        try:
            blob = _read_layer(rest, blob, meter, path, bounds)
        except ImageError as error:
            return replace(blob, error=error)
    return replace(blob, digest=meter.digest, stored_bytes=meter.n_bytes)


_SMALL_CHUNKS = 3  # a smaller layer isn't worth threads


def _read_layer(rest: Iterator[bytes], blob: Blob, meter: Meter, path: str, bounds: Bounds) -> Blob:
    limits = bounds.limits
    plain = meter if blob.form is Form.TAR else Meter()
    first = list(islice(rest, _SMALL_CHUNKS))
    pieces = decompressed(
        chain(first, rest), blob.form, place=path, limits=limits, allowance=bounds.allowance
    )
    # a thread each: read, hash and decompress; hash again. This thread walks the tar
    with ExitStack() as stages:
        if len(first) == _SMALL_CHUNKS:
            pieces = iter(stages.enter_context(ReadAhead(pieces)))
        if plain is not meter:
            pieces = plain.through(pieces)
            if len(first) == _SMALL_CHUNKS:
                pieces = iter(stages.enter_context(ReadAhead(pieces)))
        reader = TarReader(pieces, place=path, limits=limits)
        index = index_layer(
            reader,
            place=path,
            limits=limits,
            room_bytes=bounds.room_bytes,
            most_bytes=None if plain is meter else bounds.most_unpacked_bytes,
            inspect=bounds.inspect,
        )
    return replace(blob, index=index, diff_id=plain.digest, tar_bytes=plain.n_bytes)


# Archives.

_LISTS = ("index.json", "manifest.json", "oci-layout", "repositories")  # one of them marks a layout


class Archive(Protocol):
    """Named blobs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Oddities of the tar that holds them, which was read nevertheless."""

    def paths(self) -> frozenset[str]:
        """Every blob's path in the archive."""

    def blob(self, path: str) -> Blob:
        """Read one blob. Raises KeyError for a path that isn't there."""


def open_archive(
    path: Path, *, limits: Limits = LIMITS, tick: Tick = lambda _: None, inspect: Inspect | None = None
) -> Archive:
    """The image archive or layout at a path. Raises DataError where there is none, ImageError."""
    if kind_of_path(path) is PathKind.DIRECTORY:
        return DirectoryArchive(path, limits=limits, tick=tick, inspect=inspect)
    with open_file(path) as handle:
        if sniff(os.read(handle, 512)) is Form.TAR:
            return FileArchive(path, limits=limits, tick=tick, inspect=inspect)
        os.lseek(handle, 0, os.SEEK_SET)
        chunks = iter(partial(os.read, handle, CHUNK), b"")
        return StreamArchive(chunks, label=str(path), limits=limits, tick=tick, inspect=inspect)


class StreamArchive:
    """A tar stream that is read once: each blob is read as it passes, before it is known what it is."""

    def __init__(
        self,
        chunks: Iterator[bytes],
        *,
        label: str,
        limits: Limits = LIMITS,
        tick: Tick = lambda _: None,
        inspect: Inspect | None = None,
    ) -> None:
        self._blobs: dict[str, Blob] = {}
        self._aliases: dict[str, str] = {}
        index_room, document_room = limits.index_bytes, limits.documents_bytes
        allowance = Allowance(limits)
        reader = _outer_reader(allowance.counted(_ticking(chunks, tick)), label, limits, allowance)
        for path, length in _files(reader, self._blobs, self._aliases, place=label, limits=limits):
            archive_errors: list[ImageError] = []
            bounds = Bounds(limits, index_room, allowance, inspect, length)
            blob = read_blob(_collecting_errors(reader.content(), archive_errors), path, bounds)
            if archive_errors:  # of the archive, not of the blob
                raise archive_errors[0]
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

    def __init__(self, limits: Limits, tick: Tick, inspect: Inspect | None) -> None:
        self._limits, self._tick, self._inspect = limits, tick, inspect
        self._room_bytes = limits.index_bytes
        self._allowance = Allowance(limits)

    def _read(self, handle: int, path: str, start: int, length: int) -> Blob:
        chunks = _ticking(read_span(handle, start, length), self._tick)
        bounds = Bounds(self._limits, self._room_bytes, self._allowance, self._inspect, length)
        blob = read_blob(chunks, path, bounds)
        self._room_bytes -= blob.index.index_bytes if blob.index else 0
        return blob


class FileArchive(_SeekableArchive):
    """An uncompressed archive file: its headers are walked once, its blobs are read in place."""

    def __init__(
        self,
        file: Path,
        *,
        limits: Limits = LIMITS,
        tick: Tick = lambda _: None,
        inspect: Inspect | None = None,
    ) -> None:
        super().__init__(limits, tick, inspect)
        self._file = file
        self._spans: dict[str, tuple[int, int]] = {}
        self._aliases: dict[str, str] = {}
        with open_file(file) as handle:
            self._allowance = Allowance(limits, os.fstat(handle).st_size)
            reader = header_reader(handle, place=str(file), limits=limits)
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
        with open_file(self._file) as handle:
            return self._read(handle, path, start, length)


class DirectoryArchive(_SeekableArchive):
    """An OCI layout, or an unpacked `docker save`, in a directory. Links are not followed."""

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        root: Path,
        *,
        limits: Limits = LIMITS,
        tick: Tick = lambda _: None,
        inspect: Inspect | None = None,
    ) -> None:
        super().__init__(limits, tick, inspect)
        self._root = root
        try:
            self._paths = frozenset(files_below(root))
            stored_bytes = sum((root / path).lstat().st_size for path in self._paths)
        except OSError as error:
            message = f"can't read {error.filename}: {error.strerror}"
            raise DataError(message, "check its permissions") from error
        if self._paths.isdisjoint(_LISTS):
            raise MalformedDocument(
                f"no image layout: none of {', '.join(_LISTS)}", place=str(root), hint=_TREE
            )
        self._allowance = Allowance(limits, stored_bytes)

    def paths(self) -> frozenset[str]:
        """Every regular file's path."""
        return self._paths

    def blob(self, path: str) -> Blob:
        """Read one file. Raises KeyError, DataError and as `read_blob` does."""
        if path not in self._paths:
            raise KeyError(path)
        with open_file(self._root / path) as handle:
            return self._read(handle, path, 0, os.fstat(handle).st_size)


# Members of an archive's own tar.


def _outer_reader(chunks: Iterator[bytes], label: str, limits: Limits, allowance: Allowance) -> TarReader:
    head, rest = peek(chunks)
    form = sniff(head)
    if form not in (Form.TAR, Form.GZIP, Form.ZSTD):
        raise MalformedStream("not a tar archive, compressed or plain", place=label, hint=FORMS)
    if form is not Form.TAR:
        rest = decompressed(rest, form, place=label, limits=limits, allowance=allowance)
    return TarReader(rest, place=label, limits=limits)


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


def member_path(raw: bytes) -> str:
    """A member's path in an image archive, without leading `./`."""
    return normal_path(raw.decode("utf-8", "surrogateescape"))


def _link_target(path: str, kind: int, link: bytes) -> str:
    folder = posixpath.dirname(path).encode("utf-8", "surrogateescape")
    return member_path(posixpath.join(folder, link) if kind == SYMLINK else link)


def _resolved(path: str, aliases: Mapping[str, str]) -> str:
    """Where a path leads after eight links at most; a longer chain, or a circle, leads to no blob."""
    for _ in range(8):
        path = aliases.get(path, path)
    return path


def _collecting_errors(chunks: Iterator[bytes], errors: list[ImageError]) -> Iterator[bytes]:
    """The chunks up to an error, which is added to `errors`."""
    try:
        yield from chunks
    except ImageError as error:
        errors.append(error)


def _ticking(chunks: Iterator[bytes], tick: Tick) -> Iterator[bytes]:
    for chunk in chunks:
        tick(len(chunk))
        yield chunk


# Files.


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """A regular file's descriptor. Raises DataError for anything else and for what can't be read."""
    with reading(path, MISSING):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer doesn't block
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DataError(f"{path} is not a file", FORMS)
        with reading(path, "check the disk"):
            yield handle
    finally:
        os.close(handle)


def files_below(root: Path) -> Iterator[str]:
    """Every regular file's path below a directory, links not followed. Raises OSError, naming the path."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{path}/")
                elif entry.is_file(follow_symlinks=False):
                    yield path


def header_reader(handle: int, *, place: str, limits: Limits = LIMITS) -> TarReader:
    """A reader of an open file's tar that passes over content without reading it."""
    size = os.fstat(handle).st_size

    def leap(distance: int) -> int:
        here = os.lseek(handle, 0, os.SEEK_CUR)
        return os.lseek(handle, min(here + distance, size), os.SEEK_SET) - here

    chunks = iter(partial(os.read, handle, 64 << 10), b"")
    return TarReader(chunks, place=place, limits=limits, leap=leap)


def read_span(handle: int, start: int, length: int) -> Iterator[bytes]:
    """A part of an open file in chunks, without moving its position."""
    at, end = start, start + length
    while chunk := os.pread(handle, min(CHUNK, end - at), at):
        at += len(chunk)
        yield chunk
