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
EMBEDDING = 256 * MIB  # of 352: whatever holds it as a whole beside its place is noticed
PACKED_EMBEDDING = EMBEDDING * 3 // 4 + 16 * MIB  # a table, with room for the piece that a product unpacks
SLACK = 8 * MIB  # of Python's allocator, threads and code that is loaded at first use


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoint")
    loading_child.save(made)
    return made


def child(*words):
    path = os.pathsep.join((str(CHILD.parent), str(CHILD.parents[2])))
    done = subprocess.run(
        [sys.executable, str(CHILD), *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("tier", "kept"),
    [
        ("resident", EMBEDDING + 12 * LAYER),
        ("streamed", EMBEDDING + 12 * LAYER + 2 * LAYER),  # and two slots, which are host memory on the CPU
        ("disk", EMBEDDING + 3 * LAYER + 2 * LAYER),  # three buffers that files are read into, and the slots
        # packed tensors are never in host memory outside their places, and unpacked ones nowhere
        ("packed", PACKED_EMBEDDING + 9 * LAYER + 3 * LAYER),
        ("packed uncached", PACKED_EMBEDDING + 9 * LAYER + 3 * LAYER),
        ("streamed_packed", PACKED_EMBEDDING + 9 * LAYER + 4 * LAYER),
    ],
)
def test_loading_takes_what_the_tiers_keep_and_64_mib(folder, tier, kept):
    for _ in range(2 if tier == "packed" else 1):  # packed, then read from the cache, as by the last tier
        found = child(folder, *tier.split())
        assert found["peak"] - found["base"] <= kept + LOADING_BYTES * ("packed" in tier) + SLACK


def test_tensors_of_another_order_in_memory_take_no_more_than_others(tmp_path):
    """Weights in channels_last were read as a whole beside their place: 40 MiB of three."""
    loading_child.save_convolutions(tmp_path)
    plain, moved = (child(tmp_path, "in_place", order) for order in ("contiguous", "channels_last"))
    assert moved["grown"] <= plain["grown"] + SLACK
