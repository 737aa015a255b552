"""The PTX that Triton makes of the kernels gives the right bits: it is run here instruction by instruction.

Everything from Triton's launcher on is as on a GPU, down to the PTX; what stands in is the GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = {"unpack_b12", "rows_b12", "unpack_f28", "unpack_ranked", "one_row", "few_rows"}
KERNELS |= {"gather", "unpack_expert", "gate_up", "down"}


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> list[dict]:
    settled = {
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": str(HERE.parents[2]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "ptx_child.py"), "90", "80"],
        env={**os.environ, **settled},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", ["sm90", "sm80"])
def test_the_ptx_of_every_kernel_gives_the_same_bits_or_rounded_products(tried, target):
    here = [row for row in tried if row["target"] == target]
    assert {kernel for row in here for kernel in row["kernels"]} == KERNELS
    assert {row["case"]: row["wrong"] for row in here if row["wrong"]} == {}
    several = ("into memory", "products of experts")
    assert all(len(row["kernels"]) == 1 for row in here if not any(name in row["case"] for name in several))
