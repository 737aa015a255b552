"""Packed tensors on disk, by content: what was packed once is read, not packed again.

An entry is named after the SHA-256 of the tensor's bytes, dtype and shape. A small file next to it notes
which range of which file (by inode, size and times, as git's index does) had which content: so a second load
finds the entry without reading the unpacked bytes. Both hold a digest that covers their own name, so one that
was damaged or copied over another is noticed and made again. Entries are written whole or not at all, and
several processes may use one folder.
"""

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Final, TypeVar

import torch

from probes.core.codec import decode, encode, load
from probes.core.files import replacing, sweep_partials, write_text
from probes.placement.packing.format import ALIGNMENT, PackedForm
from probes.placement.packing.packed import Packed, Put, form, outline, scattered
from probes.placement.packing.staging import HostBuffers, bytes_of
from probes.placement.packing.tensors import Values, pack_into

_VERSION: Final = 6  # of the layouts and of these files: another one has other names
_SETTLED_NS: Final = 100_000_000  # a file changed more recently may change again within one tick of its times


@dataclass(frozen=True)
class Origin:
    """The bytes `start` to `end` of a file, where a tensor of this dtype and shape is stored."""

    path: Path
    start: int
    end: int
    dtype: str  # torch's name
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()  # of its dimensions in memory, where that isn't the file's


@dataclass(frozen=True)
class Content:
    """A tensor that can be packed, as often as need be.

    `on_host` has the values piece by piece, `on_device` as a whole in a GPU's memory, if that has room.
    """

    on_host: Callable[[], Values]
    on_device: Callable[[], Values] | None = None
    dense: bool = False

    def values(self) -> Values:
        """In the GPU's memory where that is possible."""
        if self.on_device:
            with suppress(torch.cuda.OutOfMemoryError):
                return self.on_device()
        return self.on_host()

    def pack(self, put: Put | None, values: Values | None = None) -> Packed | None:
        """As `pack_into` does, on the host where the GPU has too little memory."""
        with suppress(torch.cuda.OutOfMemoryError):
            return pack_into(put, values or self.values(), dense=self.dense)
        return pack_into(put, self.on_host(), dense=self.dense)


def content_key(values: Values, *, dense: bool = False, buffers: HostBuffers | None = None) -> str:
    """The name of a tensor's content, 64 hexadecimal digits: of its bytes, dtype, shape and layout."""
    about = json.dumps([_VERSION, str(values.dtype), list(values.shape), dense])
    size = values.dtype.itemsize

    def piece(start: int, memory: torch.Tensor) -> bytes:
        first, last = start // size, (start + memory.numel()) // size
        values_read = values.read(first, last, memory)
        if values_read.device.type != "cpu":
            values_read = memory.copy_(values_read.view(torch.uint8))
        return hashlib.sha256(bytes_of(values_read)).digest()

    return digest_of(about, (buffers or HostBuffers()).each(prod(values.shape) * size, piece))


def origin_key(origin: Origin, dense: bool) -> str | None:
    """A name for a range of a file as it is now; None where the file is missing or was just written."""
    try:
        status = origin.path.stat()
    except OSError:
        return None
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
        return None
    times = [status.st_mtime_ns, status.st_ctime_ns]
    file = [status.st_dev, status.st_ino, status.st_size, *times]
    tensor = [origin.start, origin.end, origin.dtype, origin.shape, origin.order, dense]
    about = [_VERSION, file, tensor]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def digest_of(about: str, pieces: Iterable[bytes]) -> str:
    """SHA-256 of a text and of the digests of pieces."""
    return hashlib.sha256(about.encode() + b"".join(pieces)).hexdigest()


_MOST_HEADER: Final = 8 * ALIGNMENT


@dataclass(frozen=True)
class Header:
    """What is known of an entry before its bytes are read."""

    digest: str  # of the entry's key, the form's JSON and the bytes that follow
    early: str  # of the key, the form's JSON and the part `starts`, which are used before the rest is read
    form: PackedForm | None  # None: packing this tensor saves nothing


