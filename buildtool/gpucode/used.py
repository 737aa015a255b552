"""Which of a library's CUDA code observed runs have loaded: the rest may go from a slim image."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from buildtool.core.compression import FAULTS, zstd
from buildtool.gpucode.bundle import UNPACKED_FREE_BYTES
from buildtool.gpucode.forward import OBJECT_MAGIC
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.nvfatbin import NvEntry
from buildtool.gpucode.scan import Code, FoundCode, find_code
from buildtool.gpucode.source import Source

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MOST_RATIO = 256  # of unpacked to stored bytes: what unpacks to more isn't read


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
        key = _key(source, start, n_bytes)
        return key in self.keys if key else not self.is_all

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


def keys_in(source: Source) -> set[str]:
    """The keys of all CUDA code in a file that can be read. Raises GpuCodeError."""
    codes = (code for place in find_code(source) if place.is_choice for code in place.codes)
    cuda = (code for code in codes if code.target and code.target.is_cuda and not code.is_blank)
    return {key for code in cuda if (key := _key(source, code.start, code.n_bytes))}


def _key(source: Source, start: int, n_bytes: int) -> str:
    """The key of machine code; empty for what can't be read."""
    payload = source.exactly(start, n_bytes, "GPU code")
    if payload.startswith(_ZSTD_MAGIC):
        try:
            unpacking = zstd.ZstdDecompressor()
            payload = unpacking.decompress(payload, min(UNPACKED_FREE_BYTES, _MOST_RATIO * n_bytes))
        except FAULTS:
            return ""
        if not unpacking.eof:
            return ""
    return key_of(payload) if payload.startswith(OBJECT_MAGIC) else ""
