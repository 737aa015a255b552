"""Ways to damage a library, for the fuzz tests here and the longer run of the bench."""

import random
import struct

from buildtool.core.compression import zstd
from buildtool.gpucode.bundle import Method, pack
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.plan import chunks_of
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import GpuCodeError, PruneRefused, Source, VerifyFailed
from buildtool.gpucode.target import TargetId, parse_targets
from buildtool.gpucode.verify import verify_prune
from gpucode.cutting import cubin, cuda
from gpucode.maker import Spec, bundles, make_library, nv_fatbin, raw_bundle

GFX906 = parse_targets("gfx906,sm_90")
_WITH_CHECKSUM: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
_ODD_WORDS = (0, 1, 7, 4095, 4097, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 64) - 4096, (1 << 64) - 1)


def seeds() -> list[bytes]:
    """Small files of every form that is understood."""
    raws = bundles(["gfx906", "gfx803"], count=2, n_bytes=4500)
    compressed = [
        pack([raw], len(raw), version=v, method=m) for raw, v, m in zip(raws, (1, 3), Method, strict=True)
    ]
    cubins = (cubin("_Z3onev", n_bytes=1 << 17, architecture=card) for card in (80, 90, 100))
    packed = (zstd.compress(code, options=_WITH_CHECKSUM) for code in cubins)
    frames = [frame + bytes(-len(frame) % 16) for frame in packed]
    return [
        make_library(Spec(raws)).data,
        make_library(Spec(raws, follow=False, relr=True, phdr=True, symbols=True)).data,
        make_library(Spec(raws, words_in_file=True, align=0x8000)).data,
        make_library(Spec(compressed)).data,
        raw_bundle({"gfx906": b"a" * 300, "gfx803": b"b" * 9000}),
        compressed[0],
        nv_fatbin([(2, 80, 600), (2, 90, 700), (1, 90, 100)]),
        cuda([nv_fatbin([(2, 80, 600), (2, 90, 700)])], data=b"".join(frames)),
    ]


def mangled(data: bytes, chance: random.Random) -> bytes:
    """The file with 1 to 4 hurts: a bit, an odd word where headers are likely, a cut, a doubled range."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if not out:
            break
        match chance.randrange(5):
            case 0:
                out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
            case 1 | 2:
                at = chance.choice((chance.randrange(len(out)), chance.randrange(min(512, len(out))), max(len(out) - chance.randrange(1, 1200), 0)))  # fmt: skip # noqa: E501
                word = struct.pack("<Q", chance.choice(_ODD_WORDS))[: chance.choice((2, 4, 8))]
                at -= at % len(word)
                out[at : at + len(word)] = word
            case 3:
                del out[chance.randrange(len(out)) :]
            case _:
                at, n_bytes = chance.randrange(len(out)), chance.choice((8, 64, 4096))
                out[at : at + n_bytes] = out[: min(n_bytes, len(out) - at)]
    return bytes(out)


def survives(data: bytes, targets: tuple[TargetId, ...] = GFX906, *, strict: bool = False) -> bool:
    """Scan and prune; True when that ended in a checked result, False in a typed refusal.

    Raises whatever else comes out, which is what the fuzz looks for.
    """
    source = Source.of_bytes(data)
    try:
        scan_file(source)
        plan = plan_prune(source, targets, strict=strict)
        if not plan.changed:
            return True
        out = bytearray(b"".join(chunk for piece in plan.pieces for chunk in chunks_of(piece, source)))
        for patch in plan.patches:
            out[patch.offset : patch.offset + len(patch.data)] = patch.data
        assert len(out) == plan.bytes_after <= len(data)
        verify_prune(source, Source.of_bytes(bytes(out)), targets)
    except (GpuCodeError, PruneRefused, VerifyFailed):
        return False
    return True


def structured(data: bytes, step: int = 8) -> list[bytes]:
    """One library for each word of its headers and tables, each set to something impossible or odd."""
    (shoff,) = struct.unpack_from("<Q", data, 40)
    places = [*range(16, 512, step), *range(shoff + 64, len(data) - 7, step * 5)]
    return [
        data[:at] + struct.pack("<Q", _ODD_WORDS[index % len(_ODD_WORDS)]) + data[at + 8 :]
        for index, at in enumerate(places)
    ]
