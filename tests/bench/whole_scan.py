"""GPU code of a file by a scan of all its bytes, at any alignment: the referee of the audit's figures.

Written apart from `buildtool.gpucode`, of which it uses nothing: it maps the file, looks for the first bytes
of each format anywhere, in no order, then drops what lies inside of something else.
"""

import hashlib
import mmap
import struct
from collections import Counter
from functools import lru_cache
from pathlib import Path


def whole_scan(path: Path) -> Counter[str]:
    """Bytes of GPU code by architecture (`sm_90`, `compute_90`, `lto_90`, `gfx90a`, `unknown`)."""
    sums: Counter[str] = Counter()
    for _, _, codes in places_in(path):
        sums.update(codes)
    return sums


def places_in(path: Path) -> list["Place"]:
    """Where GPU code is in a file, and what, each byte once."""
    status = path.stat()
    return _places(path, status.st_size, status.st_mtime_ns, status.st_ino) if status.st_size else []


@lru_cache(maxsize=256)
def _places(path: Path, *_: int) -> list["Place"]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"\x7fELF" and data[:4] not in (FATBIN, b"CCOB", OFFLOAD) and data[:24] != BUNDLE:
            return []
        found = sorted([*fatbins(data), *bundles(data), *compressed(data), *objects(data), *offloads(data)])
        places: list[Place] = []
        for start, end, codes in sorted([*found, *frames(data, found)]):
            if not places or start >= places[-1][1]:
                places.append((start, end, codes))
        return places


FATBIN, BUNDLE, OFFLOAD = b"\x50\xed\x55\xba", b"__CLANG_OFFLOAD_BUNDLE__", b"\x10\xff\x10\xad"
Place = tuple[int, int, dict[str, int]]


def positions(data: mmap.mmap, magic: bytes) -> list[int]:
    found, at = [], data.find(magic)
    while at >= 0:
        found.append(at)
        at = data.find(magic, at + 1)
    return found


def fatbins(data: mmap.mmap) -> list[Place]:
    places = []
    for start in positions(data, FATBIN):
        if start + 16 > len(data):
            continue
        version, header, length = struct.unpack_from("<HHQ", data, start + 4)
        end = start + header + length
        if version != 1 or header != 16 or end > len(data):
            continue
        codes: Counter[str] = Counter()
        at = start + header
        while at + 64 <= end:
            kind, entry_header, payload = struct.unpack_from("<HxxIQ", data, at)
            (number,) = struct.unpack_from("<I", data, at + 28)
            if data[at + entry_header : at + entry_header + 16] != bytes(16) or payload < 16:
                name = {1: "compute", 2: "sm", 8: "lto"}.get(kind)
                codes[f"{name}_{number}" if name else "unknown"] += entry_header + payload
            at += entry_header + payload
        if at == end:
            places.append((start, end, dict(codes)))
    return places


def bundle_codes(head: bytes) -> tuple[int, list[tuple[str, int, int]]]:
    """Length of the entry table, and name, offset and length of each entry; ValueError for no bundle."""
    (count,) = struct.unpack_from("<Q", head, 24)
    if not 1 <= count <= 1024:
        raise ValueError
    at, rows = 32, []
    for _ in range(count):
        offset, length, id_length = struct.unpack_from("<QQQ", head, at)
        name = head[at + 24 : at + 24 + id_length].decode()
        rows.append((name, offset, length))
        at += 24 + id_length
    return at, rows


def processor(name: str) -> str:
    return name[name.index("gfx") :].rstrip("-").partition(":")[0] if "gfx" in name else "spirv"


def bundles(data: mmap.mmap) -> list[Place]:
    places = []
    for start in positions(data, BUNDLE):
        try:
            table, rows = bundle_codes(data[start : start + (1 << 16)])
        except (ValueError, struct.error):
            continue
        end = start + max([table, *(offset + length for _, offset, length in rows if length)])
        codes: Counter[str] = Counter()
        for name, offset, length in rows:
            at = start + offset
            if length and not name.startswith("host") and any(data[at : at + 16]):
                codes[processor(name)] += length
        if end <= len(data):
            places.append((start, end, dict(codes)))
    return places


def compressed(data: mmap.mmap) -> list[Place]:
    """CCOB of versions 2 and 3: its bytes without the header, by the names inside."""
    from backports import zstd

    places = []
    for start in positions(data, b"CCOB"):
        version, method = struct.unpack("<HH", data[start + 4 : start + 8].ljust(4, b"\0"))
        if version not in (2, 3) or method != 1:
            continue
        header = {2: 24, 3: 32}[version]
        length = int.from_bytes(data[start + 8 : start + (12 if version == 2 else 16)], "little")
        if (
            not header < length <= len(data) - start
            or data[start + header : start + header + 4] != b"\x28\xb5\x2f\xfd"
        ):
            continue
        raw = zstd.ZstdDecompressor().decompress(data[start + header : start + length])
        _, rows = bundle_codes(raw[: 1 << 16])
        total = sum(size for name, _, size in rows if not name.startswith("host"))
        codes: Counter[str] = Counter()
        for name, _, size in rows:
            if size and not name.startswith("host"):
                codes[processor(name)] += round((length - header) * size / total)
        places.append((start, start + length, dict(codes)))
    return places


