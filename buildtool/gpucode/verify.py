"""Checks that a pruned file is what it should be, using only both files and the targets, not the plan.

Kept code objects are byte-identical, no other code is there, every wrapper still reaches its bundle,
and memory as the loader builds it, the other sections and the headers are otherwise unchanged.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buildtool.gpucode import bundle
from buildtool.gpucode.bundle import Entry
from buildtool.gpucode.cut import read_wrappers, relr_addresses
from buildtool.gpucode.cut_bundles import kept_fatbin_entries
from buildtool.gpucode.elf import (
    DT_JMPREL,
    DT_PLTRELSZ,
    DT_RELA,
    DT_RELASZ,
    DT_RELR,
    DT_RELRSZ,
    PT_LOAD,
    PT_PHDR,
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
from buildtool.gpucode.scan import BundlePlace, Container, find_container, iter_bundles
from buildtool.gpucode.source import CHUNK_BYTES, Source, VerifyFailed
from buildtool.gpucode.target import TargetId, serves_any

_WORD_BYTES = 8
_POINTER_AT = 8  # in a wrapper
_ADDEND_AT = 16  # in a RELA record
_HEADER_FIELDS = ((32, 8), (40, 8), (56, 2))  # e_phoff, e_shoff, e_phnum may differ


# of each bundle: its file position, and id and SHA-256 of each code object in it
_Inventory = Sequence[tuple[int, Sequence[tuple[str, bytes]]]]


@dataclass(frozen=True)
class _File:
    """A library with what the checks need. `pointers`: address -> (value, place it is read from)."""

    source: Source
    elf: Elf
    container: Container
    fatbin: Section
    inventory: _Inventory
    pointers: dict[int, tuple[int, int]]

    @classmethod
    def read(cls, source: Source, container: Container, targets: Sequence[TargetId] | None) -> "_File":
        elf = read_elf(source)
        fatbin = elf.section(container.section)
        if fatbin is None:
            raise VerifyFailed(f"{container.section} is gone")
        inventory_of = _cuda_inventory if container.is_cuda else _hip_inventory
        inventory = list(inventory_of(source, fatbin.offset, fatbin.file_end, targets))
        start, end = fatbin.address, fatbin.address + fatbin.n_bytes
        pointers = {at: (to, place) for at, to, place in _relocated(source, elf) if start <= to < end}
        return cls(source, elf, container, fatbin, inventory, pointers)

    def bundle_pointers(self) -> dict[int, int | None]:
        """Address of a pointer -> index of the bundle that it points to once loaded, None in its midst."""
        base = self.fatbin.address - self.fatbin.offset
        index_of = {base + place: index for index, (place, _) in enumerate(self.inventory)}
        return {address: index_of.get(value) for address, (value, _) in self.pointers.items()}


def verify_prune(old: Source, new: Source, targets: Sequence[TargetId]) -> int:
    """Compare a pruned file with its original; returns the number of code objects found identical.

    Raises VerifyFailed for the first difference that pruning to `targets` doesn't explain.
    """
    if not is_elf64(head_of(old)):
        kept = list(_hip_inventory(old, 0, old.size, targets))
        return _check_code(kept, list(_hip_inventory(new, 0, new.size, None)))
    match = find_container(read_elf(old), targets)
    if match is None:
        raise VerifyFailed("the original holds no code that could be pruned")
    container, _, own = match
    before, after = _File.read(old, container, own), _File.read(new, container, None)
    _check_headers(before, after)
    _check_pointers(before, after)
    _check_memory(before, after)
    _check_sections(before, after)
    return _check_code(before.inventory, after.inventory)


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
    source: Source, start: int, end: int, targets: Sequence[TargetId] | None
) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    for fatbin in iter_fatbins(source, start, end):
        entries = fatbin.entries if targets is None else kept_fatbin_entries(fatbin, targets)
        yield fatbin.start, [(str(e.code), _digest(source, e.start, e.stored_bytes)) for e in entries]


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


def _check_pointers(before: _File, after: _File) -> None:
    wrappers = read_wrappers(before.source, before.elf, before.container)
    _expect(wrappers == read_wrappers(after.source, after.elf, after.container), "its wrappers changed")
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


def _check_memory(before: _File, after: _File) -> None:
    """Compare what the loader maps, address by address, outside the bundles."""
    fatbin = before.fatbin
    excused = {(place, _WORD_BYTES) for _, place in before.pointers.values()}
    excused |= {(before.elf.offset_of(at, _WORD_BYTES), _WORD_BYTES) for at in before.pointers}
    excused |= set(_HEADER_FIELDS)
    if before.elf.segments_offset == after.elf.segments_offset:
        excused.add((before.elf.segments_offset, len(before.elf.segments) * SEGMENT_BYTES))
    for segment in before.elf.segments:
        if segment.type != PT_LOAD:
            continue
        for start, end in _outside(segment, fatbin, before.elf):
            for place in range(start, end, CHUNK_BYTES):
                n_bytes = min(CHUNK_BYTES, end - place)
                address = segment.address + place - segment.offset
                present = after.elf.offset_of(address, n_bytes)
                _expect_same(before, after, place=place, present=present, n_bytes=n_bytes, excused=excused)


def _outside(segment: Segment, fatbin: Section, elf: Elf) -> Iterator[tuple[int, int]]:
    """File ranges of a segment except the bundles, and a table of program headers behind them."""
    if not segment.offset <= fatbin.offset < segment.file_end:
        yield segment.offset, segment.file_end
        return
    yield segment.offset, fatbin.offset
    if elf.segments_offset < fatbin.file_end:
        yield fatbin.file_end, segment.file_end


def _expect_same(
    before: _File, after: _File, *, place: int, present: int, n_bytes: int, excused: set[tuple[int, int]]
) -> None:
    left = before.source.exactly(place, n_bytes, "a range to compare")
    right = after.source.exactly(present, n_bytes, "a range to compare")
    if left == right:
        return
    masked_left, masked_right = bytearray(left), bytearray(right)
    for start, length in excused:
        first, last = max(start - place, 0), min(start + length - place, n_bytes)
        if first < last:
            masked_left[first:last] = masked_right[first:last] = bytes(last - first)
    _expect(masked_left == masked_right, f"bytes near {place:#x} changed")


def _check_sections(before: _File, after: _File) -> None:
    """Compare sections that the loader doesn't map: debug information, symbols, names."""
    _expect(len(before.elf.sections) == len(after.elf.sections), "another number of sections")
    for old, new in zip(before.elf.sections, after.elf.sections, strict=True):
        same = (old.name, old.type, old.flags, old.address) == (new.name, new.type, new.flags, new.address)
        _expect(same and (old == before.fatbin or old.n_bytes == new.n_bytes), f"section {old.name} changed")
        if old.flags & SHF_ALLOC or not old.file_bytes:
            continue
        excused = set(_symbol_values(before, old)) if old.type == SHT_SYMTAB else set()
        for step in range(0, old.n_bytes, CHUNK_BYTES):
            n_bytes = min(CHUNK_BYTES, old.n_bytes - step)
            place, present = old.offset + step, new.offset + step
            _expect_same(before, after, place=place, present=present, n_bytes=n_bytes, excused=excused)


def _symbol_values(file: _File, table: Section) -> Iterator[tuple[int, int]]:
    for place, fields in iter_records(file.source, table.offset, table.n_bytes, "<IBBHQQ"):
        if fields[3] == file.fatbin.index:
            yield place + 8, _WORD_BYTES
