"""The kernels compile for GPUs that aren't here: AMD's with wavefronts of 64 and 32, and NVIDIA's.

They were never run on an AMD GPU. What can be held without one: Triton makes code for it, without PTX, and
the tiles chosen for it spill no registers to memory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = {"unpack_b12", "rows_b12", "unpack_f28", "unpack_planes", "one_row", "few_rows"}
EXPERT_KERNELS = {"gather", "unpack_expert", "gate_up", "down"}


def test_kernels_compile_for_amd_without_ptx_and_for_nvidia_with_it(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[2])}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_child.py"), "gfx90a:64", "gfx1100:32", "sm90"],
        env={**env, "TRITON_DEFAULT_FP_FUSION": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for target in ("gfx90a", "gfx1100", "90"):
        assert {row["kernel"] for row in found if row["target"] == target} == KERNELS | EXPERT_KERNELS
    with_ptx = {(row["kernel"], row["target"]) for row in found if row["ptx"]}
    coded = ("unpack_b12", "rows_b12", "unpack_planes", "one_row", "few_rows")
    assert with_ptx == {(kernel, "90") for kernel in (*coded, "unpack_expert", "gate_up", "down")}
    assert {row["kernel"] for row in found if row["spills"] > 8} == set()