def open_regular(path: Path) -> BufferedReader:
    """An ordinary file, to be read. Raises OSError for anything else: nobody may write into a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        path.unlink()  # writing there would wait as well
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


@dataclass(frozen=True)
class CacheEntry:
    """An entry that is open."""

    descriptor: int
    key: str  # that it is kept under
    start: int  # of the bytes behind the header
    header: Header

    @staticmethod
    def of(file: BufferedReader, key: str) -> "CacheEntry":
        """Raises ValueError or KeyError for a file that isn't what was written."""
        line = file.readline(_MOST_HEADER)
        if not line.endswith(b"\n") or len(line) != _MOST_HEADER:
            raise ValueError("the header is cut")
        header = decode(Header, load(line))
        n_bytes = header.form.n_bytes if header.form else 0
        if os.fstat(file.fileno()).st_size != len(line) + n_bytes:
            raise ValueError("the file's size isn't its header's")
        return CacheEntry(file.fileno(), key, len(line), header)

    def outline(self) -> Packed | None:
        """Raises ValueError or KeyError likewise."""
        of = self.header.form
        starts = torch.empty(0, dtype=torch.int32, device="cpu")
        if of:
            names = [part.name for part in of.parts]
            at = names.index("starts")
            starts = torch.empty(of.parts[at].length, dtype=torch.int32, device="cpu")
            self._fill(of.offsets()[at], starts)
        if _early(self.key, of, starts) != self.header.early:
            raise ValueError("the outline isn't the one that was written")
        return outline(of, starts) if of else None

    def digest(self, buffers: HostBuffers, put: Put) -> str:
        """That of the key, the form and the bytes, which `put` gets."""
        of = self.header.form

        def piece(start: int, memory: torch.Tensor) -> bytes:
            self._fill(start, memory)
            put(start, memory)
            return hashlib.sha256(bytes_of(memory)).digest()

        return digest_of(_about(self.key, of), buffers.each(of.n_bytes if of else 0, piece))

    def _fill(self, start: int, target: torch.Tensor) -> None:
        view, at = bytes_of(target), self.start + start
        while view:
            count = os.preadv(self.descriptor, [view], at)
            if not count:
                raise ValueError("the file was cut")
            view, at = view[count:], at + count


