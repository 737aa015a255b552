"""Runs a script that emulates kernels in a process of its own, in which Triton doesn't interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def lines(script: Path, *words: str, **environment: str) -> list[dict]:
    """Its lines of JSON. Raises RuntimeError with the end of what it wrote where it fails."""
    settled = {
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{_HERE.parents[2]}{os.pathsep}{_HERE}",
    }
    done = subprocess.run(
        [sys.executable, str(script), *words],
        env={**os.environ, **settled, **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} {' '.join(words)}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
