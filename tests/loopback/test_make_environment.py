"""The environment that `make` installs into: whole or not at all, once, by the Python that was asked for."""

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# a Python that makes environments with itself inside, installs slowly, and can hang and fail:
# with everything, or with what the file `fails` names
STANDIN = """#!/bin/bash
case "$*" in
  -V) echo "Python {version}" ;;
  "-m venv "*)
    folder="${{@: -1}}"
    [[ "$*" != *--clear* ]] || find "$folder" -mindepth 1 -delete
    mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && echo "venv {version}" >> log ;;
  "-m pip "*)
    echo "begin ${{@: -1}}" >> log; sleep 0.1; while grep -qsxF -- "${{@: -1}}" hangs; do sleep 0.05; done
    if [ -e fails ] && {{ [ ! -s fails ] || grep -qxF -- "${{@: -1}}" fails; }}; then exit 1; fi
    echo "end ${{@: -1}}" >> log ;;
  *) echo "ran {version}" >> log ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A checkout with our Makefile, in a folder whose name has a space, and stand-ins for Python."""

    folder: Path

    def start(self, *words: str, goals: tuple[str, ...] = ("types",)) -> "subprocess.Popen[bytes]":
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        path = f"{self.folder / 'programs'}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["make", *goals, *words], cwd=self.folder, env=kept | {"PATH": path}, start_new_session=True
        )

    def make(self, *words: str) -> int:
        return self.start(*words).wait()

    @property
    def log(self) -> list[str]:
        """What the stand-ins did since this was asked last."""
        file = self.folder / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "a b"
    (folder / "programs").mkdir(parents=True)
    for name, version in (("python3", "3.11.7"), ("python3.12", "3.12.1")):
        program = folder / "programs" / name
        program.write_text(STANDIN.format(version=version))
        program.chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return Checkout(folder)


OURS = ["begin .[dev,docs]", "end .[dev,docs]"]
NEW_PIP = ["begin pip>=26", "end pip>=26"]
ONCE = ["venv 3.11.7", *NEW_PIP, *OURS]


def test_two_makes_at_once_install_once(checkout: Checkout) -> None:
    both = [checkout.start(), checkout.start()]
    assert [process.wait() for process in both] == [0, 0]
    assert checkout.log == [*ONCE, "ran 3.11.7", "ran 3.11.7"]
    assert checkout.make() == 0
    assert checkout.log == ["ran 3.11.7"]


def test_an_install_that_was_cut_short_is_done_again(checkout: Checkout) -> None:
    (checkout.folder / "fails").touch()
    assert checkout.make() != 0
    (checkout.folder / "fails").unlink()
    (checkout.folder / "hangs").write_text(".[dev,docs]\n")
    process = checkout.start()
    while not (checkout.folder / "log").exists() or "begin" not in (checkout.folder / "log").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert "ran 3.11.7" not in checkout.log
    (checkout.folder / "hangs").unlink()
    assert checkout.make() == 0
    assert checkout.log == [*ONCE, "ran 3.11.7"]


def test_no_mark_of_before_vouches_for_what_another_install_left_half_done(checkout: Checkout) -> None:
    assert checkout.make() == 0
    wanted = checkout.folder / "pyproject.toml"
    before = wanted.read_text()
    wanted.write_text(f"{before}# other dependencies\n")
    (checkout.folder / "fails").touch()
    assert checkout.make() != 0
    (checkout.folder / "fails").unlink()
    wanted.write_text(before)
    assert checkout.log[-3:] == ["venv 3.11.7", NEW_PIP[0], OURS[0]]
    assert checkout.make() == 0
    assert checkout.log == [*ONCE, "ran 3.11.7"]


def test_where_there_is_no_newer_pip_the_one_of_python_installs(checkout: Checkout) -> None:
    (checkout.folder / "fails").write_text("pip>=26\n")
    assert checkout.make() == 0
    assert checkout.log == ["venv 3.11.7", NEW_PIP[0], *OURS, "ran 3.11.7"]


def test_another_python_that_was_asked_for_makes_the_environment_from_nothing(checkout: Checkout) -> None:
    assert checkout.make() == 0
    left = checkout.folder / ".venv/left.py"
    left.touch()
    assert checkout.make("PYTHON=python3") == 0
    assert left.exists(), "the same Python: what is installed stays"
    for _ in range(2):
        assert checkout.make("PYTHON=python3.12") == 0
    assert not left.exists()
    assert checkout.log[-7:] == ["venv 3.12.1", *NEW_PIP, *OURS, "ran 3.12.1", "ran 3.12.1"]


def test_an_environment_whose_python_is_gone_is_made_again(checkout: Checkout) -> None:
    assert checkout.make() == 0
    (checkout.folder / ".venv/bin/python").unlink()
    (checkout.folder / ".venv/bin/python").symlink_to("/nowhere/python3.10")
    assert checkout.log
    assert checkout.make() == 0
    assert checkout.log == [*ONCE, "ran 3.11.7"]


def test_torch_is_installed_beside_ours_and_our_package_is_built_for_one_environment_at_a_time(
    checkout: Checkout,
) -> None:
    (checkout.folder / "hangs").write_text(".[dev,docs]\n")
    process = checkout.start("-j", "2", goals=("types", "packing-tests"))
    file = checkout.folder / "log"
    while not file.exists() or "end torch==" not in file.read_text() or OURS[0] not in file.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)  # for a build that has to wait
    assert "begin .[torch-tests]" not in file.read_text()
    (checkout.folder / "hangs").unlink()
    assert process.wait() == 0
    log = checkout.log
    assert log.index(OURS[1]) < log.index("begin .[torch-tests]")
    assert log.count("ran 3.11.7") == 2
