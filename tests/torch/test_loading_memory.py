"""Loading takes no more host memory than what the tiers keep, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import loading_child
import pytest

from probes.placement.types import LOADING_BYTES

CHILD = Path(loading_child.__file__)
MIB = 1 << 20
LAYER = 8 * MIB
LAYERS = loading_child.LAYERS * LAYER
EMBEDDING = loading_child.ROWS * LAYER  # whatever holds it as a whole beside its place is noticed
PACKED_EMBEDDING = EMBEDDING * 3 // 4 + 16 * MIB  # a table, with room for the piece that a product unpacks
SLACK = 8 * MIB  # of Python's allocator, threads and code that is loaded at first use


def peaks(folder, *cases):
    """What each case took, in a process of its own."""
    path = os.pathsep.join((str(CHILD.parent), str(CHILD.parents[2])))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder), *cases],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


KEPT = {
    "resident": EMBEDDING + LAYERS,
    "streamed": EMBEDDING + LAYERS + 2 * LAYER,  # and two slots, which are host memory on the CPU
    "disk": EMBEDDING + 3 * LAYER + 2 * LAYER,  # three buffers that files are read into, and the slots
    # packed tensors are never in host memory outside their places, and unpacked ones nowhere
    "packed,uncached": PACKED_EMBEDDING + LAYERS * 3 // 4 + 3 * LAYER,
    "packed": PACKED_EMBEDDING + LAYERS * 3 // 4 + 3 * LAYER,
    # read from the cache that `packed` wrote
    "streamed_packed": PACKED_EMBEDDING + LAYERS * 3 // 4 + 4 * LAYER,
}


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    loading_child.save(folder)
    return peaks(folder, *KEPT)


@pytest.mark.parametrize("case", KEPT)
def test_loading_takes_what_the_tiers_keep_and_64_mib(taken, case):
    found = taken[case]
    assert found["peak"] - found["base"] <= KEPT[case] + LOADING_BYTES * ("packed" in case) + SLACK


def test_tensors_of_another_order_in_memory_take_no_more_than_others(tmp_path):
    """Weights in channels_last were read as a whole beside their place, each as large as twice the slack."""
    loading_child.save_convolutions(tmp_path)
    plain, moved = peaks(tmp_path, "in_place,contiguous", "in_place,channels_last").values()
    assert moved["grown"] <= plain["grown"] + SLACK
