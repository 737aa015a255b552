"""Plans to remove foreign targets' code from a file, as a value that describes the result."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from buildtool.gpucode.cut.bundles import Cut, cut_bundles
from buildtool.gpucode.cut.edit import Copy, Patch, Piece
from buildtool.gpucode.cut.fatbins import cut_fatbins
from buildtool.gpucode.cut.layout import find_room, lay_out_file
from buildtool.gpucode.cut.pointers import Bundles, pointer_patches
from buildtool.gpucode.errors import PruneRefused
from buildtool.gpucode.formats import bundle, ccob
from buildtool.gpucode.formats.container import Container, find_container
from buildtool.gpucode.formats.elf import EM_X86_64, Elf, Section, head_of, is_elf64, read_elf
from buildtool.gpucode.formats.scan import UNKNOWN, scan_file
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import TargetId, known_targets, served, serves_any


@dataclass(frozen=True)
class PrunePlan:
    """What a pruned file will be made of.

    `bytes_before`, `bytes_after`: the file's length. `kept_bytes`, `removed_bytes`: unpacked bytes
    of code objects by target. Patches are at output positions, applied after the pieces. When nothing
    is to be done, `pieces` is one copy of the whole file and `changed` is false.
    """

    bytes_before: int
    bytes_after: int
    pieces: tuple[Piece, ...]
    patches: tuple[Patch, ...] = ()
    kept_bytes: dict[str, int] = field(default_factory=dict)
    removed_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """False when the file would stay as it is."""
        return self.pieces != (Copy(0, self.bytes_before),)


def plan_prune(
    source: Source,
    targets: Sequence[TargetId],
    *,
    compress: int | None = None,
    strict: bool = True,
) -> PrunePlan:
    """Plan to keep what `targets` can run: their code with all feature variants, generic ISAs, SPIR-V.

    `compress` writes raw bundles as CCOB of that version (1 to 3). With `strict` every target must
    be in the file and every HIP bundle must have code for one; without, one target suffices, a
    bundle that never served any is left whole, and so is a file for other vendors' cards. A file
    without GPU code, or where no page would be saved, gives a plan that changes nothing.
    Raises TargetMissing, PruneRefused when a cut might break the file; BadElf or BadBundle when it
    is damaged.
    """
    if compress is not None and compress not in ccob.VERSIONS:
        raise ValueError(f"CCOB version {compress}")
    head = head_of(source)
    plan = None
    if is_elf64(head):
        plan = _plan_library(source, targets, compress=compress, strict=strict)
    elif head.startswith((bundle.MAGIC, ccob.MAGIC)):
        plan = _plan_bundle(source, targets, compress=compress, strict=strict)
    if plan is None and strict:
        _refuse_uncuttable(source, targets)
    return plan or _unchanged(source)


def _plan_bundle(
    source: Source, targets: Sequence[TargetId], *, compress: int | None, strict: bool
) -> PrunePlan | None:
    """A file that is a bundle itself; None when no target is of its vendor."""
    own = tuple(target for target in targets if not target.is_cuda)
    if not own:
        return None
    cut = cut_bundles(source, 0, source.size, address=0, targets=own, strict=strict, compress=compress)
    if not cut.changed or cut.n_bytes >= source.size:
        return _unchanged(source, cut)
    return PrunePlan(source.size, cut.n_bytes, cut.pieces, (), cut.kept_bytes, cut.removed_bytes)


def _refuse_uncuttable(source: Source, targets: Sequence[TargetId]) -> None:
    """Raises TargetMissing or PruneRefused when a file that has nothing to cut holds other cards' code."""
    names = scan_file(source)
    codes = known_targets(names)
    if codes:
        served(codes, targets, strict=True)
    if UNKNOWN in names or not all(serves_any(code, targets) for code in codes):
        raise PruneRefused(
            "its GPU code is in a form that can't be cut: LLVM's OffloadBinary, or relocatable CUDA code"
        )


def _unchanged(source: Source, cut: Cut | None = None) -> PrunePlan:
    """The file as it is; what a cut would have removed is kept then."""
    kept = Counter(cut.kept_bytes) + Counter(cut.removed_bytes) if cut else Counter[str]()
    return PrunePlan(source.size, source.size, (Copy(0, source.size),), (), dict(kept))


def _plan_library(
    source: Source, targets: Sequence[TargetId], *, compress: int | None, strict: bool
) -> PrunePlan | None:
    """None when there is no section with code for cards of the targets' vendors."""
    elf = read_elf(source)
    found = find_container(elf, targets)
    if found is None:
        return None
    container, section, own = found
    if elf.machine != EM_X86_64:
        raise PruneRefused(f"a host program for ELF machine {elf.machine}; only x86-64 (62) can be pruned")
    elf.check_loading(source.size)
    cutter = cut_fatbins if container.is_cuda else partial(cut_bundles, compress=compress)
    start, end = section.offset, section.file_end
    cut = cutter(source, start, end, address=section.address, targets=own, strict=strict)
    return _plan_elf(source, elf, container, section=section, cut=cut) or _unchanged(source, cut)


def _plan_elf(
    source: Source, elf: Elf, container: Container, *, section: Section, cut: Cut
) -> PrunePlan | None:
    """None when nothing changes or no page would be freed."""
    room = find_room(elf, section, source.size)
    moved = {section.address + old: section.address + new for old, new in cut.moved.items()}
    pointers = pointer_patches(source, elf, container, Bundles(section, moved))
    layout = lay_out_file(elf, room, cut.n_bytes, source.size) if cut.changed else None
    if layout is None:
        return None
    if any(section.offset <= patch.offset < room.tail_start for patch in pointers):
        raise PruneRefused(f"a pointer to a bundle is in {section.name} itself")
    shifted = tuple(
        Patch(patch.offset - layout.shift if patch.offset >= room.tail_start else patch.offset, patch.data)
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