def write_entry(
    descriptor: int, key: str, content: Content, values: Values, *, most_bytes: int, buffers: HostBuffers
) -> Packed | None:
    """Pack a content into a new file, for the entry `key`; None where that saves nothing, as its header says.

    Raises OSError for a disk that is full and for an entry of more than `most_bytes`.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="weir-store") as thread:
        writer = _Writer(descriptor, thread)
        made = content.pack(writer.put, values)
        writer.wait()
    _complete(descriptor, key, made, most_bytes, buffers)
    return made


@dataclass
class _Writer:
    """Brings packed bytes to their place in an entry, while the next ones are packed."""

    descriptor: int
    thread: ThreadPoolExecutor
    begun: "Future[None] | None" = None

    def put(self, start: int, piece: torch.Tensor) -> None:
        """Raises OSError for what was put before."""
        piece = piece.cpu()
        self.wait()
        self.begun = self.thread.submit(self._write, start, piece)

    def wait(self) -> None:
        """Wait for what is being written. Raises OSError."""
        if self.begun:
            self.begun.result()

    def _write(self, start: int, piece: torch.Tensor) -> None:
        view, at = bytes_of(piece), _MOST_HEADER + start
        while view:
            count = os.pwrite(self.descriptor, view, at)
            view, at = view[count:], at + count


def _complete(
    descriptor: int, key: str, packed: Packed | None, most_bytes: int, buffers: HostBuffers
) -> None:
    """Write the header. Raises OSError for an entry that would be too large."""
    of = form(packed) if packed else None
    n_bytes = of.n_bytes if of else 0
    if n_bytes > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    os.ftruncate(descriptor, _MOST_HEADER + n_bytes)
    starts = packed.parts["starts"] if packed else torch.empty(0, dtype=torch.int32, device="cpu")
    early = _early(key, of, starts)
    digest = CacheEntry(descriptor, key, _MOST_HEADER, Header("", early, of)).digest(buffers, _forget)
    line = json.dumps(encode(Header(digest, early, of))).encode().ljust(_MOST_HEADER - 1) + b"\n"
    if len(line) > _MOST_HEADER:
        raise OSError(errno.EFBIG, "the header is too long")
    os.pwrite(descriptor, line, 0)


def _early(key: str, of: PackedForm | None, starts: torch.Tensor) -> str:
    return hashlib.sha256(_about(key, of).encode() + bytes_of(starts)).hexdigest()


def _about(key: str, of: PackedForm | None) -> str:
    return json.dumps([key, encode(of)])


def _forget(_start: int, _piece: torch.Tensor) -> None:
    """Bytes are of no use where only their digest is wanted."""


_MOST_BYTES: Final = 64 << 30
_ENTRY, _ORIGIN = ".packed", ".origin"
_NOTE_BYTES: Final = 64 + 1 + 64  # a key and a digest


def usual_folder(env: Mapping[str, str]) -> Path:
    """$WEIR_STATE/packed, else $XDG_CACHE_HOME/weir/packed, else ~/.cache/weir/packed."""
    if named := env.get("WEIR_STATE"):
        return Path(named) / "packed"
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path(env.get("HOME", "/")) / ".cache") / "weir" / "packed"


@dataclass(frozen=True)
class CachedTensor:
    """A packed tensor of which only the outline is in memory."""

    outline: Packed
    content: Content
    cache: "Cache | None" = None
    key: str = ""

    @staticmethod
    def nowhere(content: Content, values: Values | None = None) -> "CachedTensor | None":
        """One that is packed again when it is written; None where packing saves nothing."""
        outline = content.pack(None, values)
        return CachedTensor(outline, content) if outline else None

    def write(self, parts: Iterable[tuple[Packed, torch.Tensor]]) -> bool:
        """Bring parts of the outline to their buffers; False where the content isn't what it was.

        The bytes come from the cache, where a damaged entry is made again first.
        """
        put, of = scattered(parts), form(self.outline)
        if self.cache and self.cache.read(self.key, of, put):
            return True
        if self.cache and self.cache.restore(self.key, self.content) and self.cache.read(self.key, of, put):
            return True
        again = self.content.pack(put)
        return again is not None and form(again) == of


Found = TypeVar("Found")


class Cache:
    """A folder of packed tensors that together take at most `most_bytes`; those unused the longest go first.

    Nothing here raises for a folder that can't be read or written, or for a full disk: then the tensor is
    packed again.
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = _MOST_BYTES, buffers: HostBuffers | None = None
    ) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._buffers = buffers or HostBuffers()
        self._swept = False  # of what killed processes left
        self._left = -1  # bytes that may be stored until the folder is looked through again

    def packed(self, content: Content, *, origin: Origin | None = None) -> CachedTensor | None:
        """The tensor packed; None where that saves nothing.

        The content isn't read where the origin is known already.
        """
        before = origin_key(origin, content.dense) if origin else None
        key = self._noted(before) if before else None
        stored = self._outline(key) if key else None
        if key is None or stored is None:
            values = content.values()
            key = content_key(values, dense=content.dense, buffers=self._buffers)
            stored = self._outline(key) or self._store(key, content, values)
            if stored is None:
                return CachedTensor.nowhere(content, values)
            if origin and before and before == origin_key(origin, content.dense):  # not changed meanwhile
                self._note(before, key)
        return CachedTensor(stored[0], content, self, key) if stored[0] else None

    def read(self, key: str, of: PackedForm, put: Put) -> bool:
        """Give the bytes of an entry of that form to `put`. False where there is no such entry.

        A damaged entry is noticed at its end, when `put` has got wrong bytes, and removed.
        """

        def whole(entry: CacheEntry) -> bool:
            return entry.header.form == of and entry.digest(self._buffers, put) == entry.header.digest

        return bool(self._look(key, whole))

    def restore(self, key: str, content: Content) -> bool:
        """Store an entry again; False where the content has another key now."""
        values = content.values()
        found = content_key(values, dense=content.dense, buffers=self._buffers)
        return found == key and self._store(key, content, values) is not None

    def _noted(self, origin: str) -> str | None:
        try:
            with open_regular(self.folder / (origin + _ORIGIN)) as file:
                note = file.read(_NOTE_BYTES + 1).decode("ascii", "replace")
        except OSError:
            return None
        key = note.partition(" ")[0]
        return key if note == _note_of(origin, key) else None

    def _note(self, origin: str, key: str) -> None:
        with suppress(OSError):
            write_text(self.folder / (origin + _ORIGIN), _note_of(origin, key), durable=False)

    def _outline(self, key: str) -> tuple[Packed | None] | None:
        """What is stored for a content, by its header; None if nothing is."""
        stored = self._look(key, lambda entry: (entry.outline(),))
        if stored:
            with suppress(OSError):
                os.utime(self._path(key))
        return stored or None

    def _look(self, key: str, look: Callable[[CacheEntry], Found]) -> Found | None:
        """What `look` finds in an entry; None if there is none. A damaged one is removed."""
        path = self._path(key)
        try:
            with open_regular(path) as file:
                if found := look(CacheEntry.of(file, key)):
                    return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError):  # ValueError: Misfit, JSON, dtypes, lengths
            pass
        with suppress(OSError):
            path.unlink()
        return None

    def _store(self, key: str, content: Content, values: Values) -> tuple[Packed | None] | None:
        """Pack into an entry; None if it can't be written."""
        path = self._path(key)
        with suppress(OSError):
            if not self._swept:
                sweep_partials(self.folder)
                self._swept = True
            with replacing(path, durable=False) as partial_path:
                descriptor = os.open(partial_path, os.O_RDWR)
                try:
                    made = write_entry(
                        descriptor, key, content, values, most_bytes=self.most_bytes, buffers=self._buffers
                    )
                finally:
                    os.close(descriptor)
            self._left -= path.stat().st_size
            if self._left < 0:
                self._make_room(path)
            return (made,)
        return None

    def _path(self, key: str) -> Path:
        return self.folder / (key + _ENTRY)

    def _make_room(self, newest: Path) -> None:
        """Remove what was unused the longest, until the rest fits.

        To look through a folder of many for each entry would take longer than to store them. So that is done
        again after an eighth of what is left has been stored.
        """
        entries = []
        with os.scandir(self.folder) as files:
            for file in files:
                if file.name.endswith((_ENTRY, _ORIGIN)):
                    with suppress(FileNotFoundError):  # another process makes room as well
                        status = file.stat()
                        entries.append(
                            (file.name == newest.name, status.st_mtime_ns, status.st_size, file.path)
                        )
        entries.sort(reverse=True)
        room = self.most_bytes
        for _, _, size, path in entries:
            room -= size
            if room < 0:
                Path(path).unlink(missing_ok=True)
        self._left = max(room, 0) // 8


def _note_of(origin: str, key: str) -> str:
    """What is noted under the name of an origin: the key of its content, and a digest of both."""
    return f"{key} {hashlib.sha256(f'{origin} {key}'.encode()).hexdigest()}"
