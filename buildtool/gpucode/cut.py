"""Plans to remove foreign targets' code from a file: the pieces of the new file, and the pointers to correct.

The section of bundles gets shorter, what follows moves to the front by whole pages, and whatever refers to a
moved place (headers, relocations, symbols) is overwritten.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from buildtool.gpucode import bundle
from buildtool.gpucode.bundle import PAGE_BYTES, align_up
from buildtool.gpucode.cut_bundles import Cut, cut_bundles, cut_fatbins
from buildtool.gpucode.elf import (
    DT_JMPREL,
    DT_PLTRELSZ,
    DT_REL,
    DT_RELA,
    DT_RELAENT,
    DT_RELASZ,
    DT_RELR,
    DT_RELRSZ,
    EM_X86_64,
    ET_DYN,
    PT_GNU_RELRO,
    PT_INTERP,
    PT_LOAD,
    PT_PHDR,
    SECTION_BYTES,
    SEGMENT_BYTES,
    SHT_DYNSYM,
    SHT_SYMTAB,
    Elf,
    Section,
    Segment,
    head_of,
    is_elf64,
    iter_records,
    read_dynamic,
    read_elf,
)
from buildtool.gpucode.forward import BUNDLE_MAGIC, COMPRESSED_MAGIC
from buildtool.gpucode.plan import Copy, Literal, Patch, Piece, PrunePlan, Zeros
from buildtool.gpucode.scan import (
    UNKNOWN,
    Code,
    Container,
    FoundCode,
    find_code,
    find_container,
    foreign_in_place,
    is_inside,
    is_loaded,
    scan_file,
)
from buildtool.gpucode.source import PruneRefused, Source
from buildtool.gpucode.target import TargetId, known_targets, served_targets, serves_any
from buildtool.gpucode.used import Used

# The plan.


def plan_prune(
    source: Source,
    targets: Sequence[TargetId],
    *,
    compress: int | None = None,
    strict: bool = True,
    used: Used | None = None,
) -> PrunePlan:
    """Plan to keep what `targets` can run: their code with all feature variants, generic ISAs, SPIR-V.

    `compress` writes raw bundles as CCOB of that version (1 to 3). With `strict` every target must
    be in the file and every HIP bundle must have code for one; without, one target suffices, a
    bundle that never served any is left whole, and so is a file for other vendors' cards. A file
    without GPU code, or where no page would be saved, gives a plan that changes nothing. With `used`, CUDA
    code that runs didn't load goes as well.
    Raises TargetMissing, PruneRefused when a cut might break the file; BadElf or BadBundle when it
    is damaged.
    """
    if compress is not None and compress not in bundle.VERSIONS:
        raise ValueError(f"CCOB version {compress}")
    head = head_of(source)
    plan = PrunePlan.unchanged(source.size)
    if is_elf64(head):
        plan = _plan_library(source, targets, compress=compress, strict=strict, used=used)
    elif head.startswith((BUNDLE_MAGIC, COMPRESSED_MAGIC)):
        plan = _plan_bundle(source, targets, compress=compress, strict=strict)
    if not (plan.changed or plan.kept_bytes) and strict:
        _refuse_uncuttable(source, targets)
    return plan


def _plan_bundle(
    source: Source, targets: Sequence[TargetId], *, compress: int | None, strict: bool
) -> PrunePlan:
    """A file that is a bundle itself."""
    own = tuple(target for target in targets if not target.is_cuda)
    if not own:
        return PrunePlan.unchanged(source.size)
    cut = cut_bundles(source, 0, source.size, address=0, targets=own, strict=strict, compress=compress)
    if not cut.changed or cut.n_bytes >= source.size:
        return _unchanged(source, cut)
    return PrunePlan(source.size, cut.n_bytes, cut.pieces, (), cut.kept_bytes, cut.removed_bytes)


def _refuse_uncuttable(source: Source, targets: Sequence[TargetId]) -> None:
    """Raises TargetMissing or PruneRefused when a file that has nothing to cut holds other cards' code."""
    names = scan_file(source)
    codes = known_targets(names)
    if codes:
        served_targets(codes, targets, strict=True)
    if UNKNOWN in names or not all(serves_any(code, targets) for code in codes):
        raise PruneRefused(
            "its GPU code is in a form that can't be cut: LLVM's OffloadBinary, or code objects and"
            " compressed bundles outside of the sections for them"
        )


def _unchanged(source: Source, cut: Cut) -> PrunePlan:
    """A plan that changes nothing; what the cut would have removed counts as kept."""
    return PrunePlan.unchanged(source.size, Counter(cut.kept_bytes) + Counter(cut.removed_bytes))


