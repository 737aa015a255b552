"""The bench's referee and the audit's reader count the same, each in its own way, in any kind of library."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from buildtool.core.compression import zstd
from buildtool.gpucode.bundle import Method, pack
from buildtool.image.gpu_code import GpuCodeCounter
from gpucode.cutting import ALL, CUBIN, LTO, cubin, cuda, pruned
from gpucode.maker import Spec, bundles, make_library, nv_fatbin, raw_bundle

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from whole_scan import code_digests, whole_scan

RAW = raw_bundle({"gfx906": bytes(range(1, 251)) * 90, "gfx1100": b"other code" * 900})
PACKED = pack([RAW], len(RAW), version=3, method=Method.ZSTD)
CUDA_LIBRARY = cuda([nv_fatbin(ALL), nv_fatbin([*ALL, (LTO, 75, 900), (CUBIN, 100, 7000)])])
FRAMES = cuda(
    [nv_fatbin(ALL)],
    data=b"".join(
        zstd.compress(cubin("_Z3onev", architecture=card)).ljust(400, b"\0") for card in (75, 90, 100)
    ),
)
LIBRARIES = {
    "HIP": make_library(Spec(bundles(["gfx906", "gfx1100"]))).data,
    "HIP, compressed": make_library(Spec([PACKED])).data,
    "HIP in another section": make_library(Spec([RAW], section=".rodata.more")).data,
    "CUDA": CUDA_LIBRARY,
    "CUDA in another section": cuda([nv_fatbin(ALL)], section=".cask_resource"),
    "CUDA, pruned": pruned(CUDA_LIBRARY, "sm_90"),
    "CUDA in another section, pruned": pruned(cuda([nv_fatbin(ALL)], section=".ldata"), "sm_90"),
    "CUDA in frames": FRAMES,
    "CUDA in frames, pruned": pruned(FRAMES, "sm_90"),
    "none": make_library(Spec([b"nothing" * 900], section=".rodata.more")).data,
}


@pytest.mark.parametrize("data", LIBRARIES.values(), ids=list(LIBRARIES))
def test_audit_counts_what_a_scan_of_the_whole_file_counts(data: bytes, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(data)
    counter = GpuCodeCounter(len(data))
    for at in range(0, len(data), 5000):
        counter.feed(data[at : at + 5000])
    counted, scanned = Counter(counter.stored_bytes_by_processor()), whole_scan(library)
    assert counted.keys() == scanned.keys()
    assert all(abs(counted[name] - scanned[name]) <= 1 for name in scanned)


def test_the_referee_sees_code_that_was_lost(tmp_path: Path) -> None:
    before, after, lost = (tmp_path / name for name in ("before", "after", "lost"))
    before.write_bytes(CUDA_LIBRARY)
    after.write_bytes(LIBRARIES["CUDA, pruned"])
    lost.write_bytes(pruned(CUDA_LIBRARY, "sm_80"))
    assert code_digests(before, "sm_90") == code_digests(after, "sm_90") != code_digests(lost, "sm_90")
    assert code_digests(before, "sm_90").total() == 2
