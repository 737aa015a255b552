"""Which of a library's CUDA code observed runs have loaded: the rest may go from a slim image."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from buildtool.core.compression import FAULTS, zstd
from buildtool.gpucode.elf import Elf
from buildtool.gpucode.forward import FRAME_MAGIC, OBJECT_MAGIC
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.lz4 import unpack_block
from buildtool.gpucode.nvfatbin import NvEntry
from buildtool.gpucode.scan import Code, FoundCode, code_of_entry, find_code
from buildtool.gpucode.source import Source

_MOST_RATIO = 256  # of unpacked to stored bytes: what unpacks to more isn't read
_MOST_BYTES = 256 << 20  # of one cubin; NVSHMEM has one of 53 MB
# cuBLASLt makes these kernels while it runs, one to a module, and no library holds them; and what names them
_GENERATED = re.compile(r"nvjet_sm\d+_\w+")
_TEMPLATE = re.compile(rb"nvjet_sm(%d|\d+)_%s")
_TEMPLATE_BYTES = 32


def is_generated(n_functions: int, names: Sequence[str]) -> bool:
    """Whether a module with these functions, of which `names` are some, was made by a library as it ran."""
    return n_functions == len(names) == 1 and _GENERATED.fullmatch(names[0]) is not None


@dataclass(frozen=True)
class Used:
    """What runs loaded, by `key_of`. `is_all`: each of it was found in machine code that can be read.

    Only then is what can't be read (PTX, LTO-IR) known not to have been loaded, and may go, too.
    `generated`: some of it was made by a library as it ran.
    """

    keys: frozenset[str]
    is_all: bool = False
    generated: bool = False

    @classmethod
    def of(cls, keys: Iterable[str], present: Iterable[str], generated: Iterable[str] = ()) -> "Used":
        """`present` are the keys of all code that the image has; those `generated` needn't be among them."""
        loaded, made = frozenset(keys), frozenset(generated)
        return cls(loaded | made, loaded <= frozenset(present), bool(made))

    def by_library(self, source: Source, elf: Elf) -> "Used":
        """For one library: where it makes code, what can't be read stays, as the code may be made of that."""
        if self.is_all and self.generated and _makes_code(source, elf):
            return replace(self, is_all=False)
        return self

    def holds(self, source: Source, code: Code) -> bool:
        """Whether this code may have been loaded."""
        unpacked = _unpacked(source, code)
        return key_of(unpacked) in self.keys if unpacked else not self.is_all

    def entries(self, source: Source, entries: Sequence[NvEntry]) -> tuple[NvEntry, ...]:
        """Those of a fat binary's entries that may have been loaded, and those of an unknown kind."""
        return tuple(
            entry
            for entry in entries
            if entry.code is None or (not entry.is_blank and self.holds(source, code_of_entry(entry)))
        )

    def unused(self, source: Source, place: FoundCode) -> Iterator[Code]:
        """The codes of a CUDA choice that weren't loaded."""
        for code in place.codes if place.is_choice else ():
            is_cuda = code.target is not None and code.target.is_cuda
            is_there = code.n_bytes > 0 and not code.is_blank
            if is_cuda and is_there and not self.holds(source, code):
                yield code


def machine_code(source: Source) -> Iterator[bytes]:
    """All CUDA machine code in a file that can be read, unpacked. Raises GpuCodeError."""
    for place in find_code(source):
        for code in place.codes if place.is_choice else ():
            if code.target and code.target.is_cuda and not code.is_blank:
                unpacked = _unpacked(source, code)
                if unpacked:
                    yield unpacked


def _unpacked(source: Source, code: Code) -> bytes:
    """A cubin; empty for what can't be read: PTX, LTO-IR, damage, what unpacks to very much."""
    if not (code.target and code.target.is_machine_code):
        return b""
    payload = source.exactly(code.start, code.n_bytes, "GPU code")
    most = min(_MOST_BYTES, _MOST_RATIO * code.n_bytes)
    if code.lz4:
        n_packed, n_unpacked = code.lz4
        try:
            payload = unpack_block(payload[:n_packed], n_unpacked) if n_unpacked <= most else b""
        except ValueError:
            return b""
    elif payload.startswith(FRAME_MAGIC):
        unpacking = zstd.ZstdDecompressor()
        try:
            payload = unpacking.decompress(payload, most)
        except FAULTS:
            return b""
        if not unpacking.eof:
            return b""
    return payload if payload.startswith(OBJECT_MAGIC) else b""


def _makes_code(source: Source, elf: Elf) -> bool:
    """Whether a library's read-only data has the text that names of generated code are made with."""
    for section in elf.sections:
        if section.name.endswith("rodata") and section.file_bytes:
            rest = b""
            for chunk in source.chunks(section.offset, section.file_bytes, "read-only data"):
                if _TEMPLATE.search(rest + chunk):
                    return True
                rest = chunk[-_TEMPLATE_BYTES:]
    return False
