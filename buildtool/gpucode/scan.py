"""What GPU code a file holds, for which targets, in how many bytes. Reads tables, not code.

Knows `.hip_fatbin` (raw and CCOB), `.nv_fatbin`, LLVM's OffloadBinary, and files that are a bundle or
a code object themselves.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from buildtool.gpucode import bundle, nvfatbin
from buildtool.gpucode.bundle import Bundle, Header
from buildtool.gpucode.elf import EM_AMDGPU, EM_CUDA, Elf, Section, head_of, is_elf64, read_elf
from buildtool.gpucode.source import BadBundle, GpuCodeError, PruneRefused, Source
from buildtool.gpucode.target import MACH, TargetId, known_targets, serves_any

# Sections of libraries that hold GPU code. HIP and CUDA agree on the shape: a section of bundles, and one of
# 24-byte wrappers (u32 magic, u32 version, pointer to a bundle, pointer or zero) that host code registers.


@dataclass(frozen=True)
class Container:
    """Names and numbers of one vendor's sections."""

    section: str
    wrapper_section: str
    wrapper_magic: int
    wrapper_versions: tuple[int, ...]
    is_cuda: bool


HIP = Container(".hip_fatbin", ".hipFatBinSegment", 0x48495046, (1,), is_cuda=False)
# version 2 is what nvcc's device link adds; its second pointer is to a list of relocatable code
CUDA = Container(".nv_fatbin", ".nvFatBinSegment", 0x466243B1, (1, 2), is_cuda=True)
UNCUTTABLE = {
    ".llvm.offloading": "LLVM's OffloadBinary",
    "__nv_relfatbin": "relocatable CUDA code, which is linked again when it is loaded",
}
NV_SECTIONS = (CUDA.section, "__nv_relfatbin")
OFFLOAD_SECTION = ".llvm.offloading"
OFFLOAD_MAGIC = b"\x10\xff\x10\xad"
SECTIONS_READ = (HIP.section, *NV_SECTIONS, OFFLOAD_SECTION)  # a library may keep GPU code elsewhere, too


def find_container(
    elf: Elf, targets: Sequence[TargetId]
) -> tuple[Container, Section, tuple[TargetId, ...]] | None:
    """The section that can be cut, with those of the targets that are of its vendor; None when there is none.

    Raises PruneRefused when code of another form, or of both vendors, is there as well.
    """
    candidates = []
    for container in (HIP, CUDA):
        section = elf.section(container.section)
        own = tuple(target for target in targets if target.is_cuda == container.is_cuda)
        if section is not None and section.file_bytes and own:
            candidates.append((container, section, own))
    if not candidates:
        return None
    for section in elf.sections:
        if section.name in UNCUTTABLE and section.file_bytes:
            raise PruneRefused(f"{section.name} holds {UNCUTTABLE[section.name]}")
    if len(candidates) > 1:
        raise PruneRefused("HIP and CUDA code in one file", "name targets of one vendor")
    return candidates[0]


# Bundles by their place in the file.


@dataclass(frozen=True)
class BundlePlace:
    """A bundle in a file: where it starts, its stored length, its entries; `header` when compressed."""

    start: int
    stored_bytes: int
    bundle: Bundle
    header: Header | None = None


def iter_bundles(
    source: Source, start: int, end: int, allowance: bundle.Allowance | None = None
) -> Iterator[BundlePlace]:
    """Every bundle between two file positions, in order; with only zeros between. Raises BadBundle.

    `allowance` is the whole file's; without one, these are taken for all of its bundles.
    """
    allowance = allowance or bundle.Allowance(source.size)
    position = source.skip_zeros(start, end)
    room = bundle.MOST_CODES
    while position < end:
        place = _read_bundle(source, position, end, allowance)
        room -= len(place.bundle.entries)
        if room < 0:
            raise bundle.too_many_codes(position)
        yield place
        position = source.skip_zeros(position + place.stored_bytes, end)


def _read_bundle(source: Source, start: int, end: int, allowance: bundle.Allowance) -> BundlePlace:
    head = source.exactly(start, min(len(bundle.BUNDLE_MAGIC), end - start), "a bundle's magic")
    if head == bundle.BUNDLE_MAGIC:
        table = source.exactly(start, min(bundle.HEAD_BYTES, end - start), "a bundle's entry table")
        parsed = bundle.parse_bundle(table, end - start, place=start)
        return BundlePlace(start, parsed.n_bytes, parsed)
    if not head.startswith(bundle.CCOB_MAGIC):
        kind = "an OffloadBinary" if head.startswith(OFFLOAD_MAGIC) else "something unknown"
        raise BadBundle(f"found {kind} where a bundle of code objects was expected", place=start)
    unpacking = bundle.Unpacking(source, start, end)
    allowance.take(unpacking.header, start)
    parsed = bundle.parse_bundle(
        unpacking.head(bundle.HEAD_BYTES), unpacking.header.unpacked_bytes, place=start
    )
    # version 1 doesn't say where it ends, so only unpacking all of it shows where the next one starts
    if unpacking.stored_bytes is None:
        for _ in unpacking:
            pass
    return BundlePlace(start, unpacking.stored_bytes or 0, parsed, unpacking.header)


# Scanning.
UNKNOWN = "unknown"  # a format that is recognised, but not read


def may_hold_bundles(head: bytes) -> bool:
    """Whether a file with these first bytes (HEADER_BYTES are enough) may hold code that a prune can cut."""
    return is_elf64(head) or head.startswith((bundle.BUNDLE_MAGIC, bundle.CCOB_MAGIC))


