"""Libraries in memory, cut to some targets, and CUDA libraries to cut."""

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
