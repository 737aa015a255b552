"""The machine code that Triton makes of the kernels for AMD's GPUs gives the right bits, run step by step.

All cases on all targets are `make bench-amd`; here are one of each kernel and target.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TARGETS = ("gfx1100", "gfx90a", "gfx942")
KERNELS = 9


def _run(target: str, folder: Path) -> list[dict]:
    settled = {
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": str(HERE.parents[1]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "amd_child.py"), target, "1/20"],
        env={**os.environ, **settled},
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(TARGETS, pool.map(lambda target: _run(target, folder / target), TARGETS), strict=True)
        )


@pytest.mark.parametrize("target", TARGETS)
def test_the_machine_code_of_every_kernel_gives_the_same_bits_or_rounded_products(tried, target):
    rows = tried[target]
    assert len({row["kernel"] for row in rows}) >= KERNELS - 1
    assert {row["case"]: row["wrong"] for row in rows if row["wrong"]} == {}


def test_what_is_unpacked_has_the_recorded_bits(tried):
    from probes.placement.packing import proof

    known = proof.recorded()
    for target, rows in tried.items():
        differing = {row["case"] for row in rows if known[row["case"]][target] != row["digest"]}
        assert differing == set(), f"other bits than recorded on {target}: bench_amd.py --record writes them"
