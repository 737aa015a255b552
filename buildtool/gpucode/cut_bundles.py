"""Plans new content for a run of bundles or CUDA fat binaries: only the code that given targets can run."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from buildtool.gpucode import bundle
from buildtool.gpucode.bundle import PAGE_BYTES, Bundle, Entry, align_up, lay_out_bundle
from buildtool.gpucode.nvfatbin import BLANK_BYTES, NvEntry, NvFatbin, iter_fatbins
from buildtool.gpucode.plan import Copy, Literal, Piece, Zeros, chunks_of, total_bytes
from buildtool.gpucode.scan import UNKNOWN, BundlePlace, iter_bundles
from buildtool.gpucode.source import PruneRefused, Source
from buildtool.gpucode.target import TargetId, served_targets, serves_any
from buildtool.gpucode.used import Used


@dataclass(frozen=True)
class Cut:
    """New content for a run of bundles.

    `moved` maps each bundle's old position to its new one, both in bytes from the run's start;
    `kept_bytes` and `removed_bytes` are unpacked bytes of code objects by target.
    """

    pieces: tuple[Piece, ...] = ()
    moved: dict[int, int] = field(default_factory=dict)
    kept_bytes: dict[str, int] = field(default_factory=dict)
    removed_bytes: dict[str, int] = field(default_factory=dict)
    changed: bool = False

    @property
    def n_bytes(self) -> int:
        """Length of the new content."""
        return total_bytes(self.pieces)


# HIP bundles.


def cut_bundles(
    source: Source,
    start: int,
    end: int,
    *,
    address: int,
    targets: Sequence[TargetId],
    strict: bool,
    compress: int | None,
) -> Cut:
    """Plan the run of bundles between file positions `start` and `end`, which is loaded at `address`.

    `compress` is the CCOB version to write raw bundles as, None to leave them raw; compressed ones
    stay at their version. With `strict` every target must be in the run and every bundle must have
    code for one; without, one target suffices, and a bundle that never served any stays whole.
    Raises TargetMissing or PruneRefused when that doesn't hold; BadBundle.
    """
    places = list(iter_bundles(source, start, end))
    codes = {entry.target for place in places for entry in place.bundle.codes}
    wanted = served_targets(codes, targets, strict=strict)
    kept_bytes, removed_bytes = Counter[str](), Counter[str]()
    row: list[tuple[int, list[Piece]]] = []
    for index, place in enumerate(places):
        kept = kept_entries(place.bundle, wanted)
        if strict and len(kept) == len(place.bundle.entries):
            _refuse_foreign(kept, wanted, index)
        staying = frozenset(kept)
        for entry in place.bundle.entries:
            if not entry.is_host:
                totals = kept_bytes if entry in staying else removed_bytes
                totals[str(entry.target)] += entry.n_bytes
        row.append((place.start - start, _rebuild(source, place, kept, compress)))
    pieces, moved = lay_out_in_row(row, address=address, align=PAGE_BYTES)
    changed = [new for _, new in row] != [[Copy(place.start, place.stored_bytes)] for place in places]
    return Cut(pieces, moved, dict(kept_bytes), dict(removed_bytes), changed)


def kept_entries(old: Bundle, wanted: Sequence[TargetId]) -> list[Entry]:
    """The kept part of a bundle: the host entry first, then payloads in the file's order.

    All of it when nothing would be left for a card: the bundle never served the targets.
    """
    kept = [entry for entry in old.entries if entry.is_host or serves_any(entry.target, wanted)]
    if not any(entry.n_bytes for entry in kept if not entry.is_host):
        return list(old.entries)
    return sorted(kept, key=lambda entry: (not entry.is_host, entry.offset))


def _refuse_foreign(kept: Sequence[Entry], wanted: Sequence[TargetId], index: int) -> None:
    codes = [entry.target for entry in kept if not entry.is_host and entry.n_bytes]
    if codes and not any(serves_any(code, wanted) for code in codes):
        raise PruneRefused(
            f"bundle {index} would be left without code for {', '.join(map(str, wanted))}",
            "name more targets; as part of a tree the library is pruned and such a bundle stays whole",
        )


def _rebuild(source: Source, place: BundlePlace, kept: Sequence[Entry], compress: int | None) -> list[Piece]:
    untouched = len(kept) == len(place.bundle.entries)
    if untouched and (compress is None or place.header is not None):
        return [Copy(place.start, place.stored_bytes)]
    if any(entry.n_bytes for entry in kept if entry.is_host):
        raise PruneRefused(f"the bundle at byte {place.start:#x} holds host code, which no HIP bundle does")
    table, new = lay_out_bundle(kept)
    header = place.header
    if header is not None:
        unpacking = bundle.Unpacking(source, place.start, place.start + place.stored_bytes)
        chunks = _selected(unpacking, kept, table, new)
        return [Literal(bundle.pack(chunks, new.n_bytes, version=header.version, method=header.method))]
    pieces = _raw_pieces(place.start, kept, table, new)
    return pieces if compress is None else [Literal(_compressed(source, pieces, compress))]


def _raw_pieces(start: int, kept: Sequence[Entry], table: bytes, new: Bundle) -> list[Piece]:
    pieces: list[Piece] = [Literal(table)]
    end = len(table)
    for old, laid in zip(kept, new.entries, strict=True):
        if old.n_bytes:
            pieces += [Zeros(laid.offset - end), Copy(start + old.offset, old.n_bytes)]
            end = laid.offset + laid.n_bytes
    return pieces


def _compressed(source: Source, pieces: Sequence[Piece], version: int) -> bytes:
    chunks = (chunk for piece in pieces for chunk in chunks_of(piece, source))
    try:
        return bundle.pack(chunks, total_bytes(pieces), version=version, method=bundle.Method.ZSTD)
    except ValueError as error:
        raise PruneRefused(str(error), "leave --compress out, or write CCOB version 3") from error


def _selected(
    unpacking: bundle.Unpacking, kept: Sequence[Entry], table: bytes, new: Bundle
) -> Iterator[bytes]:
    """The new bundle's bytes, taken from the old one as it unpacks; reads all of it, which verifies it."""
    yield table
    end = len(table)
    wanted = [(old, laid) for old, laid in zip(kept, new.entries, strict=True) if old.n_bytes]
    position = 0
    for chunk in unpacking:
        for old, laid in wanted:
            first = max(old.offset, position)
            last = min(old.offset + old.n_bytes, position + len(chunk))
            if first < last:
                if first == old.offset:
                    yield bytes(laid.offset - end)
                    end = laid.offset + laid.n_bytes
                yield chunk[first - position : last - position]
        position += len(chunk)


