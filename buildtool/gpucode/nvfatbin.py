"""NVIDIA fat binaries: which `sm_` and `compute_` code is in them.

NVIDIA doesn't document the format; field positions were worked out from files that nvcc made and agree
with what `cuobjdump` lists. A fat binary: u32 magic, u16 version 1, u16 header length, u64 length of the
entries. An entry: u16 kind (1 PTX, 2 cubin, 8 LTO-IR), u16, u32 header length, u64 payload length, then at 16
u32 compressed length, at 28 u32 architecture, at 40 u64 flags, at 56 u64 uncompressed length.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from buildtool.gpucode.bundle import MOST_CODES, too_many_codes
from buildtool.gpucode.forward import FATBIN_MAGIC, Read, Reader, read_forward
from buildtool.gpucode.source import BadBundle, Source
from buildtool.gpucode.target import TargetId

HEADER_BYTES = 16
ENTRY_BYTES = 64
PTX, CUBIN, LTO_IR = 1, 2, 8
_NAMES = {PTX: "compute", CUBIN: "sm", LTO_IR: "lto"}
BLANK_BYTES = 16  # a payload that begins with as many zeros was blanked: no code does
_LZ4 = 0x2000
_COMPRESSED = _LZ4 | 0x8000  # zstd since CUDA 12.4
_MAX_ENTRY_HEADER_BYTES = 1 << 16
_ABI_CUDA_13 = 8


@dataclass(frozen=True, slots=True)
class NvEntry:
    """One cubin or PTX text; `start` is its header's position in the file.

    `lz4_bytes`: of an LZ4 block, behind which there is padding; 0 where it isn't one.
    """

    kind: int
    architecture: int
    start: int
    header_bytes: int
    stored_bytes: int
    unpacked_bytes: int
    is_blank: bool = False  # an earlier prune left zeros in place of the code
    lz4_bytes: int = 0

    @property
    def is_ptx(self) -> bool:
        """True for PTX, which the driver compiles for the card that is present."""
        return self.kind == PTX

    @property
    def code(self) -> TargetId | None:
        """`sm_80` for machine code, `compute_80` for PTX, `lto_80` for LTO-IR; None for other kinds."""
        return _target(self.kind, self.architecture)


@lru_cache(maxsize=1 << 10)
def _target(kind: int, architecture: int) -> TargetId | None:
    """Made once for many entries."""
    name = _NAMES.get(kind)
    return TargetId(f"{name}_{architecture}") if name else None


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
        fatbin = read_forward(read_fatbin(position, end, room), source)
        room -= max(len(fatbin.entries), 1)
        yield fatbin
        position = source.skip_zeros(position + fatbin.n_bytes, end)


def is_fatbin(head: bytes) -> bool:
    """Whether these bytes are a fat binary's header: programs that write such files hold the magic, too."""
    return (
        head.startswith(FATBIN_MAGIC)
        and head[4:6] == b"\x01\x00"
        and HEADER_BYTES <= int.from_bytes(head[6:8], "little") <= ENTRY_BYTES
    )


def read_fatbin(start: int, end: int, room: int) -> Reader[NvFatbin]:
    """The fat binary at `start`, ending by `end`, of `room` entries at most. Raises BadBundle."""
    if start + HEADER_BYTES > end:
        raise BadBundle("a CUDA fat binary is cut off", place=start)
    head = yield Read(start, HEADER_BYTES, "a fat binary's header")
    assert isinstance(head, bytes)
    version, header_bytes, n_bytes = struct.unpack("<HHQ", head[4:])
    if head[:4] != FATBIN_MAGIC or version != 1 or header_bytes < HEADER_BYTES:
        raise BadBundle("found something unknown where a CUDA fat binary was expected", place=start)
    total = header_bytes + n_bytes
    if total > end - start:
        raise BadBundle(f"a CUDA fat binary claims {total} bytes, {end - start} are there", place=start)
    if room < 1:
        raise too_many_codes(start)
    entries: list[NvEntry] = []
    position = start + header_bytes
    while position < start + total:
        entry = yield from _read_entry(position, start + total)
        entries.append(entry)
        if len(entries) > room:
            raise too_many_codes(start)
        position += entry.stored_bytes
    return NvFatbin(start, header_bytes, total, tuple(entries))


def _read_entry(start: int, end: int) -> Reader[NvEntry]:
    if start + ENTRY_BYTES > end:
        raise BadBundle("a CUDA fat binary's entry is cut off", place=start)
    head = yield Read(start, min(ENTRY_BYTES + BLANK_BYTES, end - start), "a fat binary's entry")
    assert isinstance(head, bytes)
    kind, header_bytes, payload_bytes = struct.unpack("<H2xIQ", head[:16])
    packed, architecture, flags, unpacked = struct.unpack("<I8xI8xQ8xQ", head[16:ENTRY_BYTES])
    n_bytes = header_bytes + payload_bytes
    if not ENTRY_BYTES <= header_bytes <= _MAX_ENTRY_HEADER_BYTES or n_bytes > end - start:
        raise BadBundle("a CUDA fat binary's entry is impossible", place=start)
    first = head[ENTRY_BYTES:]
    if header_bytes > ENTRY_BYTES and payload_bytes >= BLANK_BYTES:
        first_bytes = yield Read(start + header_bytes, BLANK_BYTES, "a fat binary's code")
        assert isinstance(first_bytes, bytes)
        first = first_bytes
    is_blank = payload_bytes >= BLANK_BYTES and not any(first)
    unpacked_bytes = unpacked if flags & _COMPRESSED else payload_bytes
    lz4_bytes = min(packed, payload_bytes) if flags & _LZ4 else 0
    return NvEntry(kind, architecture, start, header_bytes, n_bytes, unpacked_bytes, is_blank, lz4_bytes)


def target_of_flags(flags: int, abi_version: int) -> str:
    """The `sm_` of a cubin's ELF `e_flags` (LLVM's ELF.h: the second byte since ABI version 8)."""
    return f"sm_{flags >> 8 & 0xFF if abi_version >= _ABI_CUDA_13 else flags & 0xFF}"
