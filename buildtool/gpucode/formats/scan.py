"""What GPU code a file holds, for which targets, in how many bytes. Reads tables, not code.

Knows `.hip_fatbin` (raw and CCOB), `.nv_fatbin`, LLVM's OffloadBinary, and files that are a bundle or
a code object themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from buildtool.gpucode.errors import BadBundle, GpuCodeError
from buildtool.gpucode.formats import bundle, ccob, nvfatbin
from buildtool.gpucode.formats.amdelf import target_of_flags
from buildtool.gpucode.formats.container import CUDA, HIP
from buildtool.gpucode.formats.elf import EM_AMDGPU, EM_CUDA, head_of, is_elf64, read_elf
from buildtool.gpucode.source import ReadAt, Source
from buildtool.gpucode.target import TargetId, known_targets

NV_SECTIONS = (CUDA.section, "__nv_relfatbin")
OFFLOAD_SECTION = ".llvm.offloading"
OFFLOAD_MAGIC = b"\x10\xff\x10\xad"
UNKNOWN = "unknown"  # a format that is recognised, but not read


class CodeFormat(StrEnum):
    """The container that a code object was found in."""

    ELF = "elf"  # a separate file
    BUNDLE = "bundle"
    CCOB = "ccob"
    NV_FATBIN = "nv_fatbin"
    OFFLOAD_BINARY = "offload_binary"


@dataclass(frozen=True)
class CodeObject:
    """One piece of GPU code.

    `target` is the name in its container (`gfx90a:xnack-`, `sm_80`, `compute_80` for PTX, `spirv`,
    `unknown`); `processor` is that without features. In a compressed bundle, whose code objects are
    compressed together, `stored_bytes` is a share in proportion to the unpacked size.
    """

    target: str
    processor: str
    stored_bytes: int
    unpacked_bytes: int
    bundle_index: int
    format: CodeFormat


@dataclass(frozen=True)
class FatbinScan:
    """All GPU code of a file.

    `section_bytes` is what the containers (sections, or the whole file) take in the file, and
    `overhead_bytes` the part of it that isn't code objects: tables, padding. Sums are exact.
    """

    objects: tuple[CodeObject, ...] = ()
    section_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """All code objects in the file."""
        return sum(code.stored_bytes for code in self.objects)

    @property
    def overhead_bytes(self) -> int:
        """What of the containers is not code objects."""
        return self.section_bytes - self.stored_bytes

    def stored_bytes_by_target(self) -> dict[str, int]:
        """Target -> bytes in the file."""
        totals: dict[str, int] = {}
        for code in self.objects:
            totals[code.target] = totals.get(code.target, 0) + code.stored_bytes
        return totals


@dataclass(frozen=True)
class BundlePlace:
    """A bundle in a file: where it starts, its stored length, its entries; `header` when compressed."""

    start: int
    stored_bytes: int
    bundle: bundle.Bundle
    header: ccob.Header | None = None


def may_hold_bundles(head: bytes) -> bool:
    """Can a file that begins so (HEADER_BYTES are enough) hold code that a prune could cut?"""
    return is_elf64(head) or head.startswith((bundle.MAGIC, ccob.MAGIC))


def worth_a_look(source: Source) -> bool:
    """`may_hold_bundles` for a whole file. Raises GpuCodeError where it can't be read."""
    return may_hold_bundles(head_of(source))


def targets_in(source: Source) -> set[TargetId]:
    """The targets of a file by its code; none where the code can't be read, since no prune touches it."""
    try:
        if not worth_a_look(source):
            return set()
        return known_targets(scan_file(source.size, source.read_at).stored_bytes_by_target())
    except GpuCodeError:
        return set()


def scan_file(size: int, read_at: ReadAt) -> FatbinScan:
    """Find the GPU code in a file of `size` bytes that `read_at(offset, length)` reads.

    A file without any, or that is neither an ELF file nor a bundle, gives an empty scan. Raises GpuCodeError
    (BadElf, BadBundle) when the file contradicts itself.
    """
    source = Source(size, read_at)
    head = head_of(source)
    if is_elf64(head):
        return _scan_elf(source)
    whole = [(0, size)]
    if head.startswith((bundle.MAGIC, ccob.MAGIC)):
        return FatbinScan(tuple(_hip_objects(source, whole)), size)
    if head.startswith(nvfatbin.MAGIC):
        return FatbinScan(tuple(_nv_objects(source, whole)), size)
    if head.startswith(OFFLOAD_MAGIC):
        return FatbinScan((_unread(size),), size)
    return FatbinScan()


