"""Which of a library's CUDA code observed runs have loaded: the rest may go from a slim image."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from buildtool.core.compression import FAULTS, zstd
from buildtool.gpucode.forward import OBJECT_MAGIC
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.nvfatbin import NvEntry
from buildtool.gpucode.scan import Code, FoundCode, find_code
from buildtool.gpucode.source import Source

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MOST_RATIO = 256  # of unpacked to stored bytes: what unpacks to more isn't read
_MOST_BYTES = 256 << 20  # of one cubin; NVSHMEM has one of 53 MB


@dataclass(frozen=True)
class Used:
    """What runs loaded, by `key_of`. `is_all`: each of it was found in machine code that can be read.

    Only then is what can't be read (PTX, LTO-IR, LZ4) known not to have been loaded, and may go, too.
    """

    keys: frozenset[str]
    is_all: bool = False

    @classmethod
    def of(cls, keys: Iterable[str], present: Iterable[str]) -> "Used":
        """`present` are the keys of all code that the image has."""
        loaded = frozenset(keys)
        return cls(loaded, loaded <= frozenset(present))

    def holds(self, source: Source, start: int, n_bytes: int) -> bool:
        """Whether the code at this place may have been loaded."""
        code = _unpacked(source, start, n_bytes)
        return key_of(code) in self.keys if code else not self.is_all

    def entries(self, source: Source, entries: Sequence[NvEntry]) -> tuple[NvEntry, ...]:
        """Those of a fat binary's entries that may have been loaded, and those of an unknown kind."""
        return tuple(
            entry
            for entry in entries
            if entry.code is None
            or (
                not entry.is_blank
                and self.holds(
                    source, entry.start + entry.header_bytes, entry.stored_bytes - entry.header_bytes
                )
            )
        )

    def unused(self, source: Source, place: FoundCode) -> Iterator[Code]:
        """The codes of a CUDA choice that weren't loaded."""
        for code in place.codes if place.is_choice else ():
            is_cuda = code.target is not None and code.target.is_cuda
            is_there = code.n_bytes > 0 and not code.is_blank
            if is_cuda and is_there and not self.holds(source, code.start, code.n_bytes):
                yield code


def machine_code(source: Source) -> Iterator[bytes]:
    """All CUDA machine code in a file that can be read, unpacked. Raises GpuCodeError."""
    for place in find_code(source):
        for code in place.codes if place.is_choice else ():
            if code.target and code.target.is_cuda and not code.is_blank:
                unpacked = _unpacked(source, code.start, code.n_bytes)
                if unpacked:
                    yield unpacked


def _unpacked(source: Source, start: int, n_bytes: int) -> bytes:
    """A cubin; empty for what can't be read: PTX, LTO-IR, LZ4, damage."""
    payload = source.exactly(start, n_bytes, "GPU code")
    if payload.startswith(_ZSTD_MAGIC):
        unpacking = zstd.ZstdDecompressor()
        try:
            payload = unpacking.decompress(payload, min(_MOST_BYTES, _MOST_RATIO * n_bytes))
        except FAULTS:
            return b""
        if not unpacking.eof:
            return b""
    return payload if payload.startswith(OBJECT_MAGIC) else b""
