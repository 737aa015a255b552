"""What GPU code a file holds, where, for which targets, in how many bytes. Reads tables, not code.

Knows CUDA fat binaries, bundles (raw and CCOB), AMD's and NVIDIA's code objects, LLVM's OffloadBinary, cubins
that are zstd frames. These are found by their first bytes: in every section of a library, or as the file
itself.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from buildtool.gpucode import bundle, frame, nvfatbin
from buildtool.gpucode.bundle import Bundle, Header
from buildtool.gpucode.elf import (
    EM_AMDGPU,
    EM_CUDA,
    HEADER_BYTES,
    Elf,
    Section,
    head_of,
    is_elf64,
    read_elf,
)
from buildtool.gpucode.forward import (
    ALIGN_BYTES,
    BUNDLE_MAGIC,
    COMPRESSED_MAGIC,
    FATBIN_MAGIC,
    FRAME_MAGIC,
    OBJECT_MAGIC,
    OFFLOAD_MAGIC,
    Find,
    Read,
    Reader,
    read_forward,
)
from buildtool.gpucode.source import CHUNK_BYTES, FIRST_BYTES, BadBundle, GpuCodeError, PruneRefused, Source
from buildtool.gpucode.target import MACH, TargetId, known_targets, serves_any

# Sections of libraries that hold GPU code. HIP and CUDA agree on the shape: a section of bundles, and one of
# 24-byte wrappers (u32 magic, u32 version, pointer to a bundle, pointer or zero) that host code registers.


@dataclass(frozen=True)
class Container:
    """Names and numbers of one vendor's sections."""

    sections: tuple[str, ...]
    wrapper_section: str
    wrapper_magic: int
    wrapper_versions: tuple[int, ...]
    is_cuda: bool


HIP = Container((".hip_fatbin",), ".hipFatBinSegment", 0x48495046, (1,), is_cuda=False)
# version 2 is what nvcc's device link adds; its second pointer is to a list of relocatable code
# `__nv_relfatbin` is relocatable code, which is linked again when it is loaded
CUDA = Container((".nv_fatbin", "__nv_relfatbin"), ".nvFatBinSegment", 0x466243B1, (1, 2), is_cuda=True)
OFFLOAD_SECTION = ".llvm.offloading"
_OFFLOAD_VERSIONS = 2


def find_container(
    elf: Elf, targets: Sequence[TargetId]
) -> tuple[Container, tuple[Section, ...], tuple[TargetId, ...]] | None:
    """The sections that can be cut, with those of the targets that are of their vendor; None without any.

    Without the wrappers that point into them they can't: nothing shows what uses them. Raises PruneRefused
    when code of another form, or of both vendors, is there as well.
    """
    candidates = []
    for container in (HIP, CUDA):
        named = (elf.section(name) for name in container.sections)
        sections = tuple(section for section in named if section is not None and section.file_bytes)
        own = tuple(target for target in targets if target.is_cuda == container.is_cuda)
        if sections and own and elf.section(container.wrapper_section):
            candidates.append((container, sections, own))
    if not candidates:
        return None
    for section in elf.sections:
        if section.name == OFFLOAD_SECTION and section.file_bytes:
            raise PruneRefused(f"{section.name} holds LLVM's OffloadBinary")
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


def iter_bundles(source: Source, start: int, end: int) -> Iterator[BundlePlace]:
    """Every bundle between two file positions, in order; with only zeros between. Raises BadBundle."""
    allowance = bundle.Allowance(source.size)
    position = source.skip_zeros(start, end)
    room = bundle.MOST_CODES
    while position < end:
        place = read_forward(_read_bundle(position, end, allowance), source)
        room -= len(place.bundle.entries)
        if room < 0:
            raise bundle.too_many_codes(position)
        yield place
        position = source.skip_zeros(position + place.stored_bytes, end)