def _plan_library(
    source: Source,
    targets: Sequence[TargetId],
    *,
    compress: int | None,
    strict: bool,
    used: Used | None,
) -> PrunePlan:
    """Plan a library or program: zeros for code outside of the known sections, then these get shorter."""
    elf = read_elf(source)
    used = used.by_library(source, elf) if used else None
    match = find_container(elf, targets)
    sections = match[1] if match else ()
    own = match[2] if match else tuple(targets)
    places = find_code(source)
    present = {code.target for place in places for code in place.codes if code.target and not code.is_blank}
    vendors = {target.is_cuda for target in own}
    codes = {code for code in present if code.is_cuda in vendors}
    if not codes:
        if match and strict:
            served_targets((), own, strict=True)
        return PrunePlan.unchanged(source.size)
    served_targets(codes, own, strict=strict)
    elsewhere = [place for place in places if not is_inside(place, sections)]
    plan = _plan_zeros(source, elf, elsewhere, own, used)
    if match is None:
        return plan
    if elf.machine != EM_X86_64:
        raise PruneRefused(f"a host program for ELF machine {elf.machine}; only x86-64 (62) can be pruned")
    elf.check_loading(source.size)
    kept, removed, zeroed_bytes = Counter(plan.kept_bytes), Counter(plan.removed_bytes), plan.zeroed_bytes
    for section in sections:
        cutter: Callable[..., Cut] = partial(cut_bundles, compress=compress, strict=strict)
        if match[0].is_cuda:
            cutter = partial(cut_fatbins, used=used)
        step = _plan_section(plan.view(source), match[0], section.name, partial(cutter, targets=own))
        kept, removed = kept + Counter(step.kept_bytes), removed + Counter(step.removed_bytes)
        plan = plan.then(step)
    return replace(plan, kept_bytes=dict(kept), removed_bytes=dict(removed), zeroed_bytes=zeroed_bytes)


def _plan_zeros(
    source: Source, elf: Elf, places: Sequence[FoundCode], targets: Sequence[TargetId], used: Used | None
) -> PrunePlan:
    """Zeros in place of foreign code: nothing moves, so that tables of any kind may point to it.

    A runtime chooses by the containers' headers, which stay, and never reads what isn't for the card. What no
    segment loads, as in object files, stays: a linker may read it.
    """
    kept, removed = Counter[str](), Counter[str]()
    pieces: list[Piece] = []
    end = 0
    for place in places:
        foreign = zeroed_in_place(source, elf, place, targets, used)
        for code in place.codes:
            if not code.is_blank:
                (removed if code in foreign else kept)[code.name] += code.n_bytes or code.stored_bytes
            if code in foreign:
                pieces += [Copy(end, code.start - end), Zeros(code.n_bytes)]
                end = code.start + code.n_bytes
    if not pieces:
        return PrunePlan.unchanged(source.size, kept)
    elf.check_loading(source.size)
    pieces.append(Copy(end, source.size - end))
    whole = tuple(piece for piece in pieces if piece.n_bytes)
    zeroed_bytes = sum(piece.n_bytes for piece in whole if isinstance(piece, Zeros))
    return PrunePlan(source.size, source.size, whole, (), dict(kept), dict(removed), zeroed_bytes)


def zeroed_in_place(
    source: Source, elf: Elf, place: FoundCode, targets: Sequence[TargetId], used: Used | None
) -> frozenset[Code]:
    """The codes of a place outside of the known sections that become zeros."""
    if not is_loaded(elf, place):
        return frozenset()
    return frozenset((*foreign_in_place(place, targets), *(used.unused(source, place) if used else ())))


def _plan_section(source: Source, container: Container, name: str, cutter: Callable[..., Cut]) -> PrunePlan:
    elf = read_elf(source)
    section = elf.section(name)
    assert section is not None
    cut = cutter(source, section.offset, section.file_end, address=section.address)
    return _plan_elf(source, elf, container, section=section, cut=cut) or _unchanged(source, cut)


