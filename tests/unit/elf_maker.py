"""Makes small ELF files in memory: programs with debug information, libraries with GPU code."""

import struct
from collections.abc import Mapping

PAGE = 4096
KERNELS = {"gfx90a:xnack-": 50_000, "gfx1100": 20_000}
GNU = (".text", ".comment", ".debug_info", ".debug_str", ".symtab", ".strtab", ".shstrtab")
LLD = (".text", ".debug_info", ".debug_str", ".comment", ".symtab", ".shstrtab", ".strtab")
BYTES = {
    ".text": 90_000,
    ".comment": 40,
    ".debug_info": 200_000,
    ".debug_str": 50_000,
    ".symtab": 2400,
    ".strtab": 99_000,
}
STRIPPED = BYTES[".debug_info"] + BYTES[".debug_str"] + BYTES[".symtab"] + BYTES[".strtab"]
PROGBITS, SYMTAB, STRTAB = 1, 2, 3
ALLOC = 2


def program(
    order: tuple[str, ...] = GNU, *, sizes: Mapping[str, int] = BYTES, segments_at: int = 64
) -> bytes:
    """A 64-bit ELF program: headers, sections in this order, section headers last."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in order)
    start = 512
    places, body = {}, b""
    for name in order:
        content = names if name == ".shstrtab" else bytes([len(name)]) * sizes[name]
        places[name] = start + len(body), len(content)
        body += content
    body += bytes(-len(body) % 8)
    loaded = places[".text"][0] + places[".text"][1]
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, loaded, loaded, 4096)
    rows = [bytes(64)]
    for name in order:
        kind = {".symtab": SYMTAB, ".strtab": STRTAB, ".shstrtab": STRTAB}.get(name, PROGBITS)
        link = order.index(".strtab") + 1 if name == ".symtab" else 0
        flags = ALLOC if name == ".text" else 0
        address = places[name][0] if flags else 0
        fields = (names.find(name.encode() + b"\0"), kind, flags, address, *places[name], link, 0, 1, 0)
        rows.append(struct.pack("<IIQQQQIIQQ", *fields))
    table_at = start + len(body)
    counts = (64, 56, 1, 64, len(rows), order.index(".shstrtab") + 1)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, segments_at, table_at, 0, *counts)
    return (head + segment).ljust(start, b"\0") + body + b"".join(rows)


def bundle(kernels: dict[str, int]) -> bytes:
    """A `__CLANG_OFFLOAD_BUNDLE__`: a table of entries, then the code objects, each on a page of its own."""
    entries = [("host-x86_64-unknown-linux-gnu-", 0)]
    entries += [(f"hipv4-amdgcn-amd-amdhsa--{target}", size) for target, size in kernels.items()]
    table, body, at = b"", b"", PAGE
    for name, size in entries:
        table += struct.pack("<QQQ", at, size, len(name)) + name.encode()
        body += b"\x7fELF".ljust(size, b"k")[:size] + bytes(-size % PAGE)
        at += size + -size % PAGE
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries)) + table
    return head.ljust(PAGE, b"\0") + body


def library(fatbin: bytes, section: str = ".hip_fatbin", start: int = 3 * PAGE) -> bytes:
    """A 64-bit ELF shared library with one section, its section headers at the end."""
    names = b"\0" + section.encode() + b"\0.shstrtab\0"
    names_at = start + len(fatbin)
    headers_at = names_at + len(names) + -len(names) % 8
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, headers_at, 0, 64, 56, 0, 64, 3, 2)
    rows = [
        struct.pack("<IIQQQQIIQQ", *[0] * 10),
        struct.pack("<IIQQQQIIQQ", 1, 1, 2, start, start, len(fatbin), 0, 0, PAGE, 0),
        struct.pack("<IIQQQQIIQQ", len(section) + 2, 3, 0, 0, names_at, len(names), 0, 0, 1, 0),
    ]
    return (head.ljust(start, b"h") + fatbin + names).ljust(headers_at, b"\0") + b"".join(rows)


def shared(soname: str, text: bytes = b"", *, build_id: str = "") -> bytes:
    """A shared library: its name, a text among its constants, a build id; addresses are offsets."""
    strings = b"\0" + soname.encode() + b"\0"
    note = struct.pack("<III", 4, len(build_id) // 2, 3) + b"GNU\0" + bytes.fromhex(build_id)
    parts, at = {}, 64 + 3 * 56
    dynamic = struct.pack("<8Q", 14, 1, 5, 64 + 3 * 56, 10, len(strings), 0, 0)
    names = b"\0.dynstr\0.rodata\0.shstrtab\0"
    body = b""
    for name, content in (
        ("dynstr", strings),
        ("rodata", text),
        ("note", note),
        ("dynamic", dynamic),
        ("names", names),
    ):
        parts[name] = at + len(body), len(content)
        body += content + bytes(-len(content) % 8)
    table_at = at + len(body)
    segments = [(1, 5, 0, table_at), (2, 6, *parts["dynamic"]), (4, 4, *parts["note"])]
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, table_at, 0, 64, 56, 3, 64, 4, 3)
    for kind, flags, start, size in segments:
        head += struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, size, 8)
    rows = [(0, 0, 0, 0, 0), (1, STRTAB, ALLOC, *parts["dynstr"]), (9, PROGBITS, ALLOC, *parts["rodata"])]
    rows.append((17, STRTAB, 0, *parts["names"]))
    sections = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, flags, start if flags else 0, start, size, 0, 0, 1, 0)
        for name, kind, flags, start, size in rows
    )
    return head + body + sections
