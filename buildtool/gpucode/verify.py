"""Checks that a pruned file is what it should be, using only both files and the targets, not the plan.

Kept code objects are byte-identical, no other code is there, every wrapper still reaches its bundle,
and memory as the loader builds it, the other sections and the headers are otherwise unchanged.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buildtool.gpucode import bundle
from buildtool.gpucode.bundle import Entry
from buildtool.gpucode.cut import read_wrappers, relr_addresses, zeroed_in_place
from buildtool.gpucode.cut_bundles import emptied_entry, kept_fatbin_entries
from buildtool.gpucode.elf import (
    DT_JMPREL,
    DT_PLTRELSZ,
    DT_RELA,
    DT_RELASZ,
    DT_RELR,
    DT_RELRSZ,
    PT_LOAD,
    PT_PHDR,
    SECTION_BYTES,
    SEGMENT_BYTES,
    SHF_ALLOC,
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
from buildtool.gpucode.nvfatbin import iter_fatbins
from buildtool.gpucode.scan import (
    BundlePlace,
    Container,
    find_code,
    find_container,
    is_inside,
    iter_bundles,
)
from buildtool.gpucode.source import CHUNK_BYTES, Source, VerifyFailed
from buildtool.gpucode.target import TargetId, serves_any
from buildtool.gpucode.used import Used

_WORD_BYTES = 8
_POINTER_AT = 8  # in a wrapper
_ADDEND_AT = 16  # in a RELA record
_PLACE_AND_LENGTH = (24, 16)  # of sh_offset and sh_size in a section header
_HEADER_FIELDS = ((32, 8), (40, 8), (56, 2))  # e_phoff, e_shoff, e_phnum may differ


# of each bundle: its file position, and id and SHA-256 of each code object in it, _EMPTIED for zeros
_Inventory = Sequence[tuple[int, Sequence[tuple[str, bytes]]]]
_EMPTIED = b"zeros"


@dataclass(frozen=True)
class _File:
    """A library with what the checks need: `sections` hold bundles, `inventory` is theirs in that order.

    `pointers`: address -> (value, place it is read from).
    """

    source: Source
    elf: Elf
    container: Container | None
    sections: tuple[Section, ...]
    inventory: _Inventory
    pointers: dict[int, tuple[int, int]]

    @classmethod
    def read(
        cls,
        source: Source,
        container: Container | None,
        names: Sequence[str],
        targets: Sequence[TargetId] | None,
        *,
        whole: frozenset[str] = frozenset(),
        used: Used | None = None,
    ) -> "_File":
        """`targets` are those whose code counts, None for all; in sections called `whole` all counts."""
        elf = read_elf(source)
        sections = []
        for name in names:
            section = elf.section(name)
            if section is None:
                raise VerifyFailed(f"{name} is gone")
            sections.append(section)
        inventory: list[tuple[int, Sequence[tuple[str, bytes]]]] = []
        for section in sections:
            wanted = None if section.name in whole else targets
            if container and container.is_cuda:
                inventory += _cuda_inventory(source, section.offset, section.file_end, wanted, used)
            else:
                inventory += _hip_inventory(source, section.offset, section.file_end, wanted)
        file = cls(source, elf, container, tuple(sections), inventory, {})
        if container:
            relocated = _relocated(source, elf)
            file.pointers.update({at: (to, place) for at, to, place in relocated if file.holds(to)})
        return file

    def holds(self, address: int) -> bool:
        """Whether the address is in a section of bundles."""
        return any(
            section.address <= address < section.address + section.n_bytes for section in self.sections
        )

    def bundle_pointers(self) -> dict[int, int | None]:
        """Address of a pointer -> index of the bundle that it points to once loaded, None in its midst."""
        index_of = {}
        for index, (place, _) in enumerate(self.inventory):
            section = next(s for s in self.sections if s.offset <= place < s.file_end)
            index_of[section.address - section.offset + place] = index
        return {address: index_of.get(value) for address, (value, _) in self.pointers.items()}


def verify_prune(old: Source, new: Source, targets: Sequence[TargetId], used: Used | None = None) -> int:
    """Compare a pruned file with its original; returns the number of code objects found identical.

    Raises VerifyFailed for the first difference that pruning to `targets` doesn't explain.
    """
    if not is_elf64(head_of(old)):
        kept = list(_hip_inventory(old, 0, old.size, targets))
        return _check_code(kept, list(_hip_inventory(new, 0, new.size, None)))
    elf = read_elf(old)
    used = used.by_library(old, elf) if used else None
    match = find_container(elf, targets)
    container, sections, own = match or (None, (), tuple(targets))
    zeroed, n_elsewhere = _zeroed_ranges(old, elf, sections, own, used)
    if not (match or zeroed):
        raise VerifyFailed("the original holds no code that could be pruned")
    names = [section.name for section in sections]
    after = _File.read(new, container, names, None)
    # a section that a cut would make shorter by less than a page stays as it is
    whole = frozenset(
        s.name for s, t in zip(sections, after.sections, strict=True) if _is_same(old, s, new, t)
    )
    before = _File.read(old, container, names, own, whole=whole, used=used)
    _check_headers(before, after)
    if container:
        _check_pointers(before, after, container)
    _check_memory(before, after, zeroed)
    _check_sections(before, after)
    return _check_code(before.inventory, after.inventory) + n_elsewhere


def _is_same(old: Source, section: Section, new: Source, present: Section) -> bool:
    """Whether a section has the same bytes in both files."""
    if section.n_bytes != present.n_bytes:
        return False
    left = old.chunks(section.offset, section.file_bytes, "a section")
    right = new.chunks(present.offset, present.file_bytes, "a section")
    return all(one == other for one, other in zip(left, right, strict=True))


def _zeroed_ranges(
    source: Source,
    elf: Elf,
    sections: Sequence[Section],
    targets: Sequence[TargetId],
    used: Used | None,
) -> tuple[list[tuple[int, int]], int]:
    """File ranges outside of the sections that may have become zeros, and how many codes are kept there."""
    ranges: list[tuple[int, int]] = []
    n_kept = 0
    for place in find_code(source):
        if not is_inside(place, sections):
            foreign = zeroed_in_place(source, elf, place, targets, used)
            ranges += [(code.start, code.n_bytes) for code in foreign]
            n_kept += sum(not code.is_blank for code in place.codes) - len(foreign)
    return ranges, n_kept


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyFailed(f"the pruned file is wrong: {message}", "please report this with the file's name")


def _check_code(kept: _Inventory, present: _Inventory) -> int:
    _expect(len(kept) == len(present), "it has another number of bundles")
    for index, ((_, wanted), (_, present_code)) in enumerate(zip(kept, present, strict=True)):
        _expect(
            [name for name, _ in wanted] == [name for name, _ in present_code],
            f"bundle {index} has other entries",
        )
        _expect(wanted == present_code, f"bundle {index} has other code")
    return sum(len(codes) for _, codes in present)


def _hip_inventory(
    source: Source, start: int, end: int, targets: Sequence[TargetId] | None
) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """What is in the bundles; with `targets`, only what should be kept."""
    for place in iter_bundles(source, start, end):
        serving = [
            entry
            for entry in place.bundle.entries
            if targets is None or entry.is_host or serves_any(entry.target, targets)
        ]
        has_code = any(entry.n_bytes for entry in serving if not entry.is_host)
        entries = serving if has_code else place.bundle.entries
        yield place.start, sorted(_digests(source, place, entries).items())


def _cuda_inventory(
    source: Source, start: int, end: int, targets: Sequence[TargetId] | None, used: Used | None
) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    for fatbin in iter_fatbins(source, start, end):
        entries = fatbin.entries if targets is None else kept_fatbin_entries(source, fatbin, targets, used)
        emptied = None if entries else emptied_entry(fatbin)
        rows = [
            (e.code, _EMPTIED if e.is_blank else _digest(source, e.start, e.stored_bytes)) for e in entries
        ]
        rows += [(emptied.code, _EMPTIED)] if emptied else []
        yield fatbin.start, [(str(code), digest) for code, digest in rows]


def _digests(source: Source, place: BundlePlace, wanted: Sequence[Entry]) -> dict[str, bytes]:
    if place.header is None:
        return {entry.id: _digest(source, place.start + entry.offset, entry.n_bytes) for entry in wanted}
    hashes = {entry.id: hashlib.sha256() for entry in wanted}
    position = 0
    for chunk in bundle.Unpacking(source, place.start, place.start + place.stored_bytes):
        for entry in wanted:
            first, last = entry.offset - position, entry.offset + entry.n_bytes - position
            hashes[entry.id].update(chunk[max(first, 0) : max(last, 0)])
        position += len(chunk)
    return {name: hasher.digest() for name, hasher in hashes.items()}


def _digest(source: Source, start: int, n_bytes: int) -> bytes:
    digest = hashlib.sha256()
    for chunk in source.chunks(start, n_bytes, "a code object"):
        digest.update(chunk)
    return digest.digest()


def _check_headers(before: _File, after: _File) -> None:
    old, new = before.elf, after.elf
    _expect(
        (old.type, old.machine, old.flags) == (new.type, new.machine, new.flags), "its ELF header changed"
    )
    new.check_loading(after.source.size)
    loads = [segment for segment in new.segments if segment.type == PT_LOAD]
    table_end = new.segments_offset + len(new.segments) * SEGMENT_BYTES
    covered = any(load.offset <= new.segments_offset and table_end <= load.file_end for load in loads)
    _expect(covered, "no segment covers its program headers")
    others = [segment for segment in old.segments if segment.type not in (PT_LOAD, PT_PHDR)]
    same = [segment for segment in new.segments if segment.type not in (PT_LOAD, PT_PHDR)]
    _expect([replace(s, offset=0) for s in others] == [replace(s, offset=0) for s in same], "other segments")
    for was, now in zip(others, same, strict=True):
        if was.file_bytes and was.offset == old.offset_of(was.address, was.file_bytes):
            present = new.offset_of(now.address, now.file_bytes)
            _expect(now.offset == present, f"segment {now.type:#x} is not where it is loaded from")


def _check_pointers(before: _File, after: _File, container: Container) -> None:
    wrappers = read_wrappers(before.source, before.elf, container)
    _expect(wrappers == read_wrappers(after.source, after.elf, container), "its wrappers changed")
    pointed = after.bundle_pointers()
    _expect(pointed == before.bundle_pointers(), "a pointer lost its bundle")
    for wrapper in wrappers:
        _expect(pointed.get(wrapper + _POINTER_AT) is not None, "a wrapper has no bundle")


def _relocated(source: Source, elf: Elf) -> Iterator[tuple[int, int, int]]:
    """(address, value, file position of the value) of what relative relocations write, load address 0."""
    tags = read_dynamic(source, elf)
    for table, length in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        n_bytes = tags.get(length, 0)
        if table in tags and n_bytes:
            start = elf.offset_of(tags[table], n_bytes)
            for place, (address, info, addend) in iter_records(source, start, n_bytes, "<QQq"):
                if info == _WORD_BYTES:  # R_X86_64_RELATIVE, no symbol
                    yield address, addend, place + _ADDEND_AT
    if tags.get(DT_RELRSZ) and DT_RELR in tags:
        start = elf.offset_of(tags[DT_RELR], tags[DT_RELRSZ])
        for address in relr_addresses(source, start, tags[DT_RELRSZ]):
            place = elf.offset_of(address, _WORD_BYTES)
            yield address, int.from_bytes(source.exactly(place, _WORD_BYTES, "a pointer"), "little"), place


def _check_memory(before: _File, after: _File, zeroed: Sequence[tuple[int, int]]) -> None:
    """Compare what the loader maps, address by address, outside the bundles and what may be zeros now."""
    excused = {(place, _WORD_BYTES) for _, place in before.pointers.values()}
    excused |= {(before.elf.offset_of(at, _WORD_BYTES), _WORD_BYTES) for at in before.pointers}
    excused |= set(_HEADER_FIELDS)
    # patchelf leaves the section headers in a loaded segment, where their places and lengths change
    headers = (before.elf.sections_offset + n * SECTION_BYTES for n in range(len(before.elf.sections)))
    excused |= {(at + _PLACE_AND_LENGTH[0], _PLACE_AND_LENGTH[1]) for at in headers}
    if before.elf.segments_offset == after.elf.segments_offset:
        excused.add((before.elf.segments_offset, len(before.elf.segments) * SEGMENT_BYTES))
    ordered, zeros = sorted(excused), sorted(zeroed)
    for segment in before.elf.segments:
        if segment.type != PT_LOAD:
            continue
        own = zeros[bisect_left(zeros, (segment.offset, 0)) : bisect_left(zeros, (segment.file_end, 0))]
        for start, end in _outside(segment, before, own):
            for place in range(start, end, CHUNK_BYTES):
                n_bytes = min(CHUNK_BYTES, end - place)
                address = segment.address + place - segment.offset
                present = after.elf.offset_of(address, n_bytes)
                _expect_same(before, after, place=place, present=present, n_bytes=n_bytes, excused=ordered)
        for start, n_bytes in own:
            if start + n_bytes <= segment.file_end:
                present = after.elf.offset_of(segment.address + start - segment.offset, n_bytes)
                _expect_zeros(before, after, place=start, present=present, n_bytes=n_bytes)


def _expect_zeros(before: _File, after: _File, *, place: int, present: int, n_bytes: int) -> None:
    """Foreign code outside of the sections is as it was, or all zeros."""
    end = after.source.skip_zeros(present, present + n_bytes)
    if end < present + n_bytes:
        _expect_same(before, after, place=place, present=present, n_bytes=n_bytes, excused=())


def _outside(segment: Segment, file: _File, zeroed: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """File ranges of a segment except the bundles, a table of program headers behind them, and zeros."""
    skipped = [(start, start + n_bytes) for start, n_bytes in zeroed]
    for section in file.sections:
        moved_table = file.elf.segments_offset == bundle.align_up(section.file_end, _WORD_BYTES)
        table_end = file.elf.segments_offset + len(file.elf.segments) * SEGMENT_BYTES
        behind = moved_table and table_end == segment.file_end
        skipped.append((section.offset, segment.file_end if behind else section.file_end))
    position = segment.offset
    for start, end in sorted(skipped):
        if segment.offset <= start < segment.file_end:
            if position < start:
                yield position, start
            position = max(position, end)
    if position < segment.file_end:
        yield position, segment.file_end


def _expect_same(
    before: _File, after: _File, *, place: int, present: int, n_bytes: int, excused: Sequence[tuple[int, int]]
) -> None:
    left = before.source.exactly(place, n_bytes, "a range to compare")
    right = after.source.exactly(present, n_bytes, "a range to compare")
    if left == right:
        return
    masked_left, masked_right = bytearray(left), bytearray(right)
    longest = SEGMENT_BYTES * len(before.elf.segments)  # the program headers
    for start, length in excused[bisect_left(excused, (place - longest, 0)) :]:
        if start >= place + n_bytes:
            break
        first, last = max(start - place, 0), min(start + length - place, n_bytes)
        if first < last:
            masked_left[first:last] = masked_right[first:last] = bytes(last - first)
    _expect(masked_left == masked_right, f"bytes near {place:#x} changed")


def _check_sections(before: _File, after: _File) -> None:
    """Compare sections that the loader doesn't map: debug information, symbols, names."""
    _expect(len(before.elf.sections) == len(after.elf.sections), "another number of sections")
    for old, new in zip(before.elf.sections, after.elf.sections, strict=True):
        same = (old.name, old.type, old.flags, old.address) == (new.name, new.type, new.flags, new.address)
        _expect(
            same and (old in before.sections or old.n_bytes == new.n_bytes), f"section {old.name} changed"
        )
        if old.flags & SHF_ALLOC or not old.file_bytes:
            continue
        excused = sorted(_symbol_values(before, old)) if old.type == SHT_SYMTAB else []
        for step in range(0, old.n_bytes, CHUNK_BYTES):
            n_bytes = min(CHUNK_BYTES, old.n_bytes - step)
            place, present = old.offset + step, new.offset + step
            _expect_same(before, after, place=place, present=present, n_bytes=n_bytes, excused=excused)


def _symbol_values(file: _File, table: Section) -> Iterator[tuple[int, int]]:
    for place, fields in iter_records(file.source, table.offset, table.n_bytes, "<IBBHQQ"):
        if any(fields[3] == section.index for section in file.sections):
            yield place + 8, _WORD_BYTES