def may_hold_code(source: Source) -> bool:
    """`may_hold_bundles` for a whole file. Raises GpuCodeError where it can't be read."""
    return may_hold_bundles(head_of(source))


def targets_in(source: Source) -> set[TargetId]:
    """The targets of a file by its code; none where the code can't be read, since no prune touches it."""
    with suppress(GpuCodeError):
        if may_hold_code(source):
            return known_targets(scan_file(source))
    return set()


def foreign_targets(source: Source, targets: Sequence[TargetId]) -> tuple[str, ...]:
    """The targets of a file's code that none of these cards can run, and `unknown`; none for damage."""
    with suppress(GpuCodeError):
        names = scan_file(source)
        run = {str(code) for code in known_targets(names) if serves_any(code, targets)}
        return tuple(sorted(names.keys() - run))
    return ()


def scan_file(source: Source) -> Counter[str]:
    """The bytes of GPU code in a file by target, as its container names it, or `unknown`.

    `gfx90a:xnack-`, `sm_80`, `compute_80` for PTX, `spirv`. In a compressed bundle, whose code objects are
    compressed together, each takes a share in proportion to its unpacked size. A file without any, or that is
    neither an ELF file nor a bundle, gives none. Raises GpuCodeError (BadElf, BadBundle) when the file
    contradicts itself.
    """
    bytes_by_target: Counter[str] = Counter()
    for target, stored_bytes in _codes(source):
        bytes_by_target[target] += stored_bytes
    return bytes_by_target


_Code = tuple[str, int]  # target, and bytes in the file


def _codes(source: Source) -> Iterator[_Code]:
    head = head_of(source)
    whole = [(0, source.size)]
    if is_elf64(head):
        yield from _elf_codes(source)
    elif head.startswith((bundle.BUNDLE_MAGIC, bundle.CCOB_MAGIC)):
        yield from _hip_codes(source, whole)
    elif head.startswith(nvfatbin.MAGIC):
        yield from _nv_codes(source, whole)
    elif head.startswith(OFFLOAD_MAGIC):
        yield UNKNOWN, source.size


def _elf_codes(source: Source) -> Iterator[_Code]:
    elf = read_elf(source)
    if elf.machine == EM_AMDGPU:
        yield str(target_of_flags(elf.flags, elf.abi_version) or UNKNOWN), source.size
        return
    if elf.machine == EM_CUDA:
        yield nvfatbin.target_of_flags(elf.flags, elf.abi_version), source.size
        return
    by_name: dict[str, list[tuple[int, int]]] = {}
    for section in elf.sections:
        if section.file_bytes:
            by_name.setdefault(section.name, []).append((section.offset, section.file_end))
    hip = by_name.get(HIP.section, [])
    nvidia = [place for name in NV_SECTIONS for place in by_name.get(name, [])]
    offload = by_name.get(OFFLOAD_SECTION, [])
    _refuse_overlaps([*hip, *nvidia, *offload])
    yield from _hip_codes(source, hip)
    yield from _nv_codes(source, nvidia)
    yield from ((UNKNOWN, end - start) for start, end in offload)


def _refuse_overlaps(places: Sequence[tuple[int, int]]) -> None:
    """Sections that share bytes would be read once for each of them. Raises BadBundle."""
    for (_, end), (start, _) in pairwise(sorted(places)):
        if start < end:
            raise BadBundle("sections of GPU code overlap", place=start)


_ABI_V3 = 1  # e_ident[EI_ABIVERSION] of code object version 3; 4 and later number on from there


def target_of_flags(flags: int, abi_version: int) -> TargetId | None:
    """The target of an AMDGPU ELF's `e_flags` and ABI version; None for a processor that MACH lacks.

    A feature that may be on or off isn't named. Code object version 2 doesn't name any here.
    """
    processor = MACH.get(flags & 0xFF)
    if processor is None:
        return None
    features: dict[str, bool] = {}
    if abi_version == _ABI_V3:
        features = {name: True for name, bit in (("xnack", 0x100), ("sramecc", 0x200)) if flags & bit}
    elif abi_version > _ABI_V3:
        for name, shift in (("xnack", 8), ("sramecc", 10)):
            setting = flags >> shift & 3  # 0 unsupported, 1 any, 2 off, 3 on
            if setting >= 2:
                features[name] = setting == 3
    return TargetId(processor, tuple(sorted(features.items())))


def _hip_codes(source: Source, places: Sequence[tuple[int, int]]) -> Iterator[_Code]:
    allowance = bundle.Allowance(source.size)
    for start, end in places:
        for place in iter_bundles(source, start, end, allowance):
            yield from _codes_of(place)


def _codes_of(place: BundlePlace) -> Iterator[_Code]:
    unpacked_total = sum(entry.n_bytes for entry in place.bundle.codes)
    done = given = 0
    for entry in place.bundle.codes:
        stored = entry.n_bytes
        if place.header is not None:
            done += entry.n_bytes
            share = (place.stored_bytes - place.header.header_bytes) * done // unpacked_total
            stored, given = share - given, share
        yield str(entry.target), stored


def _nv_codes(source: Source, places: Sequence[tuple[int, int]]) -> Iterator[_Code]:
    for start, end in places:
        for fatbin in nvfatbin.iter_fatbins(source, start, end):
            yield from ((str(entry.code), entry.stored_bytes) for entry in fatbin.entries)