def _plan_elf(
    source: Source, elf: Elf, container: Container, *, section: Section, cut: Cut
) -> PrunePlan | None:
    """Join a section's cut, the pointers and the layout; None when no page would be freed."""
    around = find_surroundings(elf, section, source.size)
    moved = {section.address + old: section.address + new for old, new in cut.moved.items()}
    siblings = tuple(
        other for name in container.sections if name != section.name and (other := elf.section(name))
    )
    pointers = pointer_patches(source, elf, container, MovedBundles(section, moved, siblings))
    layout = lay_out_file(elf, around, cut.n_bytes, source.size) if cut.changed else None
    if layout is None:
        return None
    if any(section.offset <= patch.offset < around.tail_start for patch in pointers):
        raise PruneRefused(f"a pointer to a bundle is in {section.name} itself")
    shifted = tuple(
        Patch(patch.offset - layout.shift if patch.offset >= around.tail_start else patch.offset, patch.data)
        for patch in pointers
    )
    pieces = (Copy(0, section.offset), *cut.pieces, *layout.tail)
    return PrunePlan(
        bytes_before=source.size,
        bytes_after=source.size - layout.shift,
        pieces=pieces,
        patches=(*shifted, *layout.patches),
        kept_bytes=cut.kept_bytes,
        removed_bytes=cut.removed_bytes,
    )


# The file's layout around the section.

_E_PHOFF, _E_SHOFF, _E_PHNUM = 32, 40, 56
_SH_OFFSET, _SH_SIZE = 24, 32


@dataclass(frozen=True)
class Surroundings:
    """What surrounds the section in the file: its segment, and where the rest of the file starts.

    `split` when the segment goes on behind the section; `moved_table` when an earlier prune put the
    program headers there; `align`: file positions move by a multiple of it.
    """

    section: Section
    segment: Segment
    tail_start: int
    split: bool
    moved_table: bool
    align: int


@dataclass(frozen=True)
class Layout:
    """Pieces behind the section's new content (up to the end of the file), and header overwrites.

    `shift` is how far the rest of the file moves to the front; overwrites are at output positions.
    """

    tail: tuple[Piece, ...]
    patches: tuple[Patch, ...]
    shift: int


def find_surroundings(elf: Elf, section: Section, size: int) -> Surroundings:
    """What surrounds a section in its file. Raises PruneRefused when it can't be shortened safely."""
    segment = _segment_of(elf, section)
    # an earlier prune's table ends the segment and isn't kept: this prune writes its own
    table_end = elf.segments_offset + len(elf.segments) * SEGMENT_BYTES
    right_behind = elf.segments_offset == align_up(section.file_end, 8)
    moved_table = right_behind and table_end == segment.file_end
    split = segment.file_end > section.file_end and not moved_table
    if segment.memory_bytes > segment.file_bytes and not split:
        raise PruneRefused(f"zero-filled memory follows {section.name} in its segment")
    # the kernel hands a program's headers to the loader, and before 5.18 assumed them to be in front
    if split and (elf.type != ET_DYN or any(s.type == PT_INTERP for s in elf.segments)):
        raise PruneRefused("a program's headers can't be moved for every kernel", "prune its libraries only")
    after = [size, elf.sections_offset, *(s.offset for s in elf.sections if s.file_bytes)]
    after += [s.offset for s in elf.segments if s.file_bytes and s.type != PT_PHDR]
    # split: the rest begins right behind, mid-page; both halves then map that page, each its own part
    tail_start = section.file_end if split else min(place for place in after if place >= section.file_end)
    align = max(PAGE_BYTES, *(s.align for s in elf.segments if s.type == PT_LOAD))
    if align & (align - 1):
        raise PruneRefused(f"a segment's alignment of {align} is not a power of two")
    around = Surroundings(section, segment, tail_start, split, moved_table, align)
    _refuse_overlaps(elf, around)
    return around


def _segment_of(elf: Elf, section: Section) -> Segment:
    holders = [
        segment for segment in elf.segments
        if segment.type == PT_LOAD and segment.offset < section.file_end and section.offset < segment.file_end
    ]  # fmt: skip
    whole = [
        segment for segment in holders
        if segment.offset <= section.offset and section.file_end <= segment.file_end
        and section.address - segment.address == section.offset - segment.offset
    ]  # fmt: skip
    if len(holders) != 1 or whole != holders:
        raise PruneRefused(f"{section.name} isn't in exactly one loaded segment")
    return whole[0]


def _refuse_overlaps(elf: Elf, around: Surroundings) -> None:
    start, end = around.section.offset, around.tail_start
    for other in elf.sections:
        if other.file_bytes and other.offset < end and other.file_end > start and other != around.section:
            raise PruneRefused(f"section {other.name} overlaps {around.section.name}")
    last_address = around.section.address + around.section.n_bytes
    for segment in elf.segments:
        in_file = segment.file_bytes and segment.offset < end and segment.file_end > start
        if in_file and segment != around.segment and segment.type != PT_PHDR:
            raise PruneRefused(f"a segment of type {segment.type:#x} overlaps {around.section.name}")
        in_memory = segment.address < last_address and segment.memory_end > around.section.address
        if segment.type == PT_GNU_RELRO and in_memory:
            raise PruneRefused(f"{around.section.name} is made read-only after relocation")
    if start < elf.sections_offset + len(elf.sections) * SECTION_BYTES and elf.sections_offset < end:
        raise PruneRefused(f"the section headers overlap {around.section.name}")


