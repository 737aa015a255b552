"""Tiny shared libraries with GPU bundles in them, byte by byte; the real loader accepts them."""

import struct
from dataclasses import dataclass, field

from buildtool.gpucode.bundle import BUNDLE_MAGIC, align_up

PAGE = 4096
HOST_ID = "host-x86_64-unknown-linux-gnu-"
DEVICE = "hipv4-amdgcn-amd-amdhsa--"


def code(target: str, index: int = 0, n_bytes: int = 9000) -> bytes:
    """Something that looks like a code object, different for every target and bundle."""
    seed = f"{target}/{index} ".encode()
    return b"\x7fELF" + (seed * (n_bytes // len(seed) + 1))[: n_bytes - 4]


def raw_bundle(codes: dict[str, bytes], *, host: bool = True) -> bytes:
    """A `__CLANG_OFFLOAD_BUNDLE__` as clang lays it out; keys are targets or whole ids."""
    ids = [(HOST_ID, b"")] if host else []
    ids += [(DEVICE + name if name.startswith("gfx") else name, c) for name, c in codes.items()]
    table_bytes = 32 + sum(24 + len(name) for name, _ in ids)
    table, payload, end = b"", b"", align_up(table_bytes, PAGE)
    start = end
    for name, data in ids:
        table += struct.pack("<QQQ", end, len(data), len(name)) + name.encode()
        payload += data + bytes(-len(data) % PAGE)
        end += align_up(len(data), PAGE)
    head = BUNDLE_MAGIC + struct.pack("<Q", len(ids)) + table
    whole = head + bytes(start - len(head)) + payload
    last = max((data for _, data in ids if data), key=len, default=b"")
    return whole[: len(whole) - (-len(ids[-1][1]) % PAGE)] if last else head


def bundles(targets: list[str], count: int = 3, n_bytes: int = 9000) -> list[bytes]:
    """`count` bundles with code for each target."""
    return [raw_bundle({t: code(t, i, n_bytes + 100 * i) for t in targets}) for i in range(count)]


@dataclass
class Spec:
    """What the library shall be like; the defaults are what lld and GNU ld usually write."""

    bundles: list[bytes]
    follow: bool = True  # another section behind the bundles, in their segment
    relr: bool = False
    phdr: bool = False  # a PT_PHDR
    align: int = PAGE
    words_in_file: bool = False  # pointers also stand in the file, where RELA overwrites them
    symbols: bool = False  # a .symtab with a symbol for each bundle
    wrapper_magic: int = 0x48495046
    wrapper_version: int = 1
    type: int = 3
    machine: int = 62
    interpreter: bool = False
    relocate: bool = True
    extra_rela: list[tuple[int, int, int]] = field(default_factory=list)
    dynamic_symbol_in_bundle: bool = False
    pointer_shift: int = 0
    bss_behind: bool = False
    section: str = ".hip_fatbin"
    wrapper_section: str = ".hipFatBinSegment"
    behind: str = ".eh_frame_hdr"
    data: bytes = b"variables " * 30
    rodata: bytes = b"constants " * 40


@dataclass
class Library:
    """The bytes, and where things are in them: file positions and addresses."""

    data: bytes
    fatbin: int
    fatbin_address: int
    wrappers: int
    wrappers_address: int
    bundle_starts: list[int]


@dataclass
class _Part:
    name: str
    type: int
    flags: int
    data: bytes
    align: int = 8
    entry: int = 0
    link: int = 0
    offset: int = 0
    address: int = 0


def make_library(spec: Spec) -> Library:
    starts, blob = [], b""
    for one in spec.bundles:
        blob += bytes(-len(blob) % PAGE)
        starts.append(len(blob))
        blob += one
    count = len(starts)
    n_rela = (0 if spec.relr or not spec.relocate else count) + len(spec.extra_rela)
    relr_bytes = 16 if spec.relr else 0
    note = _Part(".note.gnu.build-id", 7, 2, struct.pack("<III4s", 4, 20, 3, b"GNU\0") + bytes(range(20)), 4)
    dynsym = _Part(".dynsym", 11, 2, bytes(48), 8, 24, 3)
    dynstr = _Part(".dynstr", 3, 2, b"\0lib\0", 1)
    rela = _Part(".rela.dyn", 4, 2, bytes(24 * n_rela), 8, 24)
    relr = _Part(".relr.dyn", 19, 2, bytes(relr_bytes), 8, 8)
    rodata = _Part(".rodata", 1, 2, spec.rodata, 16)
    fatbin = _Part(spec.section, 1, 2, blob, PAGE)
    behind = _Part(spec.behind, 1, 2, b"unwind " * 700, 4)
    dynamic = _Part(".dynamic", 6, 3, bytes(16 * 10), 8, 16, 3)
    wrappers = _Part(spec.wrapper_section, 1, 3, bytes(24 * count), 8)
    data = _Part(".data", 1, 3, spec.data, 8)
    symtab = _Part(".symtab", 2, 0, bytes(24 * (count + 1)), 8, 24)
    names = _Part(".shstrtab", 3, 0, b"", 1)
    groups = [
        (4, [note, dynsym, dynstr, *([rela] if n_rela else []), *([relr] if spec.relr else [])]),
        (4, [rodata, fatbin, *([behind] if spec.follow else [])]),
        (6, [dynamic, wrappers, data]),
    ]
    loose = [*([symtab] if spec.symbols else []), names]
    parts = [part for _, group in groups for part in group] + loose
    names.data = b"\0" + b"".join(part.name.encode() + b"\0" for part in parts)
    n_segments = 3 + 3 + spec.phdr + spec.interpreter
    # addresses: a gap of one alignment between segments, as linkers leave
    offset = 64 + 56 * n_segments
    address, spans = offset, []
    for index, (_, group) in enumerate(groups):
        if index:
            address = align_up(address, spec.align) + spec.align + offset % spec.align
        begin = (offset, address)
        for part in group:
            pad = -address % part.align
            offset, address = offset + pad, address + pad
            part.offset, part.address = offset, address
            offset, address = offset + len(part.data), address + len(part.data)
        spans.append((*begin, offset - begin[0]))
    for part in loose:
        offset = align_up(offset, part.align)
        part.offset = offset
        offset += len(part.data)
    shoff = align_up(offset, 8)
    places = [wrappers.address + 24 * i + 8 for i in range(count)]
    values = [fatbin.address + s + spec.pointer_shift for s in starts]
    in_file = spec.relr or spec.words_in_file
    wrappers.data = b"".join(
        struct.pack("<IIQQ", spec.wrapper_magic, spec.wrapper_version, value if in_file else 0, 0)
        for value in values
    )
    rows = [] if spec.relr or not spec.relocate else [(p, 8, v) for p, v in zip(places, values, strict=True)]
    rela.data = b"".join(struct.pack("<QQq", *row) for row in [*rows, *spec.extra_rela])
    if spec.relr:  # first an address, then a bitmap of every third word after it
        bits = sum(1 << (3 * i - 1) for i in range(1, count))
        relr.data = struct.pack("<QQ", places[0], bits << 1 | 1)
    number = {part.name: i + 1 for i, part in enumerate(parts)}
    if spec.dynamic_symbol_in_bundle:
        dynsym.data = bytes(24) + struct.pack("<IBBHQQ", 1, 0x11, 0, number[spec.section], values[-1], 8)
    symtab.data = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", 0, 1, 0, number[spec.section], value, 8) for value in values
    )
    tags = [(5, dynstr.address), (6, dynsym.address), (10, len(dynstr.data)), (11, 24)]
    if n_rela:
        tags += [(7, rela.address), (8, len(rela.data)), (9, 24)]
    if spec.relr:
        tags += [(36, relr.address), (35, relr_bytes), (37, 8)]
    dynamic.data = b"".join(struct.pack("<QQ", *tag) for tag in tags).ljust(len(dynamic.data), b"\0")

    def segment(kind: int, flags: int, at: tuple[int, int, int], align: int, more: int = 0) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, at[0], at[1], at[1], at[2], at[2] + more, align)

    first = (0, spans[0][1] - spans[0][0], spans[0][2] + spans[0][0])
    headers = [segment(6, 4, (64, 64, 56 * n_segments), 8)] if spec.phdr else []
    if spec.interpreter:
        headers.append(segment(3, 4, (rodata.offset, rodata.address, 16), 1))
    headers += [
        segment(1, 4, first, spec.align),
        segment(1, 4, spans[1], spec.align, 4096 if spec.bss_behind else 0),
        segment(1, 6, spans[2], spec.align),
        segment(2, 6, (dynamic.offset, dynamic.address, len(dynamic.data)), 8),
        segment(4, 4, (note.offset, note.address, len(note.data)), 4),
        segment(0x6474E551, 6, (0, 0, 0), 16),
    ]
    out = bytearray(shoff + 64 * (len(parts) + 1))
    out[:64] = struct.pack(
        "<4sBBBB8xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, spec.type, spec.machine, 1, 0, 64, shoff,
        0, 64, 56, n_segments, 64, len(parts) + 1, len(parts),
    )  # fmt: skip
    out[64 : 64 + 56 * n_segments] = b"".join(headers)
    name_at = 1
    for index, part in enumerate(parts, 1):
        out[part.offset : part.offset + len(part.data)] = part.data
        out[shoff + 64 * index : shoff + 64 * index + 64] = struct.pack(
            "<IIQQQQIIQQ", name_at, part.type, part.flags, part.address, part.offset, len(part.data),
            part.link, 0, part.align, part.entry,
        )  # fmt: skip
        name_at += len(part.name) + 1
    return Library(bytes(out), fatbin.offset, fatbin.address, wrappers.offset, wrappers.address, starts)


