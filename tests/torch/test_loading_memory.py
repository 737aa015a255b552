"""Loading takes no more host memory than what the tiers keep, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import loading_child
import pytest

CHILD = Path(loading_child.__file__)
MIB = 1 << 20
LAYER = 8 * MIB
EMBEDDING = 32 * MIB
SLACK = 8 * MIB  # of Python's allocator, threads and code that is loaded at first use
PACKING = 112 * MIB  # temporaries of torch's operations, whatever the tensor's size


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoint")
    loading_child.save(made)
    return made


@pytest.mark.parametrize(
    ("tier", "kept"),
    [
        ("resident", EMBEDDING + 12 * LAYER),
        ("streamed", EMBEDDING + 12 * LAYER + 2 * LAYER),  # and two slots, which are host memory on the CPU
        ("disk", EMBEDDING + 3 * LAYER + 2 * LAYER),  # three buffers that files are read into, and the slots
        # packed tensors aren't held in host memory until VRAM for all of them is allocated
        ("packed", EMBEDDING + 9 * LAYER + 3 * LAYER + PACKING),
        ("streamed_packed", EMBEDDING + 9 * LAYER + 4 * LAYER + PACKING),
    ],
)
def test_loading_takes_what_the_tiers_keep(folder, tier, kept):
    path = os.pathsep.join((str(CHILD.parent), str(CHILD.parents[2])))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder), tier],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] - found["base"] <= kept + SLACK
