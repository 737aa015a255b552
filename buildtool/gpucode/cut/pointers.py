"""Everything in an x86-64 ELF file that points at a bundle, found, checked, and given its new address.

The loader's own tables are authoritative (dynamic segment, not section names): a pointer that it fills in
is rewritten where the loader reads it. Anything unexplained is refused.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from buildtool.gpucode.cut.edit import Patch
from buildtool.gpucode.errors import PruneRefused
from buildtool.gpucode.formats.container import Container
from buildtool.gpucode.formats.elf import (
    DT_JMPREL,
    DT_PLTRELSZ,
    DT_REL,
    DT_RELA,
    DT_RELAENT,
    DT_RELASZ,
    DT_RELR,
    DT_RELRSZ,
    PT_LOAD,
    SHT_DYNSYM,
    SHT_SYMTAB,
    Elf,
    Section,
    iter_records,
    read_dynamic,
)
from buildtool.gpucode.source import Source

_WRAPPER = "<IIQQ"  # magic, version, pointer to the bundle, reserved
_POINTER_AT = 8
_MAGIC_HIPK = 0x4B504948
_RELA = "<QQq"
_ADDEND_AT = 16
_SYMBOL = "<IBBHQQ"
_VALUE_AT = 8
_R_X86_64_RELATIVE = 8


@dataclass(frozen=True)
class Bundles:
    """Where bundles were and will be: `moved` maps old addresses to new ones, all within `section`."""

    section: Section
    moved: Mapping[int, int]

    def holds(self, address: int) -> bool:
        """Is the address in the old section?"""
        return self.section.address <= address < self.section.address + self.section.n_bytes

    def new_address(self, address: int, what: str) -> int:
        """A bundle's new address. Raises PruneRefused when no bundle starts at the old one."""
        if address not in self.moved:
            raise PruneRefused(
                f"{what} points into {self.section.name} at {address:#x}, where no bundle starts"
            )
        return self.moved[address]


def pointer_patches(source: Source, elf: Elf, container: Container, bundles: Bundles) -> tuple[Patch, ...]:
    """Overwrites, at positions of the original file, that make every pointer follow its bundle.

    Raises PruneRefused for a wrapper, relocation or symbol that isn't understood.
    """
    unfilled = {wrapper + _POINTER_AT for wrapper in read_wrappers(source, elf, container)}
    wanted = frozenset(unfilled)
    patches: dict[int, Patch] = {}
    for place, address, addend in _filled_by_loader(source, elf, bundles, wanted):
        new = bundles.new_address(addend, f"the relocation of {address:#x}")
        if place in patches or (address in wanted and address not in unfilled):
            raise PruneRefused(f"the pointer at {address:#x} is relocated twice")
        patches[place] = Patch.word(place, new)
        unfilled.discard(address)
        in_file = elf.offset_of(address, 8)
        word = int.from_bytes(source.exactly(in_file, 8, "a relocated pointer"), "little")
        if word == addend:
            patches[in_file] = Patch.word(in_file, new)
        elif word:
            raise PruneRefused(f"the pointer at {address:#x} and its relocation disagree")
    if unfilled:
        at = min(unfilled) - _POINTER_AT
        raise PruneRefused(f"the wrapper at {at:#x} points to no bundle in this file")
    patches |= {patch.offset: patch for patch in _symbol_patches(source, elf, bundles)}
    return tuple(patch for _, patch in sorted(patches.items()))


def read_wrappers(source: Source, elf: Elf, container: Container) -> tuple[int, ...]:
    """Addresses of all fat-binary wrappers. Raises PruneRefused for one that isn't of the plain kind."""
    section = elf.section(container.wrapper_section)
    if section is None:
        raise PruneRefused(f"bundles without {container.wrapper_section}: nothing shows what uses them")
    addresses = []
    for place, (magic, version, _, _) in iter_records(source, section.offset, section.n_bytes, _WRAPPER):
        if magic == _MAGIC_HIPK:
            raise PruneRefused(
                "the library was already split by kpack (wrapper `HIPK`): its GPU code is in .kpack archives",
                "delete the foreign targets' .kpack files instead: prune the tree",
            )
        if magic != container.wrapper_magic or version not in container.wrapper_versions:
            raise PruneRefused(f"a wrapper of unknown kind (magic {magic:#x}, version {version})")
        addresses.append(section.address + place - section.offset)
    return tuple(addresses)


