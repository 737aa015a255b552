"""Real workers of the probes, started from directories with names that Python would take for modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from buildtool.builder import wheels

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
        timeout=300,
        check=True,
    )
    assert "the worker exited" not in found.stdout


def test_pip_is_not_taken_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('a module of the user')")
    monkeypatch.chdir(tmp_path)
    assert "PIP_CONFIG_FILE" in wheels._connection_settings()


@pytest.mark.parametrize("program", ["buildtool.cli", "probes.__main__"])
def test_little_is_imported_before_an_interrupt_is_a_message(program: str) -> None:
    count = "import sys; before = set(sys.modules); import {}; print(*set(sys.modules) - before)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", count.format(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert not {"importlib.metadata", "zipfile"} & set(found.stdout.split())
