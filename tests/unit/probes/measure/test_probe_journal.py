import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_samples import CPU_TORCH, CUDA_TORCH, report

from probes.cli import program
from probes.core import files
from probes.core.errors import DeviceBusy, Exit, ReportError
from probes.core.unknown import Unknown
from probes.measure import journal, probe_worker, session, supervisor, this_machine
from probes.measure.probe_worker import DESCRIBE, Job
from probes.records.rounds import FULL_ROUNDS, merged
from probes.records.rows import Measurement, Stop
from probes.records.schema import Done, Failed, ProbeReport, read_report

BEGUN = replace(report(torch=CPU_TORCH), asked=("transfer",))


def row(size: int) -> Measurement:
    return Measurement("h2h_copy", size, size, 1, "wall", Unknown("none"), (0.5, 0.5))


def written(path: Path, *records: Measurement) -> Path:
    with journal.open_journal(path) as book:
        book.begin(BEGUN)
        for record in records:
            book.add("transfer", record)
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    past = journal.read(written(tmp_path / "r.json", row(1), row(2)))
    assert past is not None
    assert past.begun == BEGUN
    assert past.records("transfer") == (row(1), row(2))
    assert past.records("spill") == ()


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)  # each writes files
@given(data=st.data())
def test_wherever_it_is_cut_only_the_torn_line_is_lost(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("j") / "r.json", *map(row, range(5)))
    file = journal.path_of(path)
    whole = file.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    file.write_bytes(whole[:cut])
    past = journal.read(path)
    lines = whole[:cut].count(b"\n")
    assert (past is None) == (lines == 0)
    assert past is None or len(past.entries) == lines - 1
    with journal.open_journal(path) as book:  # going on writes whole lines again
        book.add("transfer", row(77)) if lines else book.begin(BEGUN)
    again = journal.read(path)
    assert again is not None
    assert len(again.entries) == lines


def test_a_broken_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path / "r.json", row(1), row(2))
    file = journal.path_of(path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + "{}\n" + lines[2])
    with pytest.raises(ReportError, match="is broken"):
        journal.read(path)


def test_a_link_planted_in_the_journals_place_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious, without a line break")
    journal.path_of(tmp_path / "r.json").symlink_to("victim")
    with pytest.raises(ReportError, match="can't write"), journal.open_journal(tmp_path / "r.json"):
        raise AssertionError("it was opened")
    assert (tmp_path / "victim").read_text() == "precious, without a line break"


def test_without_a_journal_there_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has no journal"):
        journal.read(tmp_path / "r.json")


def test_a_live_run_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with journal.open_journal(path) as book, files.replacing(path) as half_written:
        book.begin(BEGUN)
        assert journal.sweep(tmp_path) == ()
        assert half_written.exists()
        with pytest.raises(DeviceBusy, match="still alive"):
            journal.open_journal(path).__enter__()


def test_what_the_dead_left_is_swept_and_what_can_go_on_is_named(tmp_path: Path) -> None:
    written(tmp_path / "a.json", row(1))
    journal.path_of(tmp_path / "b.json").write_text("")  # killed before its first line
    (tmp_path / ".weir-0123456789abcdef.partial").write_text("half")
    assert journal.sweep(tmp_path) == (tmp_path / "a.json",)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json.journal"]


Play = Callable[[Job, Callable[[object], None]], supervisor.JobResult]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], list[Job]]:
    """Replace worker processes by a function that sends records; returns the list of jobs."""

    def install(play: Play) -> list[Job]:
        seen: list[Job] = []

        def run(
            job: Job,
            *,
            limit_s: float,
            on_record: Callable[[object], None],
            worker: object = None,
            command: object = None,
        ) -> supervisor.JobResult:
            if job.probe == DESCRIBE:
                return supervisor.JobResult(Done(), (CPU_TORCH,), 0.1)
            seen.append(job)
            return play(job, on_record)

        monkeypatch.setattr(probe_worker, "run_job", run)
        monkeypatch.setattr(session, "workers_ahead", lambda *_: 0)
        return seen

    return install


