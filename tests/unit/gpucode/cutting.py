"""Libraries in memory, cut to some targets, and CUDA libraries to cut."""

import struct

from buildtool.core.compression import zstd
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.plan import PrunePlan, chunks_of
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets
from buildtool.gpucode.verify import verify_prune
from gpucode.maker import Spec, make_library

PTX, CUBIN, LTO = 1, 2, 8
ALL = [(CUBIN, 75, 9000), (CUBIN, 80, 9000), (CUBIN, 86, 9000), (CUBIN, 90, 9000), (PTX, 90, 900)]


def cuda(fatbins: list[bytes], **more: object) -> bytes:
    spec = Spec(fatbins, section=".nv_fatbin", wrapper_section=".nvFatBinSegment", wrapper_magic=0x466243B1)
    return make_library(Spec(**{**vars(spec), **more})).data


def carried_out(plan: PrunePlan, data: bytes) -> bytes:
    source = Source.of_bytes(data)
    out = bytearray(b"".join(chunk for piece in plan.pieces for chunk in chunks_of(piece, source)))
    for patch in plan.patches:
        out[patch.offset : patch.offset + len(patch.data)] = patch.data
    assert len(out) == plan.bytes_after
    return bytes(out)


def pruned(data: bytes, targets: str, **options: int | None) -> bytes:
    wanted = parse_targets(targets)
    plan = plan_prune(Source.of_bytes(data), wanted, **options)
    out = carried_out(plan, data)
    if plan.changed:
        assert verify_prune(Source.of_bytes(data), Source.of_bytes(out), wanted) > 0
    return out


def targets_in(data: bytes) -> set[str]:
    return set(scan_file(Source.of_bytes(data)))


def cubin(*names: str, n_bytes: int = 400, stuff: bytes = b"code", architecture: int = 90) -> bytes:
    """An ELF file with a function of `n_bytes` for each name."""
    strings = b"\0.shstrtab\0" + b"".join(f".text.{name}\0".encode() for name in names)
    text = (stuff * (n_bytes // len(stuff) + 1))[:n_bytes]
    body, at = strings + text * len(names), 64
    shoff = at + len(body) + -len(body) % 8
    rows = [bytes(64), struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, at, len(strings), 0, 0, 1, 0)]
    for number, name in enumerate(names):
        place = strings.index(f".text.{name}\0".encode())
        start = at + len(strings) + n_bytes * number
        rows.append(struct.pack("<IIQQQQIIQQ", place, 1, 6, 0, start, n_bytes, 0, 0, 1, 0))
    head = struct.pack(
        "<4sBBBBB7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0x41, 8, 2, 190, 1, 0, 0, shoff, architecture << 8,
        64, 56, 0, 64, len(rows), 1,
    )  # fmt: skip
    return head + body.ljust(shoff - 64, b"\0") + b"".join(rows)


def fatbin(*entries: tuple[int, int, bytes], lz4: bool = False) -> bytes:
    """A fat binary of (kind, architecture, code), machine code compressed as by nvcc 13, or as before."""
    body = b""
    for kind, architecture, code in entries:
        stored, flags = code, 0
        if kind == CUBIN:
            stored, flags = (lz4_block(code), 0x2000) if lz4 else (zstd.compress(code), 0x8000)
        padded = stored + bytes(-len(stored) % 8)
        body += struct.pack(
            "<HHIQI8xI8xQ8xQ", kind, 0x101, 64, len(padded), len(stored), architecture, flags, len(code)
        )
        body += padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def lz4_block(data: bytes) -> bytes:
    """An LZ4 block, packed where a run of 40 bytes repeats what is 8 bytes before it."""
    out, literals, at = b"", b"", 0
    while at < len(data):
        length = 0
        while at >= 8 and at + length < len(data) - 5 and data[at + length] == data[at + length - 8]:
            length += 1
        if length < 40:
            literals, at = literals + data[at : at + 1], at + 1
            continue
        out += _lengths(len(literals), length - 4) + literals + b"\x08\x00" + _more(length - 4)
        literals, at = b"", at + length
    return out + _lengths(len(literals), 0) + literals


def _lengths(n_literals: int, n_match: int) -> bytes:
    return bytes([min(n_literals, 15) << 4 | min(n_match, 15)]) + _more(n_literals)


def _more(length: int) -> bytes:
    return b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255]) if length >= 15 else b""
