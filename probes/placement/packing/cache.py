"""Packed tensors on disk, by content: what was packed once is read, not packed again.

An entry is named after the SHA-256 of the tensor's bytes, dtype and shape. A small file next to it notes
which range of which file (by inode, size and times, as git's index does) had which content: so a second load
finds the entry without reading the unpacked bytes. Entries carry a digest of their own: a damaged one is
removed and made again. Entries are written whole or not at all, and several processes may use one folder.

Bytes are written while they are packed, and read in pieces to where they belong.
"""

import errno
import hashlib
import json
import os
import re
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

from probes.placement.packing.forms import ALIGNMENT, PackedForm
from probes.placement.packing.packed import Packed, Put, form, outline, scattered
from probes.placement.packing.staging import Buffers, bytes_of
from probes.placement.packing.tensors import Values, pack_into
from probes.shared.codec import decode, encode, load
from probes.shared.files import replacing, sweep_partials, write_text

_VERSION: Final = 2  # of the layouts and of these files: another one has other names
_MOST_HEADER: Final = 8 * ALIGNMENT
_SETTLED_NS: Final = 100_000_000  # a file changed more recently may change again within one tick of its times
_MOST_BYTES: Final = 64 << 30
_KEY: Final = re.compile("[0-9a-f]{64}")
_ENTRY, _ORIGIN = ".packed", ".origin"


def usual_folder(env: Mapping[str, str]) -> Path:
    """$WEIR_STATE/packed, else $XDG_CACHE_HOME/weir/packed, else ~/.cache/weir/packed."""
    if named := env.get("WEIR_STATE"):
        return Path(named) / "packed"
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path(env.get("HOME", "/")) / ".cache") / "weir" / "packed"


@dataclass(frozen=True)
class Origin:
    """The bytes `start` to `end` of a file, where a tensor is stored."""

    path: Path
    start: int
    end: int


@dataclass(frozen=True)
class _Header:
    digest: str  # of the form's JSON and the bytes that follow
    early: str  # of the form's JSON and the part `starts`, which are used before the rest is read
    form: PackedForm | None  # None: packing this tensor saves nothing


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

    def pack(self, put: Put, values: Values | None = None) -> Packed | None:
        """As `pack_into` does, on the host where the GPU has too little memory."""
        with suppress(torch.cuda.OutOfMemoryError):
            return pack_into(put, values or self.values(), dense=self.dense)
        return pack_into(put, self.on_host(), dense=self.dense)


@dataclass(frozen=True)
class Kept:
    """A packed tensor of which only the outline is in memory."""

    outline: Packed
    content: Content
    cache: "Cache | None" = None
    key: str = ""

    @staticmethod
    def nowhere(content: Content, values: Values | None = None) -> "Kept | None":
        """One that is packed again when it is written; None where packing saves nothing."""
        found = content.pack(_forget, values)
        return Kept(found, content) if found else None

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


Looked = TypeVar("Looked")


class Cache:
    """A folder of packed tensors that together take at most `most_bytes`; those unused the longest go first.

    Nothing here raises for a folder that can't be read or written, or for a full disk: then the tensor is
    packed again.
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = _MOST_BYTES, buffers: Buffers | None = None
    ) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._buffers = buffers or Buffers()
        self._swept = False  # of what killed processes left

    def packed(self, content: Content, *, origin: Origin | None = None) -> Kept | None:
        """The tensor packed; None where that saves nothing.

        The content isn't read where the origin is known already.
        """
        before = _identity(origin, content.dense) if origin else None
        key = self._noted(before) if before else None
        found = self._outline(key) if key else None
        if key is None or found is None:
            values = content.values()
            key = content_key(values, dense=content.dense, buffers=self._buffers)
            found = self._outline(key) or self._store(key, content, values)
            if found is None:
                return Kept.nowhere(content, values)
            if origin and before and before == _identity(origin, content.dense):  # not changed meanwhile
                self._note(before, key)
        return Kept(found[0], content, self, key) if found[0] else None

    def read(self, key: str, of: PackedForm, put: Put) -> bool:
        """Give the bytes of an entry of that form to `put`. False where there is no such entry.

        A damaged entry is noticed at its end, when `put` has got wrong bytes, and removed.
        """

        def whole(entry: _Entry) -> bool:
            return entry.header.form == of and entry.digest(self._buffers, put) == entry.header.digest

        return bool(self._look(key, whole))

    def restore(self, key: str, content: Content) -> bool:
        """Store an entry again; False where the content has another key now."""
        values = content.values()
        found = content_key(values, dense=content.dense, buffers=self._buffers)
        return found == key and self._store(key, content, values) is not None

    def _noted(self, origin: str) -> str | None:
        try:
            with _opened(self.folder / (origin + _ORIGIN)) as file:
                key = file.read(65).decode("ascii", "replace")
        except OSError:
            return None
        return key if _KEY.fullmatch(key) else None

    def _note(self, origin: str, key: str) -> None:
        with suppress(OSError):
            write_text(self.folder / (origin + _ORIGIN), key, durable=False)

    def _outline(self, key: str) -> tuple[Packed | None] | None:
        """What is stored for a content, by its header; None if nothing is."""
        found = self._look(key, lambda entry: (entry.outline(),))
        if found:
            with suppress(OSError):
                os.utime(self._path(key))
        return found or None

    def _look(self, key: str, look: Callable[["_Entry"], Looked]) -> Looked | None:
        """What `look` finds in an entry; None if there is none. A damaged one is removed."""
        path = self._path(key)
        try:
            with _opened(path) as file:
                if found := look(_Entry.of(file)):
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
                    with ThreadPoolExecutor(1, thread_name_prefix="weir-store") as thread:
                        writer = _Writer(descriptor, thread)
                        made = content.pack(writer.put, values)
                        writer.wait()
                    _complete(descriptor, made, self.most_bytes, self._buffers)
                finally:
                    os.close(descriptor)
            self._make_room(path)
            return (made,)
        return None

    def _path(self, key: str) -> Path:
        return self.folder / (key + _ENTRY)

    def _make_room(self, newest: Path) -> None:
        """Remove what was unused the longest, until the rest fits."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix in (_ENTRY, _ORIGIN):
                with suppress(FileNotFoundError):  # another process makes room as well
                    status = path.stat()
                    found.append((path == newest, status.st_mtime_ns, status.st_size, path))
        found.sort(reverse=True)
        room = self.most_bytes
        for _, _, size, path in found:
            room -= size
            if room < 0:
                path.unlink(missing_ok=True)