def lay_out_file(elf: Elf, around: Surroundings, new_bytes: int, size: int) -> Layout | None:
    """Headers and tail for a section of `new_bytes`; None when not even one page would be freed."""
    new_end = around.section.offset + new_bytes
    with_table = around.split or around.moved_table
    table_offset = align_up(new_end, 8) if with_table else elf.segments_offset
    count = len(elf.segments) + around.split
    used_end = table_offset + count * SEGMENT_BYTES if with_table else new_end
    shift = (around.tail_start - used_end) // around.align * around.align
    if shift <= 0:
        return None
    segments = _new_segments(elf, around, shift=shift, used_end=used_end, table_offset=table_offset)
    table = b"".join(segment.pack() for segment in segments)
    tail: list[Piece] = []
    if with_table:
        tail += [Zeros(table_offset - new_end), Literal(table)]
    tail += [Zeros(around.tail_start - shift - used_end), Copy(around.tail_start, size - around.tail_start)]
    patches = [
        Patch.word(_E_PHOFF, table_offset),
        Patch.word(_E_SHOFF, _shifted(elf.sections_offset, around, shift)),
        Patch(_E_PHNUM, struct.pack("<H", count)),
        *_section_patches(elf, around, new_bytes, shift),
    ]
    if not with_table:
        patches.append(Patch(table_offset, table))
    return Layout(tuple(piece for piece in tail if piece.n_bytes), tuple(patches), shift)


def _shifted(offset: int, around: Surroundings, shift: int) -> int:
    return offset - shift if offset >= around.tail_start else offset


def _new_segments(
    elf: Elf, around: Surroundings, *, shift: int, used_end: int, table_offset: int
) -> Iterator[Segment]:
    old = around.segment
    for segment in elf.segments:
        if segment == old:
            n_bytes = used_end - old.offset
            yield replace(old, file_bytes=n_bytes, memory_bytes=n_bytes)
            if around.split:
                inside = around.tail_start - old.offset
                yield replace(
                    old,
                    offset=around.tail_start - shift,
                    address=old.address + inside,
                    physical_address=old.physical_address + inside,
                    file_bytes=old.file_bytes - inside,
                    memory_bytes=old.memory_bytes - inside,
                )
        elif segment.type == PT_PHDR and table_offset > around.section.offset:
            address = old.address + table_offset - old.offset
            n_bytes = (len(elf.segments) + around.split) * SEGMENT_BYTES
            yield replace(
                segment, offset=table_offset, address=address, physical_address=address,
                file_bytes=n_bytes, memory_bytes=n_bytes,
            )  # fmt: skip
        else:
            yield replace(segment, offset=_shifted(segment.offset, around, shift))


def _section_patches(elf: Elf, around: Surroundings, new_bytes: int, shift: int) -> Iterator[Patch]:
    table = _shifted(elf.sections_offset, around, shift)
    for section in elf.sections:
        header = table + section.index * SECTION_BYTES
        if section == around.section:
            yield Patch.word(header + _SH_SIZE, new_bytes)
        elif section.offset >= around.tail_start:
            yield Patch.word(header + _SH_OFFSET, section.offset - shift)


# Pointers into the section.

_WRAPPER = "<IIQQ"  # magic, version, pointer to the bundle, reserved
_POINTER_AT = 8
_MAGIC_HIPK = 0x4B504948
_RELA = "<QQq"
_ADDEND_AT = 16
_SYMBOL = "<IBBHQQ"
_VALUE_AT = 8
_R_X86_64_RELATIVE = 8


@dataclass(frozen=True)
class MovedBundles:
    """Where bundles were and will be: `moved` maps old addresses to new ones, all within `section`.

    `siblings` are the file's other sections of bundles, which wrappers may point to as well.
    """

    section: Section
    moved: Mapping[int, int]
    siblings: tuple[Section, ...] = ()

    def in_sibling(self, address: int) -> bool:
        """Whether the address is in another section of bundles."""
        return any(s.address <= address < s.address + s.n_bytes for s in self.siblings)

    def contains(self, address: int) -> bool:
        """Whether the address is in the old section."""
        return self.section.address <= address < self.section.address + self.section.n_bytes

    def new_address(self, address: int, what: str) -> int:
        """A bundle's new address. Raises PruneRefused when no bundle starts at the old one."""
        if address not in self.moved:
            raise PruneRefused(
                f"{what} points into {self.section.name} at {address:#x}, where no bundle starts"
            )
        return self.moved[address]


