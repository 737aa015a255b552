"""A code object as AMD's loader sees it: a kernel's descriptor, its instructions, and their source lines."""

import bisect
import io
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from elftools.elf.elffile import ELFFile
from operations import common_name
from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import Inst
from tinygrad.runtime.autogen.amd.cdna import ins as cdna
from tinygrad.runtime.autogen.amd.rdna3 import ins as rdna3
from tinygrad.runtime.autogen.amd.rdna4 import ins as rdna4

ARCHITECTURES = {"gfx90a": "cdna", "gfx942": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}
_BY_TOP_BITS = {  # formats that tinygrad's decoder leaves out, by the word's top six bits
    ("rdna3", 0x38): rdna3.MUBUF,
    ("rdna4", 0x31): rdna4.VBUFFER,
}
_MFMA_1K = {0x66: "V_MFMA_F32_32X32X8_BF16", 0x67: "V_MFMA_F32_16X16X16_BF16"}  # of CDNA 2: `..._BF16_1K`


class Unknown(Exception):
    """Machine code that no table here knows."""


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction: `fields` are the format's, registers as their codes (256: VGPR 0)."""

    at: int  # bytes from the kernel's begin
    size: int
    name: str
    form: str
    fields: dict[str, int]
    decoded: Inst | None = None
    source: str = ""

    @property
    def text(self) -> str:
        """As tinygrad writes it."""
        return repr(self.decoded) if self.decoded is not None else self.name.lower()

    def __getattr__(self, name: str) -> int:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Descriptor:
    """What the loader reads of the 64 bytes `NAME.kd`."""

    lds: int
    private: int
    kernarg: int
    rsrc3: int
    rsrc1: int
    rsrc2: int
    properties: int
    preload: int

    @property
    def preloaded_words(self) -> tuple[int, int]:
        """Words of the arguments that are in scalar registers, and how many are skipped."""
        return self.preload & 0x7F, self.preload >> 7


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be run."""

    name: str
    target: str
    architecture: str
    wave: int
    descriptor: Descriptor
    code: list[Instruction] = field(repr=False)
    entry: int  # index of the first instruction
    acts: dict[int, Callable] = field(default_factory=dict, repr=False)  # what instructions do, once known

    def changed(self, place: int, instruction: Instruction) -> "Kernel":
        """With another instruction at a place."""
        code = [*self.code[:place], instruction, *self.code[place + 1 :]]
        return replace(self, code=code, acts={at: act for at, act in self.acts.items() if at != place})

    @property
    def accumulators(self) -> int:
        """The VGPR with which the accumulation registers begin, in the one file that CDNA 2 has."""
        return ((self.descriptor.rsrc3 & 0x3F) + 1) * 4 if self.architecture == "cdna" else 512

    @property
    def sgprs(self) -> int:
        """Scalar registers that a wave has, but for VCC: on CDNA by sixteens, VCC among the last."""
        return (
            min(102, ((self.descriptor.rsrc1 >> 6 & 0xF) // 2 + 1) * 16)
            if self.architecture == "cdna"
            else 106
        )

    @property
    def vgprs(self) -> int:
        """Vector registers that a wave has, accumulation registers too."""
        granule = 8 if self.architecture == "cdna" or self.wave == 32 else 4
        return ((self.descriptor.rsrc1 & 0x3F) + 1) * granule


def _word(data: bytes) -> int:
    return int.from_bytes(data[:4], "little")


def decode(data: bytes, architecture: str) -> tuple[str, str, int, dict[str, int], Inst | None]:
    """Name, format, bytes, fields and tinygrad's form of the first instruction of `data`. Raises Unknown."""
    window = data[:16].ljust(16, b"\0")
    form = _BY_TOP_BITS.get((architecture, _word(window) >> 26))
    try:
        found = form.from_bytes(window) if form else decode_inst(window, architecture)
    except (ValueError, AssertionError) as error:
        op = _word(window) >> 16 & 0x7F
        if architecture == "cdna" and _word(window) >> 23 == 0x1A7 and op in _MFMA_1K:
            fields = _raw(cdna.VOP3P_MFMA, window)
            return _MFMA_1K[op], "VOP3P_MFMA", 8, fields, None
        raise Unknown(f"no table has {_word(window):#010x} of {architecture}: {error}") from None
    fields = _raw(type(found), window)
    dual = "opx" in fields
    name = f"{found.opx.name}+{found.opy.name}" if dual else common_name(found.op_name)
    return name, type(found).__name__, found.size(), fields, found