def _read_bundle(start: int, end: int, allowance: bundle.Allowance) -> Reader[BundlePlace]:
    head = yield Read(start, min(len(BUNDLE_MAGIC), end - start), "a bundle's magic")
    assert isinstance(head, bytes)
    if head == BUNDLE_MAGIC:
        parsed = yield from bundle.read_bundle(start, end)
        return BundlePlace(start, parsed.n_bytes, parsed)
    if not head.startswith(COMPRESSED_MAGIC):
        kind = "an OffloadBinary" if head.startswith(OFFLOAD_MAGIC) else "something unknown"
        raise BadBundle(f"found {kind} where a bundle of code objects was expected", place=start)
    header = yield from bundle.read_header(start, end)
    allowance.take(header, start)
    unpacked, stored_bytes = yield from bundle.read_head(header, start, end)
    parsed = bundle.parse_bundle(unpacked, header.unpacked_bytes, place=start)
    return BundlePlace(start, stored_bytes, parsed, header)


# Scanning.

MOST_LOOKALIKES = 1 << 16  # in a file; libraries that make GPU code hold a dozen
UNKNOWN = "unknown"  # a format that is recognised, but not read


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of GPU code: its target (None: not known), its place in the file, and all bytes that it takes.

    `n_bytes` is 0 where it has no place of its own: code in a compressed bundle. `is_blank`: a prune left
    zeros there. `lz4`: of an LZ4 block its bytes and those that it unpacks to.
    """

    target: TargetId | None
    start: int
    n_bytes: int
    stored_bytes: int
    is_blank: bool = False
    lz4: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The target's name, `unknown` without one."""
        return str(self.target or UNKNOWN)


@dataclass(frozen=True)
class FoundCode:
    """What was found at one place: a fat binary, a bundle (a runtime chooses from these), or an object.

    Or a frame: its library has many, and chooses among them by the card.
    """

    magic: bytes
    start: int
    n_bytes: int
    codes: tuple[Code, ...]

    @property
    def is_choice(self) -> bool:
        """Whether one of the codes is chosen by the card, and the others are never read."""
        return self.magic in (FATBIN_MAGIC, BUNDLE_MAGIC, FRAME_MAGIC)