def pointer_patches(
    source: Source, elf: Elf, container: Container, bundles: MovedBundles
) -> tuple[Patch, ...]:
    """Overwrites, at positions of the original file, that make every pointer follow its bundle.

    Raises PruneRefused for a wrapper, relocation or symbol that isn't understood.
    """
    missing = {wrapper + _POINTER_AT for wrapper in read_wrappers(source, elf, container)}
    pointers = frozenset(missing)
    patches: dict[int, Patch] = {}
    for place, address, addend in _relocated_pointers(source, elf, bundles, pointers):
        if bundles.in_sibling(addend):
            missing.discard(address)
            continue
        new = bundles.new_address(addend, f"the relocation of {address:#x}")
        if place in patches or (address in pointers and address not in missing):
            raise PruneRefused(f"the pointer at {address:#x} is relocated twice")
        patches[place] = Patch.word(place, new)
        missing.discard(address)
        in_file = elf.offset_of(address, 8)
        word = int.from_bytes(source.exactly(in_file, 8, "a relocated pointer"), "little")
        if word == addend:
            patches[in_file] = Patch.word(in_file, new)
        elif word:
            raise PruneRefused(f"the pointer at {address:#x} and its relocation disagree")
    if missing:
        at = min(missing) - _POINTER_AT
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


def _relocated_pointers(
    source: Source, elf: Elf, bundles: MovedBundles, pointers: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """(file position of the addend, address it is written to, addend) of pointers into the bundles.

    Nothing but such a pointer may be written to an address in `pointers`.
    """
    tags = read_dynamic(source, elf)
    if DT_REL in tags:
        raise PruneRefused("REL relocations don't belong in an x86-64 file")
    if tags.get(DT_RELAENT, struct.calcsize(_RELA)) != struct.calcsize(_RELA):
        raise PruneRefused("relocations have an unknown length")
    for table, length in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        if table in tags and tags.get(length):
            yield from _relocations(source, elf, bundles, pointers, at=(tags[table], tags[length]))
    if DT_RELR in tags and tags.get(DT_RELRSZ):
        start = elf.offset_of(tags[DT_RELR], tags[DT_RELRSZ])
        for address in relr_addresses(source, start, tags[DT_RELRSZ]):
            place = elf.offset_of(address, 8)
            addend = int.from_bytes(source.exactly(place, 8, "a relocated pointer"), "little")
            if bundles.contains(address):
                raise _written_into(bundles, address)
            if bundles.contains(addend) or (address in pointers and bundles.in_sibling(addend)):
                yield place, address, addend


def _relocations(
    source: Source, elf: Elf, bundles: MovedBundles, pointers: frozenset[int], *, at: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    start, n_bytes = elf.offset_of(*at), at[1]
    first, last = bundles.section.address, bundles.section.address + bundles.section.n_bytes
    for place, (offset, info, addend) in iter_records(source, start, n_bytes, _RELA):
        if first <= offset < last:
            raise _written_into(bundles, offset)
        into = first <= addend < last or (offset in pointers and bundles.in_sibling(addend))
        relative = into and info & 0xFFFFFFFF == _R_X86_64_RELATIVE
        if relative and info == _R_X86_64_RELATIVE:
            yield place + _ADDEND_AT, offset, addend
        elif relative or offset in pointers:
            raise PruneRefused(f"the relocation of {offset:#x} has a form that is not known here")


def _written_into(bundles: MovedBundles, address: int) -> PruneRefused:
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


def _symbol_patches(source: Source, elf: Elf, bundles: MovedBundles) -> Iterator[Patch]:
    """Overwrites of bundles' symbols: a dynamic one may not move, one for debuggers follows its bundle."""
    for table in elf.sections:
        if table.type not in (SHT_SYMTAB, SHT_DYNSYM):
            continue
        for place, (_, _, _, section, value, _) in iter_records(source, table.offset, table.n_bytes, _SYMBOL):
            if section != bundles.section.index or not bundles.contains(value):
                continue
            new = bundles.moved.get(value, value)
            if table.type == SHT_DYNSYM and (new != value or value not in bundles.moved):
                raise PruneRefused(f"a dynamic symbol names code in {bundles.section.name}")
            if new != value:
                if elf.is_loaded(place, place + 1):
                    raise PruneRefused(f"{table.name} is inside a loaded segment")
                yield Patch.word(place + _VALUE_AT, new)
