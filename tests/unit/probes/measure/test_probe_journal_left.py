"""What other runs have left in a folder of reports: theirs while they live, swept or gone on with later."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from probe_samples import CPU_TORCH, done, report

from probes.core.errors import ReportError
from probes.core.unknown import Unknown
from probes.measure import journal
from probes.measure.journal import Entry, Past
from probes.records.rows import Gap, Measurement

BEGUN = replace(report(torch=CPU_TORCH), asked=("transfer",))
ONE, OTHER = Gap("h2d", 1, "one"), Gap("h2d", 2, "another")


def begun(path: Path) -> Path:
    with journal.open_journal(path) as book:
        book.begin(BEGUN)
    return path


def test_records_are_those_of_one_probe_and_one_round(tmp_path: Path) -> None:
    with journal.open_journal(tmp_path / "r.json") as book:
        book.begin(BEGUN)
        book.add("transfer", ONE)
        book.add("transfer", OTHER, 1)
        book.add("spill", OTHER)
    past = journal.read(tmp_path / "r.json")
    assert past == Past(BEGUN, (Entry("transfer", ONE), Entry("transfer", OTHER, 1), Entry("spill", OTHER)))
    assert past.records("transfer") == past.records("transfer", 0) == (ONE,)
    assert past.records("transfer", 1) == (OTHER,)


def test_a_journal_is_no_program_and_is_given_back(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    begun(tmp_path / "r.json")
    journal.sweep(tmp_path)
    assert stat.S_IMODE(journal.path_of(tmp_path / "r.json").stat().st_mode) & 0o111 == 0
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_figures_that_are_none_never_enter_a_journal(tmp_path: Path) -> None:
    nan = Measurement("x", 1, 1, 1, "wall", Unknown("none"), (float("nan"),))
    with journal.open_journal(tmp_path / "r.json") as book:
        with pytest.raises(ValueError, match="not JSON compliant"):
            book.begin(replace(BEGUN, runs=(done("transfer", nan),)))
        with pytest.raises(ValueError, match="not JSON compliant"):
            book.add("transfer", nan)
    assert journal.path_of(tmp_path / "r.json").read_text() == ""


def test_a_live_run_hides_no_dead_one_behind_it(tmp_path: Path) -> None:
    dead = begun(tmp_path / "b.json")
    with journal.open_journal(tmp_path / "a.json") as book:
        book.begin(BEGUN)
        assert journal.sweep(tmp_path) == (dead,)
    (tmp_path / "c.json.journal").write_text("torn")
    assert journal.sweep(tmp_path) == (tmp_path / "a.json", dead)
    assert not (tmp_path / "c.json.journal").exists()


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a link to nothing", "a link to a journal"])
def test_what_only_has_a_journal_s_name_stops_no_run_and_is_left_alone(kind: str, tmp_path: Path) -> None:
    dead = begun(tmp_path / "b.json")
    odd = tmp_path / "a.json.journal"
    match kind:
        case "a directory":
            odd.mkdir()
        case "a pipe":
            os.mkfifo(odd)
        case "a link to nothing":
            odd.symlink_to("nothing")
        case _:
            odd.symlink_to("b.json.journal")
    assert journal.sweep(tmp_path) == (dead,)
    assert odd.lstat()


def test_a_journal_of_the_first_line_alone_has_no_records(tmp_path: Path) -> None:
    assert journal.read(begun(tmp_path / "r.json")) == Past(BEGUN, ())


def test_a_journal_without_a_line_is_begun_again(tmp_path: Path) -> None:
    journal.path_of(tmp_path / "r.json").write_text('{"half a line')
    assert journal.read(tmp_path / "r.json") is None
    begun(tmp_path / "r.json")
    assert journal.read(tmp_path / "r.json") == Past(BEGUN, ())


def test_other_files_of_the_folder_are_no_journals(tmp_path: Path) -> None:
    for name in ("notes.journal", "r.json", "r.json.journal.old"):
        (tmp_path / name).write_text("a line\n")
    assert journal.sweep(tmp_path) == ()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_line_of_another_form_is_named_with_the_place_that_does_not_fit(tmp_path: Path) -> None:
    file = journal.path_of(begun(tmp_path / "r.json"))
    file.write_text(file.read_text() + '{"probe": 5}\n')
    with pytest.raises(ReportError, match=r"r\.json\.journal is broken: line 2"):
        journal.read(tmp_path / "r.json")