def tells(*sizes: int, then: type[BaseException] | None = None) -> Play:
    def play(job: Job, on_record: Callable[[object], None]) -> supervisor.JobResult:
        found = tuple(row(size) for size in sizes if row(size).case not in job.done)
        for record in found:
            on_record(record)
        if then:
            raise then
        return supervisor.JobResult(Done(), found, 0.1)

    return play


class PowerCut(BaseException):
    """What ends a program without letting it tidy up."""


def only_report(folder: Path) -> ProbeReport:
    (path,) = folder.glob("*.json")
    return read_report(path)


def cut_short(folder: Path, workers: Callable[[Play], list[Job]]) -> Path:
    """A run of `transfer` that measured two sizes."""
    workers(tells(1, 2, then=PowerCut))
    with pytest.raises(PowerCut):
        program.main(["run", "transfer", "--seed", "9", "--out", str(folder)])
    (path,) = folder.glob("*.json")
    return path


def test_a_run_goes_on_where_the_power_was_cut(tmp_path: Path, workers: Callable[[Play], list[Job]]) -> None:
    path = cut_short(tmp_path, workers)
    assert read_report(path).runs == ()
    seen = workers(tells(1, 2, 3, 4))
    assert program.main(["run", "--resume", str(path)]) == Exit.OK
    assert [job.done for job in seen] == [(row(1).case, row(2).case), (), ()]
    assert [job.settings.seed for job in seen] == [9, 10, 11]  # another order in each round
    found = read_report(path)
    assert [run.round for run in found.runs] == [0, 1, 2]
    assert all(run.records == (row(1), row(2), row(3), row(4)) for run in found.runs)
    assert (found.resumed, found.asked) == (1, ("transfer",))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_run_goes_on_in_the_round_in_which_it_was_cut(
    tmp_path: Path, workers: Callable[[Play], list[Job]]
) -> None:
    """What earlier rounds measured is kept; of the round that was cut only what is missing is measured."""
    jobs: list[Job] = []

    def play(job: Job, on_record: Callable[[object], None]) -> supervisor.JobResult:
        jobs.append(job)
        return tells(1, 2, then=PowerCut if len(jobs) == 2 else None)(job, on_record)

    workers(play)
    with pytest.raises(PowerCut):
        program.main(["run", "transfer", "--seed", "9", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    seen = workers(tells(1, 2, 3))
    assert program.main(["run", "--resume", str(path)]) == Exit.OK
    assert [(job.done, job.settings.seed) for job in seen] == [((row(1).case, row(2).case), 10), ((), 11)]
    found = read_report(path)
    assert [len(run.records) for run in found.runs] == [2, 3, 3]
    assert [len(record.times_s) for record in merged(found).runs[0].records] == [3, 3, 2]


def test_a_run_of_an_older_version_is_not_gone_on_with(
    tmp_path: Path, workers: Callable[[Play], list[Job]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = cut_short(tmp_path, workers)
    file = journal.path_of(path)
    file.write_text(file.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    assert program.main(["run", "--resume", str(path)]) == Exit.DATA
    assert "begun by another version" in capsys.readouterr().err


def test_a_probe_that_failed_or_was_waived_is_not_tried_again_in_later_rounds(
    tmp_path: Path, workers: Callable[[Play], list[Job]]
) -> None:
    broken = Failed("it broke", "", int(Exit.BROKEN), wedged=False)
    seen = workers(lambda _job, _heard: supervisor.JobResult(broken, (), 0.1))
    assert program.main(["run", "transfer", "--out", str(tmp_path)]) == Exit.BROKEN
    assert len(seen) == 1


def test_a_journal_can_be_named_itself(tmp_path: Path, workers: Callable[[Play], list[Job]]) -> None:
    path = cut_short(tmp_path, workers)
    workers(tells(3))
    assert program.main(["run", "--resume", str(journal.path_of(path))]) == Exit.OK


def test_a_new_run_names_the_unfinished_one(
    tmp_path: Path, workers: Callable[[Play], list[Job]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = cut_short(tmp_path, workers)
    workers(tells(1))
    assert program.main(["run", "transfer", "--out", str(tmp_path)]) == Exit.OK
    assert f"run --resume {path}" in capsys.readouterr().out


def test_a_finished_run_leaves_the_report_alone(tmp_path: Path, workers: Callable[[Play], list[Job]]) -> None:
    workers(tells(1))
    program.main(["run", "transfer", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".json"
    assert program.main(["run", "--resume", str(path)]) == Exit.DATA


def test_parts_of_a_whole_are_measured_again(tmp_path: Path, workers: Callable[[Play], list[Job]]) -> None:
    """A Stop alone means nothing: the probe that sent it starts over."""

    def play(job: Job, on_record: Callable[[object], None]) -> supervisor.JobResult:
        on_record(Stop("floor", 0, "a test"))
        raise PowerCut

    workers(play)
    with pytest.raises(PowerCut):
        program.main(["run", "transfer", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    seen = workers(tells(1))
    assert program.main(["run", "--resume", str(path)]) == Exit.OK
    assert seen[0].done == ()
    assert {run.records for run in only_report(tmp_path).runs} == {(row(1),)}


def test_another_machine_is_refused(
    tmp_path: Path, workers: Callable[[Play], list[Job]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = cut_short(tmp_path, workers)
    file = journal.path_of(path)
    file.write_text(file.read_text().replace('"threads": 2', '"threads": 2').replace("2.6.0", "2.7.1"))
    assert program.main(["run", "--resume", str(path)]) == Exit.DATA
    assert "begun with torch 2.7.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "change"), [("host", {"host": "b"}), ("CPUs", {"cpus": 64}), ("torch", {"torch": CUDA_TORCH})]
)
def test_what_differs_is_named(what: str, change: dict[str, object]) -> None:
    here = BEGUN.machine
    this_machine.refuse_other_machine(here, here)
    with pytest.raises(ReportError, match=f"begun with {what}"):
        this_machine.refuse_other_machine(here, replace(here, **change))  # type: ignore[arg-type]


def test_resume_takes_no_other_wishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["run", "--quick", "--resume", str(tmp_path / "r.json")]) == Exit.USAGE
    assert "own settings" in capsys.readouterr().err


def test_an_interrupted_probe_goes_on_too(tmp_path: Path, workers: Callable[[Play], list[Job]]) -> None:
    def play(job: Job, on_record: Callable[[object], None]) -> supervisor.JobResult:
        on_record(row(1))
        return supervisor.JobResult(
            Failed("interrupted", "", int(Exit.INTERRUPTED), wedged=False), (row(1),), 0.1
        )

    workers(play)
    assert program.main(["run", "transfer", "--out", str(tmp_path)]) == Exit.INTERRUPTED
    (path,) = tmp_path.glob("*.json")
    workers(tells(1, 2))
    assert program.main(["run", "--resume", str(path)]) == Exit.OK
    ended = [(type(run.outcome), len(run.records)) for run in only_report(tmp_path).runs]
    assert ended == [(Done, 2)] * FULL_ROUNDS


@pytest.mark.thorough
def test_what_only_has_a_journals_name_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe without a writer was waited for, a device read until memory ran out."""
    os.mkfifo(tmp_path / "pipe.json.journal")
    (tmp_path / "folder.json.journal").mkdir()
    (tmp_path / "link.json.journal").symlink_to("/dev/zero")
    with (tmp_path / "long.json.journal").open("wb") as file:
        file.truncate(journal.MOST_BYTES + 1)
    for name in ("pipe", "folder", "link", "long"):
        assert program.main(["run", "--resume", str(tmp_path / f"{name}.json")]) == Exit.DATA
        assert f"can't read {tmp_path}/{name}.json.journal: " in capsys.readouterr().err