def content_key(values: Values, *, dense: bool = False, buffers: Buffers | None = None) -> str:
    """The name of a tensor's content, 64 hexadecimal digits: of its bytes, dtype, shape and layout."""
    about = json.dumps([_VERSION, str(values.dtype), list(values.shape), dense])
    size = values.dtype.itemsize

    def piece(start: int, memory: torch.Tensor) -> bytes:
        first, last = start // size, (start + memory.numel()) // size
        found = values.read(first, last, memory)
        if found.device.type != "cpu":
            found = memory.copy_(found.view(torch.uint8))
        return hashlib.sha256(bytes_of(found)).digest()

    return _digest(about, (buffers or Buffers()).each(prod(values.shape) * size, piece))


def _identity(origin: Origin, dense: bool) -> str | None:
    """A name for a range of a file as it is now; None where the file is missing or was just written."""
    try:
        status = origin.path.stat()
    except OSError:
        return None
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
        return None
    times = [status.st_mtime_ns, status.st_ctime_ns]
    about = [_VERSION, status.st_dev, status.st_ino, status.st_size, *times, origin.start, origin.end, dense]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


@dataclass(frozen=True)
class _Entry:
    """An entry that is open."""

    descriptor: int
    start: int  # of the bytes behind the header
    header: _Header

    @staticmethod
    def of(file: BufferedReader) -> "_Entry":
        """Raises ValueError or KeyError for a file that isn't what was written."""
        line = file.readline(_MOST_HEADER)
        if not line.endswith(b"\n") or len(line) != _MOST_HEADER:
            raise ValueError("the header is cut")
        header = decode(_Header, load(line))
        n_bytes = header.form.n_bytes if header.form else 0
        if os.fstat(file.fileno()).st_size != len(line) + n_bytes:
            raise ValueError("the file's size isn't its header's")
        return _Entry(file.fileno(), len(line), header)

    def outline(self) -> Packed | None:
        """Raises ValueError or KeyError likewise."""
        of = self.header.form
        starts = torch.empty(0, dtype=torch.int32)
        if of:
            names = [part.name for part in of.parts]
            at = names.index("starts")
            starts = torch.empty(of.parts[at].length, dtype=torch.int32)
            self._fill(of.offsets()[at], starts)
        if _early(of, starts) != self.header.early:
            raise ValueError("the outline isn't the one that was written")
        return outline(of, starts) if of else None

    def digest(self, buffers: Buffers, put: Put) -> str:
        """That of the form and the bytes, which `put` gets."""
        of = self.header.form

        def piece(start: int, memory: torch.Tensor) -> bytes:
            self._fill(start, memory)
            put(start, memory)
            return hashlib.sha256(bytes_of(memory)).digest()

        return _digest(json.dumps(encode(of)), buffers.each(of.n_bytes if of else 0, piece))

    def _fill(self, start: int, target: torch.Tensor) -> None:
        view, at = bytes_of(target), self.start + start
        while view:
            count = os.preadv(self.descriptor, [view], at)
            if not count:
                raise ValueError("the file was cut")
            view, at = view[count:], at + count


def _opened(path: Path) -> BufferedReader:
    """An ordinary file, to be read. Raises OSError for anything else: nobody may write into a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        path.unlink()  # writing there would wait as well
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


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
        """Raises OSError likewise."""
        if self.begun:
            self.begun.result()

    def _write(self, start: int, piece: torch.Tensor) -> None:
        view, at = bytes_of(piece), _MOST_HEADER + start
        while view:
            count = os.pwrite(self.descriptor, view, at)
            view, at = view[count:], at + count


def _forget(_start: int, _piece: torch.Tensor) -> None:
    """Packed bytes are of no use where only the outline is wanted."""


def _complete(descriptor: int, packed: Packed | None, most_bytes: int, buffers: Buffers) -> None:
    """Write the header. Raises OSError for an entry that would be too large."""
    of = form(packed) if packed else None
    n_bytes = of.n_bytes if of else 0
    if n_bytes > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    os.ftruncate(descriptor, _MOST_HEADER + n_bytes)
    early = _early(of, packed.parts["starts"] if packed else torch.empty(0, dtype=torch.int32))
    digest = _Entry(descriptor, _MOST_HEADER, _Header("", early, of)).digest(buffers, _forget)
    line = json.dumps(encode(_Header(digest, early, of))).encode().ljust(_MOST_HEADER - 1) + b"\n"
    if len(line) > _MOST_HEADER:
        raise OSError(errno.EFBIG, "the header is too long")
    os.pwrite(descriptor, line, 0)


def _early(of: PackedForm | None, starts: torch.Tensor) -> str:
    return hashlib.sha256(json.dumps(encode(of)).encode() + bytes_of(starts)).hexdigest()


def _digest(about: str, pieces: Iterable[bytes]) -> str:
    """SHA-256 of a text and of the digests of pieces."""
    return hashlib.sha256(about.encode() + b"".join(pieces)).hexdigest()
