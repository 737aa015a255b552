"""What the dynamic linker loads with an ELF file."""

from buildtool.gpucode import elf
from buildtool.gpucode.source import GpuCodeError, Source


def needed_libraries(source: Source) -> tuple[str, ...]:
    """What the dynamic linker loads with a file: its interpreter and DT_NEEDED. Empty for no ELF file."""
    try:
        file = elf.read_elf(source)
        interpreters = [
            source.exactly(each.offset, each.file_bytes, "the interpreter").rstrip(b"\0")
            for each in file.segments
            if each.type == elf.PT_INTERP and each.file_bytes < 4096
        ]
        names = [name.decode("utf-8", "surrogateescape") for name in interpreters]
        names += elf.dynamic_names(source, file, elf.DT_NEEDED)
    except GpuCodeError:
        return ()
    return tuple(name.rpartition("/")[2] for name in names)
