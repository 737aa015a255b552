"""Rebuild a run of CUDA fat binaries with only the code that given cards can run."""

from collections import Counter
from collections.abc import Sequence

from buildtool.gpucode.cut.bundles import Cut, in_row
from buildtool.gpucode.cut.edit import Copy, Literal, Piece, total_bytes
from buildtool.gpucode.formats.nvfatbin import NvEntry, NvFatbin, iter_fatbins
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import TargetId, served, serves_any

ALIGN_BYTES = 8  # of fat binaries and their entries, as nvcc writes them


def cut_fatbins(
    source: Source, start: int, end: int, *, address: int, targets: Sequence[TargetId], strict: bool
) -> Cut:
    """Plan the run of fat binaries between two file positions, loaded at `address`; see `cut_bundles`.

    One without any code for the targets is left whole: it never served them. Raises TargetMissing.
    """
    fatbins = list(iter_fatbins(source, start, end))
    served((entry.code for fatbin in fatbins for entry in fatbin.entries), targets, strict=strict)
    kept_bytes, removed_bytes = Counter[str](), Counter[str]()
    row: list[tuple[int, list[Piece]]] = []
    for fatbin in fatbins:
        kept = kept_entries(fatbin, targets)
        staying = frozenset(kept)
        for entry in fatbin.entries:
            totals = kept_bytes if entry in staying else removed_bytes
            totals[str(entry.code)] += entry.unpacked_bytes
        row.append((fatbin.start - start, _rebuild(source, fatbin, kept)))
    pieces, moved = in_row(row, address=address, align=ALIGN_BYTES)
    return Cut(pieces, moved, dict(kept_bytes), dict(removed_bytes), bool(removed_bytes))


def kept_entries(fatbin: NvFatbin, targets: Sequence[TargetId]) -> tuple[NvEntry, ...]:
    """Machine code that a target can run, and PTX for targets without their own machine code."""
    own = {entry.code.processor for entry in fatbin.entries}
    compiled = [target for target in targets if target.processor not in own]
    kept = tuple(
        entry for entry in fatbin.entries if serves_any(entry.code, compiled if entry.is_ptx else targets)
    )
    return kept or fatbin.entries


def _rebuild(source: Source, fatbin: NvFatbin, kept: Sequence[NvEntry]) -> list[Piece]:
    if len(kept) == len(fatbin.entries):
        return [Copy(fatbin.start, fatbin.n_bytes)]
    head = source.exactly(fatbin.start, fatbin.header_bytes, "a fat binary's header")
    entries = [Copy(entry.start, entry.stored_bytes) for entry in kept]
    return [Literal(head[:8] + total_bytes(entries).to_bytes(8, "little") + head[16:]), *entries]
