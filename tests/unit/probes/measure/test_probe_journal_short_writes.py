"""A journal on a disk that fills up: the line that didn't fit is reported, and costs no other line."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from probe_samples import CPU_TORCH, report

from probes.core.errors import DeviceBusy, ReportError
from probes.measure import journal
from probes.records.rows import Gap

BEGUN = replace(report(torch=CPU_TORCH), asked=("transfer",))
FIRST, SECOND = Gap("h2d", 1, "the first"), Gap("h2d", 2, "the second")
WRITE = os.write


def test_a_line_that_was_written_in_part_is_an_error_and_the_next_run_cuts_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    with journal.open_journal(path) as book:
        book.begin(BEGUN)
        book.add("transfer", FIRST)
        monkeypatch.setattr(os, "write", lambda descriptor, data: WRITE(descriptor, data[: len(data) // 2]))
        with pytest.raises(ReportError, match=os.strerror(errno.ENOSPC)) as caught:
            book.add("transfer", SECOND)
    assert str(journal.path_of(path)) in caught.value.message
    assert "--resume" in str(caught.value.hint)
    monkeypatch.undo()
    past = journal.read(path)
    assert past is not None
    assert past.records("transfer") == (FIRST,)
    with journal.open_journal(path) as book:
        book.add("transfer", SECOND)
    again = journal.read(path)
    assert again is not None
    assert again.records("transfer") == (FIRST, SECOND)


def test_every_line_is_with_the_disk_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real(descriptor))[1])
    with journal.open_journal(tmp_path / "r.json") as book:
        synced.clear()
        book.begin(BEGUN)
        book.add("transfer", FIRST)
    assert len(synced) == 2


def test_a_disk_that_fails_to_sync_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with journal.open_journal(tmp_path / "r.json") as book:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(ReportError, match=os.strerror(errno.EIO)):
            book.begin(BEGUN)


def test_a_journal_that_is_done_is_removed_and_removing_it_twice_is_no_error(tmp_path: Path) -> None:
    with journal.open_journal(tmp_path / "r.json") as book:
        book.begin(BEGUN)
        book.remove()
        book.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_journal_s_path_and_its_report_s_path_lead_to_each_other(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert journal.path_of(path) == tmp_path / "r.json.journal"
    assert journal.path_of(journal.path_of(path)) == journal.path_of(path)
    assert journal.report_of(journal.path_of(path)) == path
    assert journal.report_of(path) == path


def test_a_folder_that_can_t_be_written_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ReportError, match="can't write") as caught,
        journal.open_journal(tmp_path / "file" / "r.json"),
    ):
        pass
    assert "--out" in str(caught.value.hint)


def test_folders_are_made_for_a_journal(tmp_path: Path) -> None:
    with journal.open_journal(tmp_path / "a" / "b" / "r.json"):
        assert (tmp_path / "a" / "b" / "r.json.journal").exists()


def test_a_journal_that_can_t_be_read_is_named(tmp_path: Path) -> None:
    journal.path_of(tmp_path / "r.json").mkdir()
    with pytest.raises(ReportError, match="can't read"):
        journal.read(tmp_path / "r.json")


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_broken_line_is_named_by_its_number(tmp_path: Path, broken: int) -> None:
    path = tmp_path / "r.json"
    with journal.open_journal(path) as book:
        book.begin(BEGUN)
        book.add("transfer", FIRST)
        book.add("transfer", SECOND)
    file = journal.path_of(path)
    lines = file.read_text().splitlines()
    lines[broken] = "{}"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ReportError, match=f"line {broken + 1}"):
        journal.read(path)


def test_the_lock_is_gone_when_the_run_ends_and_held_until_then(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with journal.open_journal(path) as book:
        book.begin(BEGUN)
        with pytest.raises(DeviceBusy), journal.open_journal(path):
            pass
        assert journal.sweep(tmp_path) == ()
    assert journal.sweep(tmp_path) == (path,)
    with journal.open_journal(path):
        pass


def test_unfinished_runs_are_named_oldest_first(tmp_path: Path) -> None:
    for name in ("20260102T000000Z.json", "20260101T000000Z.json", "20260103T000000Z.json"):
        with journal.open_journal(tmp_path / name) as book:
            book.begin(BEGUN)
    assert [found.name[:8] for found in journal.sweep(tmp_path)] == ["20260101", "20260102", "20260103"]