def _filled_by_loader(
    source: Source, elf: Elf, bundles: Bundles, wanted: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """(file position of the addend, address it is written to, addend) of pointers into the bundles.

    Nothing but such a pointer may be written to a `wanted` address.
    """
    tags = read_dynamic(source, elf)
    if DT_REL in tags:
        raise PruneRefused("REL relocations don't belong in an x86-64 file")
    if tags.get(DT_RELAENT, struct.calcsize(_RELA)) != struct.calcsize(_RELA):
        raise PruneRefused("relocations have an unknown length")
    for table, length in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        if table in tags and tags.get(length):
            yield from _rela(source, elf, bundles, wanted, at=(tags[table], tags[length]))
    if DT_RELR in tags and tags.get(DT_RELRSZ):
        start = elf.offset_of(tags[DT_RELR], tags[DT_RELRSZ])
        for address in relr_addresses(source, start, tags[DT_RELRSZ]):
            place = elf.offset_of(address, 8)
            addend = int.from_bytes(source.exactly(place, 8, "a relocated pointer"), "little")
            if bundles.holds(address):
                raise _written_into(bundles, address)
            if bundles.holds(addend):
                yield place, address, addend


def _rela(
    source: Source, elf: Elf, bundles: Bundles, wanted: frozenset[int], *, at: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    start, n_bytes = elf.offset_of(*at), at[1]
    first, last = bundles.section.address, bundles.section.address + bundles.section.n_bytes
    for place, (offset, info, addend) in iter_records(source, start, n_bytes, _RELA):
        if first <= offset < last:
            raise _written_into(bundles, offset)
        relative = first <= addend < last and info & 0xFFFFFFFF == _R_X86_64_RELATIVE
        if relative and info == _R_X86_64_RELATIVE:
            yield place + _ADDEND_AT, offset, addend
        elif relative or offset in wanted:
            raise PruneRefused(f"the relocation of {offset:#x} has a form that is not known here")


def _written_into(bundles: Bundles, address: int) -> PruneRefused:
    return PruneRefused(f"the loader writes into {bundles.section.name} at {address:#x}")


def relr_addresses(source: Source, start: int, n_bytes: int) -> Iterator[int]:
    """Addresses in a RELR table (gABI): an even word is one, an odd word is a bitmap of the 63 after it."""
    following = 0
    for _, (word,) in iter_records(source, start, n_bytes, "<Q"):
        if word & 1 == 0:
            yield word
            following = word + 8
        else:
            yield from (following + 8 * bit for bit in range(63) if word >> (bit + 1) & 1)
            following += 63 * 8


def _symbol_patches(source: Source, elf: Elf, bundles: Bundles) -> Iterator[Patch]:
    """Symbols of bundles: a dynamic one may not move, one for debuggers follows its bundle."""
    for table in elf.sections:
        if table.type not in (SHT_SYMTAB, SHT_DYNSYM):
            continue
        for place, (_, _, _, section, value, _) in iter_records(source, table.offset, table.n_bytes, _SYMBOL):
            if section != bundles.section.index or not bundles.holds(value):
                continue
            new = bundles.moved.get(value, value)
            if table.type == SHT_DYNSYM and (new != value or value not in bundles.moved):
                raise PruneRefused(f"a dynamic symbol names code in {bundles.section.name}")
            if new != value:
                if any(s.type == PT_LOAD and s.offset <= place < s.file_end for s in elf.segments):
                    raise PruneRefused(f"{table.name} is inside a loaded segment")
                yield Patch.word(place + _VALUE_AT, new)