def objects(data: mmap.mmap) -> list[Place]:
    """ELF files for GPUs inside of another file, or the file itself."""
    places = []
    for start in positions(data, b"\x7fELF\x02\x01\x01"):
        if start + 64 > len(data):
            continue
        machine = int.from_bytes(data[start + 18 : start + 20], "little")
        if machine not in (190, 224):
            continue
        segments, sections, flags = struct.unpack_from("<QQI", data, start + 32)
        segment_bytes, n_segments, section_bytes, n_sections = struct.unpack_from("<HHHH", data, start + 54)
        length = max(segments + segment_bytes * n_segments, sections + section_bytes * n_sections)
        length = len(data) if start == 0 else length
        if not 64 < length <= len(data) - start:
            continue
        places.append((start, start + length, {f"object of machine {machine}, flags {flags:#x}": length}))
    return places


def frames(data: mmap.mmap, others: list[Place]) -> list[Place]:
    """Cubins that are zstd frames of their own: every magic outside of the other places is unpacked."""
    from backports import zstd

    places, ends, at = [], sorted(others), 0
    for start in positions(data, b"\x28\xb5\x2f\xfd"):
        while at < len(ends) and ends[at][1] <= start:
            at += 1
        if (at < len(ends) and ends[at][0] <= start) or (places and start < places[-1][1]):
            continue
        unpacking, end, code = zstd.ZstdDecompressor(), start, b""
        try:
            while not unpacking.eof and end < len(data):
                piece = data[end : end + (1 << 20)]
                end += len(piece)
                code = code or unpacking.decompress(piece, 64)
                while not (unpacking.needs_input or unpacking.eof):
                    unpacking.decompress(b"", 1 << 24)
        except zstd.ZstdError:
            continue
        if unpacking.eof and code[:7] == b"\x7fELF\x02\x01\x01" and code[18:20] == b"\xbe\x00":
            end -= len(unpacking.unused_data)
            (flags,) = struct.unpack_from("<I", code, 48)
            name = f"sm_{flags >> 8 & 255 if code[8] >= 8 else flags & 255}"
            places.append((start, end, {name: end - start}))
    return places


def offloads(data: mmap.mmap) -> list[Place]:
    places = []
    for start in positions(data, OFFLOAD):
        version, length = struct.unpack("<IQ", data[start + 4 : start + 16].ljust(12, b"\0"))
        if version in (1, 2) and 64 < length <= len(data) - start:
            places.append((start, start + length, {"unknown": length}))
    return places


def code_digests(path: Path, target: str) -> Counter[str]:
    """SHA-256 of every piece of machine code for one target, with how often it is there.

    Of a compressed bundle, which is packed anew, the unpacked pieces count.
    """
    digests: Counter[str] = Counter()
    if not path.exists():
        return digests
    with path.open("rb") as file:
        for start, end, codes in places_in(path):
            if target in codes:
                file.seek(start)
                pieces = pieces_of(file.read(end - start), target)
                digests.update(hashlib.sha256(piece).hexdigest() for piece in pieces)
    return digests


def pieces_of(content: bytes, target: str) -> list[bytes]:
    """The payloads for a target in one container; a frame is one itself."""
    if content.startswith(b"\x28\xb5\x2f\xfd"):
        return [content]
    if content.startswith(FATBIN):
        return fatbin_pieces(content, int(target.removeprefix("sm_")))
    if content.startswith(b"CCOB"):
        from backports import zstd

        header = {2: 24, 3: 32}[int.from_bytes(content[4:6], "little")]
        content = zstd.ZstdDecompressor().decompress(content[header:])
    _, rows = bundle_codes(content)
    return [
        content[offset : offset + length]
        for name, offset, length in rows
        if length and not name.startswith("host") and processor(name) == target
    ]


def fatbin_pieces(content: bytes, architecture: int) -> list[bytes]:
    pieces, at = [], 16
    while at + 64 <= len(content):
        kind, header, payload = struct.unpack_from("<HxxIQ", content, at)
        (number,) = struct.unpack_from("<I", content, at + 28)
        piece = content[at : at + header + payload]
        if (kind, number) == (2, architecture) and any(piece[header : header + 16]):
            pieces.append(piece)
        at += header + payload
    return pieces
