"""The machine code that Triton makes of the kernels for AMD's GPUs gives the right bits, run step by step.

All cases on all targets are `make bench-amd`; here are one of each kernel, for waves of 32 lanes and of 64.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import lines

from probes.placement.packing import proof
from probes.placement.planner.machine import table

CHILD = Path(__file__).with_name("amd_child.py")
TARGETS = ("gfx1100", "gfx90a", *(("gfx942",) if os.environ.get("ALL_CASES") else ()))
COUNTED = "gfx90a"
CASES = list(proof.cases())[4::20]  # of each kernel its second shape, with odd sizes, and Gaussian weights


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("triton")

    def run(target: str) -> list[dict]:
        shares = ("4/20", "counted") if target == COUNTED else ("4/20",)
        return lines(CHILD, target, *shares, TRITON_CACHE_DIR=str(folder / target))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(TARGETS, pool.map(run, TARGETS), strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_the_machine_code_of_every_kernel_gives_the_same_bits_or_rounded_products(tried, target):
    rows = tried[target][: len(CASES)]
    assert [row["case"] for row in rows] == [case.name for case in CASES]
    assert {row["case"]: row["wrong"] for row in rows if row["wrong"]} == {}
    assert all(row["instructions"] for row in rows)


def test_what_is_unpacked_has_the_recorded_bits(tried):
    known = proof.recorded()
    for target, rows in tried.items():
        differing = {row["case"] for row in rows[: len(CASES)] if known[row["case"]][target] != row["digest"]}
        assert differing == set(), f"other bits than recorded on {target}: bench_amd.py --record writes them"


def test_plans_count_what_the_machine_code_takes_for_a_weight(tried):
    rows = tried[COUNTED][len(CASES) :]
    assert [row["wrong"] for row in rows] == [""] * len(rows)
    known = {kernel: of[COUNTED] for kernel, of in table()["counted"].items()}
    assert {row["kernel"]: row["a weight"] | {"source": "counted"} for row in rows} == known
