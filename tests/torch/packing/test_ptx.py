"""The PTX that Triton makes of the kernels gives the right bits: it is run here instruction by instruction.

Everything from Triton's launcher on is as on a GPU, down to the PTX; what stands in is the GPU.
"""

import os
from pathlib import Path

import pytest
from children import lines

CHILD = Path(__file__).with_name("ptx_child.py")
TARGETS = ("90", "80") if os.environ.get("ALL_CASES") else ("90",)  # both as `make thorough` has it
KERNELS = {"unpack_b12", "rows_b12", "unpack_f28", "unpack_planes", "one_row", "few_rows"}
KERNELS |= {"gather", "unpack_expert", "gate_up", "down"}


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> list[dict]:
    return lines(CHILD, *TARGETS, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("target", [f"sm{each}" for each in TARGETS])
def test_the_ptx_of_every_kernel_gives_the_same_bits_or_rounded_products(tried, target):
    here = [row for row in tried if row["target"] == target]
    assert {kernel for row in here for kernel in row["kernels"]} == KERNELS
    assert {row["case"]: row["wrong"] for row in here if row["wrong"]} == {}
    assert all(
        len(row["kernels"]) == len(row["kernel"].split(","))
        for row in here
        if "into memory" not in row["case"]
    )