def nv_fatbin(entries: list[tuple[int, int, int]], *, unpacked: int = 0) -> bytes:
    """A CUDA fat binary of (kind, architecture, payload length); `unpacked` makes all compressed."""
    body = b""
    for kind, architecture, n_bytes in entries:
        payload = code(f"{kind}.{architecture}", len(body), n_bytes + -n_bytes % 8)
        flags = 0x2000 if unpacked else 0
        body += struct.pack(
            "<HHIQI8xI8xQ8xQ",
            kind,
            0x101,
            64,
            len(payload),
            n_bytes if unpacked else 0,
            architecture,
            flags,
            unpacked,
        )
        body += payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def split_section(library: Library, at: int, name: str) -> bytes:
    """The library with its section of bundles cut in two: from `at` bytes on it is called `name`."""
    data = bytearray(library.data)
    (shoff,), (count, names_index) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 60)
    rows = [list(struct.unpack_from("<IIQQQQIIQQ", data, shoff + 64 * n)) for n in range(count)]
    first = next(row for row in rows if row[4] == library.fatbin)
    second = list(first)
    second[3], second[4], second[5] = first[3] + at, first[4] + at, first[5] - at
    first[5] = at
    names = bytes(data[rows[names_index][4] :][: rows[names_index][5]]) + name.encode() + b"\0"
    second[0] = rows[names_index][5]
    rows[names_index][4], rows[names_index][5] = len(data), len(names)
    data += names + bytes(-(len(data) + len(names)) % 8)
    struct.pack_into("<Q", data, 40, len(data))
    struct.pack_into("<H", data, 60, count + 1)
    return bytes(data) + b"".join(struct.pack("<IIQQQQIIQQ", *row) for row in [*rows, second])
