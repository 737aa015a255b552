"""NVIDIA fat binaries (`.nv_fatbin`): which `sm_` and `compute_` code is in them.

NVIDIA doesn't document the format; field positions were worked out from files that nvcc made and agree
with what `cuobjdump` lists. A fat binary: u32 magic, u16 version 1, u16 header length, u64 length of the
entries. An entry: u16 kind (1 PTX, 2 cubin), u16, u32 header length, u64 payload length, then at 16 u32
compressed length, at 28 u32 architecture, at 40 u64 flags, at 56 u64 uncompressed length.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from buildtool.gpucode.bundle import MOST_CODES, too_many_codes
from buildtool.gpucode.source import BadBundle, Source
from buildtool.gpucode.target import TargetId

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER_BYTES = 16
ENTRY_BYTES = 64
PTX = 1
_COMPRESSED = 0x2000 | 0x8000  # LZ4, and zstd since CUDA 12.4
_MAX_ENTRY_HEADER_BYTES = 1 << 16
_ABI_CUDA_13 = 8


@dataclass(frozen=True)
class NvEntry:
    """One cubin or PTX text; `start` is its header's position in the file."""

    kind: int
    architecture: int
    start: int
    stored_bytes: int
    unpacked_bytes: int

    @property
    def is_ptx(self) -> bool:
        """True for PTX, which the driver compiles for the card that is present."""
        return self.kind == PTX

    @property
    def code(self) -> TargetId:
        """`sm_80` for machine code, `compute_80` for PTX."""
        return TargetId(f"{'compute' if self.is_ptx else 'sm'}_{self.architecture}")


@dataclass(frozen=True)
class NvFatbin:
    """A fat binary: position, length of its header and in total, entries."""

    start: int
    header_bytes: int
    n_bytes: int
    entries: tuple[NvEntry, ...]


def iter_fatbins(source: Source, start: int, end: int) -> Iterator[NvFatbin]:
    """Every fat binary between two file positions; with only zeros between. Raises BadBundle."""
    position = source.skip_zeros(start, end)
    room = MOST_CODES
    while position < end:
        fatbin = _read_fatbin(source, position, end, room)
        room -= max(len(fatbin.entries), 1)
        yield fatbin
        position = source.skip_zeros(position + fatbin.n_bytes, end)


def _read_fatbin(source: Source, start: int, end: int, room: int) -> NvFatbin:
    head = source.exactly(start, HEADER_BYTES, "a fat binary's header")
    version, header_bytes, n_bytes = struct.unpack("<HHQ", head[4:])
    if head[:4] != MAGIC or version != 1 or header_bytes < HEADER_BYTES:
        raise BadBundle("found something unknown where a CUDA fat binary was expected", place=start)
    total = header_bytes + n_bytes
    if total > end - start:
        raise BadBundle(f"a CUDA fat binary claims {total} bytes, {end - start} are there", place=start)
    entries = tuple(islice(_entries(source, start + header_bytes, start + total), max(room, 0) + 1))
    if len(entries) > room or room < 1:
        raise too_many_codes(start)
    return NvFatbin(start, header_bytes, total, entries)


def _entries(source: Source, position: int, end: int) -> Iterator[NvEntry]:
    while position < end:
        head = source.exactly(position, ENTRY_BYTES, "a fat binary's entry")
        kind, header_bytes, payload_bytes = struct.unpack("<H2xIQ", head[:16])
        architecture, flags, unpacked = struct.unpack("<I8xQ8xQ", head[28:64])
        n_bytes = header_bytes + payload_bytes
        if not ENTRY_BYTES <= header_bytes <= _MAX_ENTRY_HEADER_BYTES or n_bytes > end - position:
            raise BadBundle("a CUDA fat binary's entry is impossible", place=position)
        yield NvEntry(
            kind, architecture, position, n_bytes, unpacked if flags & _COMPRESSED else payload_bytes
        )
        position += n_bytes


def target_of_flags(flags: int, abi_version: int) -> str:
    """The `sm_` of a cubin's ELF `e_flags` (LLVM's ELF.h: the second byte since ABI version 8)."""
    return f"sm_{flags >> 8 & 0xFF if abi_version >= _ABI_CUDA_13 else flags & 0xFF}"