# CUDA fat binaries.

ALIGN_BYTES = 8  # of fat binaries and their entries, as nvcc writes them


def cut_fatbins(
    source: Source,
    start: int,
    end: int,
    *,
    address: int,
    targets: Sequence[TargetId],
    used: Used | None = None,
) -> Cut:
    """Plan the run of fat binaries between two file positions, loaded at `address`.

    One without any code for the targets keeps one entry, as zeros: the driver, which chooses by the entries'
    headers, finds nothing for the card there, as before.
    """
    fatbins = list(iter_fatbins(source, start, end))
    kept_bytes, removed_bytes = Counter[str](), Counter[str]()
    row: list[tuple[int, list[Piece]]] = []
    for fatbin in fatbins:
        kept = kept_fatbin_entries(source, fatbin, targets, used)
        staying = frozenset(kept)
        for entry in fatbin.entries:
            if not entry.is_blank:
                totals = kept_bytes if entry in staying else removed_bytes
                totals[str(entry.code or UNKNOWN)] += entry.unpacked_bytes
        row.append((fatbin.start - start, _rebuild_fatbin(source, fatbin, kept)))
    pieces, moved = lay_out_in_row(row, address=address, align=ALIGN_BYTES)
    return Cut(pieces, moved, dict(kept_bytes), dict(removed_bytes), bool(removed_bytes))


def kept_fatbin_entries(
    source: Source, fatbin: NvFatbin, targets: Sequence[TargetId], used: Used | None
) -> tuple[NvEntry, ...]:
    """Machine code and LTO-IR that serve a target, PTX for targets without their own machine code.

    Of these, what may have been loaded, where `used` says so. What kind of entry isn't known stays.
    """
    own = {entry.code.processor for entry in fatbin.entries if entry.code and not entry.is_blank}
    compiled = [target for target in targets if target.processor not in own]
    kept = tuple(
        entry
        for entry in fatbin.entries
        if entry.code is None or serves_any(entry.code, compiled if entry.code.is_ptx else targets)
    )
    return used.entries(source, kept) if used else kept


def emptied_entry(fatbin: NvFatbin) -> NvEntry | None:
    """The entry that stays, as zeros, in a fat binary without code for the targets; None without any."""
    machine_code = [entry for entry in fatbin.entries if entry.code and not entry.code.is_ptx]
    return next(iter(machine_code or fatbin.entries), None)


def _rebuild_fatbin(source: Source, fatbin: NvFatbin, kept: Sequence[NvEntry]) -> list[Piece]:
    emptied = None if kept else emptied_entry(fatbin)
    if len(kept) == len(fatbin.entries) or (emptied and emptied.is_blank and len(fatbin.entries) == 1):
        return [Copy(fatbin.start, fatbin.n_bytes)]
    head = source.exactly(fatbin.start, fatbin.header_bytes, "a fat binary's header")
    entries: list[Piece] = [Copy(entry.start, entry.stored_bytes) for entry in kept]
    if emptied:
        entry_head = source.exactly(emptied.start, emptied.header_bytes, "a fat binary's entry")
        length = BLANK_BYTES.to_bytes(8, "little")
        entries = [Literal(entry_head[:8] + length + entry_head[16:]), Zeros(BLANK_BYTES)]
    return [Literal(head[:8] + total_bytes(entries).to_bytes(8, "little") + head[16:]), *entries]


# Both.


def lay_out_in_row(
    parts: Sequence[tuple[int, Sequence[Piece]]], *, address: int, align: int
) -> tuple[tuple[Piece, ...], dict[int, int]]:
    """Containers one after the other, each aligned in memory; where each was -> where it will be.

    A part is where a container was, in bytes from the run's start, and its new content.
    """
    pieces: list[Piece] = []
    moved: dict[int, int] = {}
    position = 0
    for old, new in parts:
        moved[old] = align_up(address + position, align) - address
        pieces += [Zeros(moved[old] - position), *new]
        position = moved[old] + total_bytes(new)
    return tuple(piece for piece in pieces if piece.n_bytes), moved