def _raw(form: type[Inst], window: bytes) -> dict[str, int]:
    """The fields as numbers; registers by their codes among all sources."""
    bits = int.from_bytes(window, "little")
    raw = {}
    for name, of in _places(form):
        value = bits >> of[0] & of[1]
        raw[name] = of[2] + value * of[3]
    return raw


@cache
def _places(form: type[Inst]) -> list[tuple[str, tuple[int, int, int, int]]]:
    places = []
    for name, of in form._fields:
        first = getattr(of, "_valid_range", (0, 0))[0]
        places.append((name, (of.lo, of.mask, first, getattr(of, "_align", 1))))
    return places


def load(binary: bytes, name: str, target: str) -> Kernel:
    """The kernel of that name in a code object. Raises Unknown for code that can't be decoded."""
    elf = ELFFile(io.BytesIO(binary))
    table = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
    symbols = {of.name: of.entry for of in table.iter_symbols()}
    place = symbols[f"{name}.kd"]["st_value"]
    raw = _at(elf, place, 64)
    lds, private, kernarg = struct.unpack_from("<III", raw, 0)
    (entry,) = struct.unpack_from("<q", raw, 16)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", raw, 44)
    descriptor = Descriptor(lds, private, kernarg, rsrc3, rsrc1, rsrc2, properties, preload)
    begin, size = place + entry, symbols[name]["st_size"]
    architecture = ARCHITECTURES[target]
    text = _at(elf, begin, size)
    code, at, lines = [], 0, _lines(elf)
    addresses = [address for address, _ in lines]
    while at < size:
        if architecture != "cdna" and not text[at:].strip(b"\0"):
            break  # padding
        kind, form, bytes_, fields, decoded = decode(text[at:], architecture)
        line = bisect.bisect_right(addresses, begin + at) - 1
        code.append(Instruction(at, bytes_, kind, form, fields, decoded, lines[line][1] if line >= 0 else ""))
        at += bytes_
    first = 256 if preload and architecture == "cdna" else 0
    start = next(i for i, of in enumerate(code) if of.at == first)
    wave = 32 if properties >> 10 & 1 else 64
    return Kernel(name, target, architecture, wave, descriptor, code, start)


def _at(elf: ELFFile, address: int, size: int) -> bytes:
    for segment in elf.iter_segments():
        begin = segment["p_vaddr"]
        if segment["p_type"] == "PT_LOAD" and begin <= address < begin + segment["p_filesz"]:
            return segment.data()[address - begin : address - begin + size]
    raise Unknown(f"nothing is loaded at {address:#x}")


def _lines(elf: ELFFile) -> list[tuple[int, str]]:
    """Addresses from which on instructions are of a source line, by the line table."""
    if not elf.has_dwarf_info():
        return []
    rows = []
    info = elf.get_dwarf_info()
    for unit in info.iter_CUs():
        program = info.line_program_for_CU(unit)
        if program is None:
            continue
        names = program["file_entry"]
        first = 0 if program["version"] >= 5 else 1
        for entry in program.get_entries():
            if entry.state and not entry.state.end_sequence:
                name = names[entry.state.file - first].name.decode()
                rows.append((entry.state.address, f"{name.rsplit('/', 1)[-1]}:{entry.state.line}"))
    return sorted(rows, key=lambda row: row[0])
