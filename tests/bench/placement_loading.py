"""What loading takes on the host, tier by tier: the peak of a fresh process against what the tiers keep."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from board import Board

from probes.placement.types import LOADING_BYTES

CHILD = Path(__file__).parents[1] / "torch" / "loading_child.py"
MIB = 1 << 20
EMBEDDING, LAYER, LAYERS = 128 * MIB, 8 * MIB, 8  # of the child's model
PACKED = 3 * LAYER // 4
TABLE = 3 * EMBEDDING // 4 + 16 * MIB  # the embedding packed, and room for the piece that a product unpacks
SLACK = 8 * MIB  # of Python, its threads, and code that is loaded at first use
# without a GPU slots and scratch buffers are host memory, too
KEPT = {
    "resident": EMBEDDING + LAYERS * LAYER,
    "streamed": EMBEDDING + (LAYERS + 2) * LAYER,
    "disk": EMBEDDING + (3 + 2) * LAYER,
    "packed": TABLE + LAYERS * PACKED + 3 * LAYER + LOADING_BYTES,
    "streamed_packed": TABLE + (LAYERS + 2) * PACKED + 2 * LAYER + LOADING_BYTES,
}


def bars(board: Board) -> None:
    """A bar for each tier: a model of 192 MiB, all of it on the host, loaded twice, then from the cache."""
    sys.path.append(str(CHILD.parent))
    import loading_child

    sums = set()
    for tier, kept in KEPT.items():
        with tempfile.TemporaryDirectory(prefix="weir-bench-") as name:
            folder = Path(name)
            whole = loading_child.save(folder)
            for load in ("first", "second"):
                found = _child(folder, tier)
                sums.add(found["sum"])
                grown = found["peak"] - found["base"]
                board.bar(
                    f"loading, {tier}, {load} load: peak host memory over what the tier keeps",
                    grown / (kept + SLACK),
                    1.0,
                    "x",
                    grown_bytes=grown,
                    model_bytes=whole,
                    seconds=round(found["seconds"], 2),
                )
    board.bar("loading: different results among the tiers", len(sums) - 1, 0, "results")


def _child(folder: Path, tier: str) -> dict[str, float]:
    path = os.pathsep.join((str(CHILD.parent), str(CHILD.parents[2])))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder), tier],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
