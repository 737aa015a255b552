"""Real workers of the probes, started from directories with names that Python would take for modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["json.py", "probes/__init__.py"])
def test_a_worker_imports_nothing_from_the_current_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('a module of the user')")
    found = subprocess.run(
        [sys.executable, "-P", "-m", "probes", "machine"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "the worker exited" not in found.stdout
