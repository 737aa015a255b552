"""What the dynamic linker loads with an ELF file."""

import struct

from buildtool.gpucode import elf
from buildtool.gpucode.source import GpuCodeError, Source


def needed_libraries(source: Source) -> tuple[str, ...]:
    """What the dynamic linker loads with a file: its interpreter and DT_NEEDED. Empty for no ELF file."""
    try:
        file = elf.read_elf(source)
        names = [
            source.exactly(each.offset, each.file_bytes, "the interpreter").rstrip(b"\0")
            for each in file.segments
            if each.type == elf.PT_INTERP and each.file_bytes < 4096
        ]
        dynamic = next((each for each in file.segments if each.type == elf.PT_DYNAMIC), None)
        if dynamic is not None:
            raw = source.exactly(dynamic.offset, min(dynamic.file_bytes // 16 * 16, 1 << 16), "its entries")
            names += _strings(source, file, list(struct.iter_unpack("<QQ", raw)))
    except GpuCodeError:
        return ()
    return tuple(name.decode("utf-8", "surrogateescape").rpartition("/")[2] for name in names)


def _strings(source: Source, file: elf.Elf, entries: list[tuple[int, int]]) -> list[bytes]:
    """The names of DT_NEEDED (1), which are offsets into DT_STRTAB (5)."""
    table = next((value for tag, value in entries if tag == 5), None)
    if table is None:
        return []
    names = []
    for tag, value in entries:
        if tag == 0:
            break
        if tag == 1:
            start = file.offset_of(table + value, 1)
            names.append(source.read_at(start, 256).partition(b"\0")[0])
    return names
