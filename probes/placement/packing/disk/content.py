"""A tensor before it is packed: how its values are read, and what it is named by them and by their file."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import torch

from probes.placement.packing.packed import Packed, Put
from probes.placement.packing.staging import Buffers, bytes_of
from probes.placement.packing.tensors import Values, pack_into

_VERSION: Final = 4  # of the layouts and of these files: another one has other names
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

    return digest_of(about, (buffers or Buffers()).each(prod(values.shape) * size, piece))


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
