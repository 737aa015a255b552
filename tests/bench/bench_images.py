"""`make images` from nothing: no inputs, no lock, nothing in BuildKit's cache. Run by `make bench-images`.

Keeps what it printed for README. The state directory and the lock are its own; images
and build cache of the engine go first, and the images that it makes stay. The virtual environment and the
engine are there already.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from board import Board, tell

ROOT = Path(__file__).parents[2]
REFS = ("weir/cpu:latest", "weir/rocm:latest")
LIMIT_S = 300


def main() -> int:
    board = Board()
    for ref in REFS:
        subprocess.run(["docker", "image", "rm", "-f", ref], check=False, capture_output=True)
    subprocess.run(["docker", "builder", "prune", "-af"], check=True, capture_output=True)
    state = Path(tempfile.mkdtemp(dir=ROOT / ".weir", prefix="bench-images."))
    own = {"WEIR_STATE": str(state / "state"), "WEIR_LOCK": str(state / "lock.json")}
    try:
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "buildtool", "build"],
            env={**os.environ, **own},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begun
    finally:
        shutil.rmtree(state)
    tell(f"exit code {done.returncode}")
    board.bar("images from nothing", seconds, LIMIT_S, "s")
    board.bar("images from nothing: exit code", done.returncode, 0, "")
    # less the notes below the tables: they name this network's hosts
    tables = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    board.figure("printed", "\n".join(tables), "text")
    return board.finish()


sys.exit(main())
