"""A group of tests that failed says so in its last lines, whatever a library prints as the process ends."""

import os
import re
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
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")  # else one above may be pytest's
    return tmp_path


def run(folder: Path, *words: str, last: int = 10, **environment: str) -> tuple[int, list[str]]:
    """Its exit code and the last lines of all that it wrote."""
    done = subprocess.run(
        [sys.executable, "tests/groups.py", *words],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()[-last:]


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


SAMPLED = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(40))
def test_one(number):
    pass

@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [*range(40), 400])
def test_another(number):
    pass

@pytest.mark.parametrize("number", [pytest.param(1), pytest.param(2, marks=pytest.mark.sampled(5))])
def test_few(number):
    pass
"""


def test_a_sample_is_the_same_for_the_same_cases_and_all_are_run_where_that_is_asked(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["sampled(n): drawn"]\n')
    (folder / "tests" / "test_made.py").write_text(SAMPLED)
    words = ("sampled-tests", "-p", "no:cacheprovider", "-vv", "tests/test_made.py")

    def cases(*more: str, **environment: str) -> dict[str, set[str]]:
        _, lines = run(folder, *words, *more, last=200, **environment)
        found: dict[str, set[str]] = {"one": set(), "another": set(), "few": set()}
        for line in lines:
            if ran := re.match(r"tests/test_made.py::test_(\w+)\[(\d+)\] PASSED", line):
                found[ran[1]].add(ran[2])
        return found

    drawn = cases()
    assert {name: len(ids) for name, ids in drawn.items()} == {"one": 3, "another": 3, "few": 2}
    assert len(drawn["one"] & drawn["another"]) >= 2, "a case more moves at most one other"
    assert {name: len(ids) for name, ids in cases(ALL_CASES="1").items()} == {
        "one": 40,
        "another": 41,
        "few": 2,
    }
    assert cases() == drawn
    left = str(next(number for number in range(40) if str(number) not in drawn["one"]))
    words = (*words[:-1], f"tests/test_made.py::test_one[{left}]")
    assert cases()["one"] == {left}


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
