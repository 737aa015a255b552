"""The kernels compile for GPUs that aren't here: AMD's with wavefronts of 64 and 32, and NVIDIA's.

They were never run on an AMD GPU. What can be held without one: Triton makes code for it, without PTX, and
the tiles chosen for it spill no registers to memory.
"""

from pathlib import Path

import pytest
from children import lines

HERE = Path(__file__).parent
KERNELS = {"unpack_b12", "rows_b12", "unpack_f28", "unpack_planes", "one_row", "few_rows"}
EXPERT_KERNELS = {"gather", "unpack_expert", "gate_up", "down"}


@pytest.mark.sampled(1)  # kernels are run on gfx1100, gfx90a and sm90 in tests/amd and test_ptx.py
@pytest.mark.parametrize("target", ["gfx90a:64", "gfx1100:32", "sm90"])
def test_kernels_compile_for_amd_without_ptx_and_for_nvidia_with_it(tmp_path, target):
    found = lines(HERE / "compile_child.py", target, TRITON_CACHE_DIR=str(tmp_path))
    assert {row["kernel"] for row in found} == KERNELS | EXPERT_KERNELS
    with_ptx = {row["kernel"] for row in found if row["ptx"]}
    coded = {"unpack_b12", "rows_b12", "unpack_planes", "one_row", "few_rows"}
    coded |= {"unpack_expert", "gate_up", "down"}
    assert with_ptx == (coded if target.startswith("sm") else set())
    assert {row["kernel"] for row in found if row["spills"] > 8} == set()
