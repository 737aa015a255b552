"""Packed tensors on disk, by content: what was packed once is read, not packed again.

An entry is named after the SHA-256 of the tensor's bytes, dtype and shape. A small file next to it notes
which range of which file (by inode, size and times, as git's index does) had which content: so a second load
finds the entry without reading the unpacked bytes. Entries carry a digest of their own: a damaged one is
removed and made again. Entries are written whole or not at all, and several processes may use one folder.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final

import torch

from probes.placement.packing.forms import ALIGNMENT, PackedForm, aligned
from probes.placement.packing.packed import Packed, form, packed_in, write_into
from probes.placement.packing.tensors import pack
from probes.shared.codec import decode, encode, load
from probes.shared.files import replacing, sweep_partials, write_text

_VERSION: Final = 1  # of the layouts and of these files: another one has other names
_PIECE: Final = 1 << 23  # bytes that one thread digests at once
_MOST_HEADER: Final = 1 << 16
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
    form: PackedForm | None  # None: packing this tensor saves nothing


class Cache:
    """A folder of packed tensors that together take at most `most_bytes`; those unused the longest go first.

    Nothing here raises for a folder that can't be read or written, or for a full disk: then the tensor is
    packed again.
    """

    def __init__(self, folder: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def packed(
        self,
        read: Callable[[], torch.Tensor],
        *,
        origin: Origin | None = None,
        dense: bool = False,
        packer: Callable[[torch.Tensor], Packed | None] | None = None,
    ) -> Packed | None:
        """The tensor that `read` returns, packed on the CPU; None where packing saves nothing.

        `read` isn't called where the origin is known already. `packer` packs in another way than `pack` does
        on the tensor's own device, such as on a GPU; its result is moved to the CPU.
        """
        before = _identity(origin, dense) if origin else None
        if before and (key := self._noted(before)) and (entry := self._load(key)):
            return entry[0]
        tensor = read()
        key = content_key(tensor, dense=dense)
        entry = self._load(key)
        if entry is None:
            made = packer(tensor) if packer else pack(tensor, dense=dense)
            entry = (made.to("cpu") if made else None,)
            self._store(key, entry[0])
        if origin and before and before == _identity(origin, dense):  # not changed while it was read
            self._note(before, key)
        return entry[0]

    def _noted(self, origin: str) -> str | None:
        try:
            with _opened(self.folder / (origin + _ORIGIN)) as file:
                key = file.read(65).decode("ascii", "replace")
        except OSError:
            return None
        return key if _KEY.fullmatch(key) else None

    def _note(self, origin: str, key: str) -> None:
        with suppress(OSError):
            write_text(self.folder / (origin + _ORIGIN), key)

    def _load(self, key: str) -> tuple[Packed | None] | None:
        """What is stored for a content; None if nothing is. A damaged entry is removed."""
        path = self.folder / (key + _ENTRY)
        try:
            with _opened(path) as file:
                found = _read(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError):  # ValueError: Misfit, JSON, dtypes, lengths
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return (found,)

    def _store(self, key: str, packed: Packed | None) -> None:
        flat = torch.empty(form(packed).n_bytes if packed else 0, dtype=torch.uint8)
        if flat.numel() > self.most_bytes:
            return
        if packed:
            write_into(packed, flat)
        path = self.folder / (key + _ENTRY)
        with suppress(OSError):
            sweep_partials(self.folder)
            with replacing(path) as partial, partial.open("wb") as file:
                _write(file, form(packed) if packed else None, flat)
            self._make_room(path)

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


def content_key(tensor: torch.Tensor, *, dense: bool = False) -> str:
    """The name of a tensor's content, 64 hexadecimal digits: of its bytes, dtype, shape and layout."""
    flat = tensor.detach().resolve_neg().cpu().contiguous().view(-1)
    about = json.dumps([_VERSION, str(tensor.dtype), list(tensor.shape), dense])
    return _digest(about, flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8))


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


def _opened(path: Path) -> BufferedReader:
    """An ordinary file, to be read. Raises OSError for anything else: nobody may write into a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        path.unlink()  # writing there would wait as well
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


def _write(file: BinaryIO, of: PackedForm | None, flat: torch.Tensor) -> None:
    digest = _digest(json.dumps(encode(of)), flat)
    header = json.dumps(encode(_Header(digest, of))).encode()
    file.write(header.ljust(aligned(len(header) + 1) - 1) + b"\n")
    file.write(_bytes(flat))


def _read(file: BufferedReader) -> Packed | None:
    """Raises ValueError or KeyError for a file that isn't what was written."""
    line = file.readline(_MOST_HEADER)
    if not line.endswith(b"\n") or len(line) % ALIGNMENT:
        raise ValueError("the header is cut")
    header = decode(_Header, load(line))
    of = header.form
    n_bytes = of.n_bytes if of else 0
    if os.fstat(file.fileno()).st_size != len(line) + n_bytes:
        raise ValueError("the file's size isn't its header's")
    flat = torch.empty(n_bytes, dtype=torch.uint8)
    if file.readinto(_bytes(flat)) != n_bytes or _digest(json.dumps(encode(of)), flat) != header.digest:
        raise ValueError("the bytes aren't those that were written")
    return packed_in(of, flat) if of else None


def _digest(about: str, flat: torch.Tensor) -> str:
    """SHA-256 of the digests of a uint8 tensor's pieces, made by several threads, and of a text."""
    view = _bytes(flat)
    pieces = range(0, len(view), _PIECE)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = threads.map(lambda at: hashlib.sha256(view[at : at + _PIECE]).digest(), pieces)
        return hashlib.sha256(about.encode() + b"".join(digests)).hexdigest()


def _bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU, which must outlive the view."""
    if not flat.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_uint8 * flat.numel()).from_address(flat.data_ptr())).cast("B")