def may_hold_bundles(head: bytes) -> bool:
    """Whether a file with these first bytes (HEADER_BYTES are enough) may hold code that a prune can cut."""
    return is_elf64(head) or head.startswith((BUNDLE_MAGIC, COMPRESSED_MAGIC))


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

    `gfx90a:xnack-`, `sm_80`, `compute_80` for PTX, `lto_80` for LTO-IR, `spirv`. In a compressed bundle,
    whose code objects are compressed together, each takes a share in proportion to its unpacked size. A file
    without any, or that is neither an ELF file nor a bundle, gives none. Raises GpuCodeError (BadElf,
    BadBundle) when the file contradicts itself.
    """
    places = find_code(source)
    if is_elf64(head_of(source)) and not (len(places) == 1 and places[0].n_bytes == source.size):
        _check_sections(source, places)
    return bytes_by_target(places)


def find_code(source: Source) -> list[FoundCode]:
    """All GPU code in a file, in order. Raises GpuCodeError."""
    places: list[FoundCode] = []
    read_forward(code_reader(source.size, places.append), source)
    return places


def foreign_in_place(place: FoundCode, targets: Sequence[TargetId]) -> tuple[Code, ...]:
    """The codes of a choice, of the targets' vendors, that none of them runs: zeros can take their place.

    PTX is foreign, too, where each target that it serves has machine code of its own there.
    """
    vendors = {target.is_cuda for target in targets}
    present = {code.target.processor for code in place.codes if code.target and not code.is_blank}
    compiled = [target for target in targets if target.processor not in present]
    return tuple(
        code
        for code in place.codes
        if place.is_choice
        and code.target
        and code.target.is_cuda in vendors
        and not code.is_blank
        and code.n_bytes >= nvfatbin.BLANK_BYTES
        and not serves_any(code.target, compiled if code.target.is_ptx else targets)
    )


def is_loaded(elf: Elf, place: FoundCode) -> bool:
    """Whether one segment of the file loads all of the place; a frame has to be in one section, too."""
    end = place.start + place.n_bytes
    return elf.is_loaded(place.start, end) and (
        place.magic != FRAME_MAGIC or elf.is_in_section(place.start, end)
    )


def is_inside(place: FoundCode, sections: Sequence[Section]) -> bool:
    """Whether the place is in one of the sections."""
    return any(section.offset <= place.start < section.file_end for section in sections)


def bytes_by_target(places: Sequence[FoundCode]) -> Counter[str]:
    """Stored bytes of the code at these places by target."""
    totals: Counter[str] = Counter()
    for place in places:
        for code in place.codes:
            if not code.is_blank:
                totals[code.name] += code.stored_bytes
    return totals


def _check_sections(source: Source, places: Sequence[FoundCode]) -> None:
    """Raise BadBundle for a section that should hold GPU code and begins with something else."""
    elf = read_elf(source)
    starts = {place.start for place in places}
    for section in elf.sections:
        if section.name in (*HIP.sections, *CUDA.sections) and section.file_bytes:
            first = source.skip_zeros(section.offset, section.file_end)
            if first < section.file_end and first not in starts:
                raise BadBundle(f"{section.name} begins with something unknown", place=first)


def code_reader(size: int, sink: Callable[[FoundCode], None]) -> Reader[None]:
    """Reads a file of `size` bytes forward and calls `sink` for all GPU code in it. Raises GpuCodeError.

    In a library that is whatever has the form of such code, in any section. A file that is code itself must
    be code to its end.
    """
    head = yield Read(0, min(FIRST_BYTES, size), "the first bytes")
    assert isinstance(head, bytes)
    if is_elf64(head):
        machine = int.from_bytes(head[18:20], "little")
        if machine in (EM_AMDGPU, EM_CUDA):
            sink(_object(head, 0, size))
            return
        yield from _read_anywhere(size, sink)
    elif head.startswith(OFFLOAD_MAGIC):
        sink(FoundCode(OFFLOAD_MAGIC, 0, size, (Code(None, 0, size, size),)))
    elif head.startswith((FATBIN_MAGIC, BUNDLE_MAGIC, COMPRESSED_MAGIC)):
        yield from _read_in_row(size, sink)


def _read_anywhere(size: int, sink: Callable[[FoundCode], None]) -> Reader[None]:
    allowance, room, at = bundle.Allowance(size), bundle.MOST_CODES, HEADER_BYTES
    work, lookalikes = frame.Work(size), 0
    while at < size:
        start = yield Find(at, size)
        assert isinstance(start, int)
        if start >= size:
            return
        head = yield Read(start, min(HEADER_BYTES, size - start), "the first bytes of GPU code")
        assert isinstance(head, bytes)
        at = start + ALIGN_BYTES
        if head.startswith(FRAME_MAGIC):
            found = yield from frame.read_frame(start, size, head, work)
            if found:
                room -= 1
                if room < 0:
                    raise bundle.too_many_codes(start)
                at = start + found[0]
                sink(_object(found[1], start, found[0], FRAME_MAGIC))
        elif not _is_plausible(head, size - start):
            lookalikes += 1
            if lookalikes > MOST_LOOKALIKES:
                raise BadBundle(
                    f"more than {MOST_LOOKALIKES:,} places look like GPU code and aren't", place=start
                )
        else:
            place = yield from _read_code(head, start, size, allowance, room)
            room -= max(len(place.codes), 1)
            at = start + place.n_bytes
            sink(place)


def _read_in_row(size: int, sink: Callable[[FoundCode], None]) -> Reader[None]:
    allowance, room, at = bundle.Allowance(size), bundle.MOST_CODES, 0
    while at < size:
        head = yield Read(at, min(HEADER_BYTES, size - at), "the first bytes of GPU code")
        assert isinstance(head, bytes)
        place = yield from _read_code(head, at, size, allowance, room)
        room -= max(len(place.codes), 1)
        at = yield from _after_zeros(at + place.n_bytes, size)
        sink(place)


def _after_zeros(at: int, size: int) -> Reader[int]:
    most = FIRST_BYTES
    while at < size:
        block = yield Read(at, min(most, size - at), "padding")
        assert isinstance(block, bytes)
        rest = block.lstrip(b"\0")
        if rest:
            return at + len(block) - len(rest)
        at, most = at + len(block), min(2 * most, CHUNK_BYTES)
    return size


def _is_plausible(head: bytes, room: int) -> bool:
    """Whether what begins with these bytes, `room` before the file's end, is meant as GPU code.

    Programs that make or read such code hold its magic, too: as a constant, or in a text.
    """
    if head.startswith(FATBIN_MAGIC):
        return nvfatbin.is_fatbin(head)
    if head.startswith(BUNDLE_MAGIC):
        return bundle.is_bundle(head)
    if head.startswith(COMPRESSED_MAGIC):
        return bundle.is_compressed(head, room)
    if head.startswith(OFFLOAD_MAGIC):
        version, n_bytes = int.from_bytes(head[4:8], "little"), int.from_bytes(head[8:16], "little")
        return 1 <= version <= _OFFLOAD_VERSIONS and len(head) < n_bytes <= room
    machine = int.from_bytes(head[18:20], "little")
    return machine in (EM_AMDGPU, EM_CUDA) and len(head) < _object_bytes(head) <= room


def _read_code(
    head: bytes, start: int, size: int, allowance: bundle.Allowance, room: int
) -> Reader[FoundCode]:
    if head.startswith(FATBIN_MAGIC):
        fatbin = yield from nvfatbin.read_fatbin(start, size, room)
        codes = tuple(map(code_of_entry, fatbin.entries))
        return FoundCode(FATBIN_MAGIC, start, fatbin.n_bytes, codes)
    if head.startswith((BUNDLE_MAGIC, COMPRESSED_MAGIC)):
        place = yield from _read_bundle(start, size, allowance)
        if len(place.bundle.codes) > room:
            raise bundle.too_many_codes(start)
        if place.header is None:
            codes = yield from _codes_of_bundle(place)
            return FoundCode(BUNDLE_MAGIC, start, place.stored_bytes, codes)
        return FoundCode(COMPRESSED_MAGIC, start, place.stored_bytes, tuple(_shares(place, place.header)))
    if head.startswith(OFFLOAD_MAGIC):
        n_bytes = int.from_bytes(head[8:16], "little")
        return FoundCode(OFFLOAD_MAGIC, start, n_bytes, (Code(None, start, n_bytes, n_bytes),))
    if head.startswith(OBJECT_MAGIC):
        return _object(head, start, _object_bytes(head))
    raise BadBundle("found something unknown where GPU code was expected", place=start)


def code_of_entry(entry: nvfatbin.NvEntry) -> Code:
    """A fat binary's entry: its place is that of its payload."""
    start, n_bytes = entry.start + entry.header_bytes, entry.stored_bytes - entry.header_bytes
    lz4 = (entry.lz4_bytes, entry.unpacked_bytes) if entry.lz4_bytes else None
    return Code(entry.code, start, n_bytes, entry.stored_bytes, entry.is_blank, lz4)


