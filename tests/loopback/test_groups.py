"""A group of tests that failed says so in its last lines, whatever a library prints as the process ends."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import atexit
import pytest

atexit.register(lambda: print("leaked function\\n" * 50, end="a line without an end"))

@pytest.mark.parametrize("number", range(12))
def test_of_a_number(number):
    assert number != 3
    assert number < 4

@pytest.fixture
def broken():
    raise ValueError

def test_that_needs_it(broken):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "tests/groups.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "test_made.py").write_text(TESTS)
    return tmp_path


def run(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Its exit code and the last ten lines of all that it wrote."""
    done = subprocess.run(
        [sys.executable, "tests/groups.py", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()[-10:]


def test_the_last_lines_name_the_failed_tests_and_their_group(folder: Path) -> None:
    code, lines = run(
        folder, "made-tests", "-p", "no:cacheprovider", "tests/test_made.py", "-k", "3 or needs"
    )
    assert code == 1
    assert lines[-3].startswith("made-tests  ")
    assert lines[-2:] == [
        "FAILED made-tests: tests/test_made.py::test_of_a_number[3]",
        "FAILED made-tests: tests/test_made.py::test_that_needs_it",
    ]


def test_the_end_of_all_groups_has_each_and_no_more_failures_than_a_reader_sees(folder: Path) -> None:
    run(folder, "made-tests", "-p", "no:cacheprovider", "tests/test_made.py")
    run(
        folder,
        "good-tests",
        "-p",
        "no:cacheprovider",
        "tests/test_made.py",
        "-k",
        "number and not 3 and (0 or 1 or 2) and not 10 and not 11",
    )
    run(folder, "no-tests", "-p", "no:cacheprovider", "tests/test_made.py", "-k", "nothing")
    code, lines = run(folder, "good-tests", "no-tests", "killed-tests", "made-tests", "--outcome")
    assert code == 1
    failed = [line for line in lines if line.startswith("FAILED made-tests: tests/test_made.py::")]
    assert len(failed) == 6
    assert lines[-1] == "and 4 more: see .weir/tests"
    _, lines = run(folder, "good-tests", "no-tests", "killed-tests", "--outcome")
    good, empty, killed = lines
    assert "3 tests in" in good
    assert good.endswith(": all passed")
    assert empty.endswith(": exit code 5, although no test failed")
    assert killed.endswith("  no results: it didn't run, or was killed")


def test_a_file_that_cannot_be_imported_is_named(folder: Path) -> None:
    (folder / "tests" / "test_made.py").write_text("import nothing_of_this_name")
    code, lines = run(folder, "made-tests", "-p", "no:cacheprovider", "tests/test_made.py")
    assert code == 2
    assert lines[-1] == "FAILED made-tests: tests/test_made.py"


def test_every_group_of_make_test_is_in_its_outcome() -> None:
    shown = subprocess.run(
        ["make", "-n", "all-of-it"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    ran = {line.split("tests/groups.py ")[1].split()[0] for line in shown.splitlines() if "groups.py" in line}
    text = (ROOT / "Makefile").read_text()
    outcome = next(line for line in text.splitlines() if "--outcome" in line)
    named = next(line for line in text.splitlines() if line.startswith("GROUPS :=")).split()[2:]
    assert "$(GROUPS)" in outcome
    assert {*named, "unit-probes", "unit-others"} == ran