def _scan_elf(source: Source) -> FatbinScan:
    elf = read_elf(source)
    if elf.machine == EM_AMDGPU:
        target = target_of_flags(elf.flags, elf.abi_version)
        return _whole(source.size, str(target) if target else UNKNOWN)
    if elf.machine == EM_CUDA:
        return _whole(source.size, nvfatbin.target_of_flags(elf.flags, elf.abi_version))
    by_name: dict[str, list[tuple[int, int]]] = {}
    for section in elf.sections:
        if section.file_bytes:
            by_name.setdefault(section.name, []).append((section.offset, section.file_end))
    hip = by_name.get(HIP.section, [])
    nvidia = [place for name in NV_SECTIONS for place in by_name.get(name, [])]
    offload = by_name.get(OFFLOAD_SECTION, [])
    _refuse_overlaps([*hip, *nvidia, *offload])
    objects = (
        *_hip_objects(source, hip),
        *_nv_objects(source, nvidia),
        *(_unread(end - start) for start, end in offload),
    )
    return FatbinScan(objects, sum(end - start for start, end in (*hip, *nvidia, *offload)))


def _refuse_overlaps(places: Sequence[tuple[int, int]]) -> None:
    """Sections that share bytes would be read once for each of them. Raises BadBundle."""
    for (_, end), (start, _) in pairwise(sorted(places)):
        if start < end:
            raise BadBundle("sections of GPU code overlap", place=start)


def iter_bundles(
    source: Source, start: int, end: int, allowance: ccob.Allowance | None = None
) -> Iterator[BundlePlace]:
    """Every bundle between two file positions, in order; with only zeros between. Raises BadBundle.

    `allowance` is the whole file's; without one, these are taken for all of its bundles.
    """
    allowance = allowance or ccob.Allowance(source.size)
    position = source.skip_zeros(start, end)
    room = bundle.MOST_CODES
    while position < end:
        place = _read_bundle(source, position, end, allowance)
        room -= len(place.bundle.entries)
        if room < 0:
            raise bundle.too_many(position)
        yield place
        position = source.skip_zeros(position + place.stored_bytes, end)


def _read_bundle(source: Source, start: int, end: int, allowance: ccob.Allowance) -> BundlePlace:
    head = source.exactly(start, min(len(bundle.MAGIC), end - start), "a bundle's magic")
    if head == bundle.MAGIC:
        table = source.exactly(start, min(bundle.HEAD_BYTES, end - start), "a bundle's entry table")
        found = bundle.parse_bundle(table, end - start, place=start)
        return BundlePlace(start, found.n_bytes, found)
    if not head.startswith(ccob.MAGIC):
        kind = "an OffloadBinary" if head.startswith(OFFLOAD_MAGIC) else "something unknown"
        raise BadBundle(f"found {kind} where a bundle of code objects was expected", place=start)
    unpacking = ccob.Unpacking(source, start, end)
    allowance.take(unpacking.header, start)
    found = bundle.parse_bundle(
        unpacking.head(bundle.HEAD_BYTES), unpacking.header.unpacked_bytes, place=start
    )
    # version 1 doesn't say where it ends, so only unpacking all of it shows where the next one starts
    if unpacking.stored_bytes is None:
        for _ in unpacking:
            pass
    return BundlePlace(start, unpacking.stored_bytes or 0, found, unpacking.header)


def _hip_objects(source: Source, places: Sequence[tuple[int, int]]) -> Iterator[CodeObject]:
    index = 0
    allowance = ccob.Allowance(source.size)
    for start, end in places:
        for place in iter_bundles(source, start, end, allowance):
            yield from _objects_of(place, index)
            index += 1


def _objects_of(place: BundlePlace, index: int) -> Iterator[CodeObject]:
    device = [entry for entry in place.bundle.entries if not entry.is_host and entry.n_bytes]
    unpacked_total = sum(entry.n_bytes for entry in device)
    done = given = 0
    for entry in device:
        stored = entry.n_bytes
        if place.header is not None:
            done += entry.n_bytes
            share = (place.stored_bytes - place.header.header_bytes) * done // unpacked_total
            stored, given = share - given, share
        target = entry.target
        code_format = CodeFormat.BUNDLE if place.header is None else CodeFormat.CCOB
        yield CodeObject(str(target), target.processor, stored, entry.n_bytes, index, code_format)


def _nv_objects(source: Source, places: Sequence[tuple[int, int]]) -> Iterator[CodeObject]:
    index = 0
    for start, end in places:
        for fatbin in nvfatbin.iter_fatbins(source, start, end):
            for entry in fatbin.entries:
                yield CodeObject(
                    str(entry.code), entry.code.processor, entry.stored_bytes, entry.unpacked_bytes,
                    index, CodeFormat.NV_FATBIN,
                )  # fmt: skip
            index += 1


def _unread(n_bytes: int) -> CodeObject:
    return CodeObject(UNKNOWN, UNKNOWN, n_bytes, n_bytes, 0, CodeFormat.OFFLOAD_BINARY)


def _whole(size: int, target: str) -> FatbinScan:
    processor = target.split(":", maxsplit=1)[0]
    return FatbinScan((CodeObject(target, processor, size, size, 0, CodeFormat.ELF),), size)