def _object(head: bytes, start: int, n_bytes: int, magic: bytes = OBJECT_MAGIC) -> FoundCode:
    machine, flags = int.from_bytes(head[18:20], "little"), int.from_bytes(head[48:52], "little")
    if machine == EM_CUDA:
        target: TargetId | None = TargetId(nvfatbin.target_of_flags(flags, head[8]))
    else:
        target = target_of_flags(flags, head[8])
    return FoundCode(magic, start, n_bytes, (Code(target, start, n_bytes, n_bytes),))


def _object_bytes(head: bytes) -> int:
    """Length of an ELF file by its header: its tables of headers come last."""
    ends = [
        int.from_bytes(head[table : table + 8], "little")
        + int.from_bytes(head[sizes : sizes + 2], "little")
        * int.from_bytes(head[sizes + 2 : sizes + 4], "little")
        for table, sizes in ((32, 54), (40, 58))
    ]
    return max(ends)


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


def _codes_of_bundle(place: BundlePlace) -> Reader[tuple[Code, ...]]:
    """The codes of a raw bundle, in the order of their places."""
    codes = []
    for entry in sorted(place.bundle.codes, key=lambda entry: entry.offset):
        start = place.start + entry.offset
        first = yield Read(start, min(nvfatbin.BLANK_BYTES, entry.n_bytes), "a code object")
        assert isinstance(first, bytes)
        is_blank = len(first) == nvfatbin.BLANK_BYTES and not any(first)
        codes.append(Code(entry.target, start, entry.n_bytes, entry.n_bytes, is_blank))
    return tuple(codes)


def _shares(place: BundlePlace, header: Header) -> Iterator[Code]:
    unpacked_total = sum(entry.n_bytes for entry in place.bundle.codes)
    done = given = 0
    for entry in place.bundle.codes:
        done += entry.n_bytes
        share = (place.stored_bytes - header.header_bytes) * done // unpacked_total
        yield Code(entry.target, place.start, 0, share - given)
        given = share
