"""A scan from command line to report, with workers that are played; its text, ends and exit codes."""

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import made_scans as make
import pytest

from probes.cli import program, throughput
from probes.core.errors import Exit
from probes.core.unknown import Unknown
from probes.hardware import host
from probes.measure.supervisor import JobResult
from probes.records.facts import TorchFacts
from probes.records.schema import Done, Failed
from probes.reports.kinds import THROUGHPUT
from probes.throughput.direct import scan, worker
from probes.throughput.direct.results import DirectScan, Series, Way
from probes.throughput.direct.scan import powers, ways
from probes.throughput.direct.trials import SeriesEnd
from probes.throughput.report import named_scan

TORCH = TorchFacts("2.13", "none", "", 2, (), "this torch is a CPU build")
CPU = replace(make.machine(), torch=TORCH)
ROWS = make.direct().series[0].rows
Play = Callable[[worker.ScanJob], JobResult[worker.Message]]


def good(job: worker.ScanJob) -> JobResult[worker.Message]:
    if job.way is None:
        return JobResult(Done(), (make.ceilings(),), 0.1)
    facts = make.direct().model
    assert not isinstance(facts, Unknown)
    return JobResult(Done(), (facts, *ROWS, SeriesEnd("finished")), 0.1)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], None]:
    """Replaces the machine and the workers."""

    def replace_with(play: Play) -> None:
        def oversee(
            job: worker.ScanJob, parse: object, **how: Callable[[object], None]
        ) -> JobResult[worker.Message]:
            ended = play(job)
            for record in ended.records:
                how["on_record"](record)
            return ended

        monkeypatch.setattr(scan.this_machine, "describe", lambda: CPU)
        monkeypatch.setattr(scan.supervisor, "run_job", oversee)
        monkeypatch.setattr(scan, "direct", partial(scan.direct, oversee=oversee))

    return replace_with


def run(words: str, folder: Path) -> int:
    return program.main(["throughput", "--out", str(folder), *shlex.split(words)])


def only(folder: Path) -> scan.ThroughputReport:
    (file,) = folder.glob("*.json")
    return named_scan(file)[0]


def test_a_scan_prints_its_answer_and_keeps_every_trial(played, tmp_path, capsys) -> None:
    played(good)
    assert run("--backend pytorch --precision fp32", tmp_path) == Exit.OK
    said = capsys.readouterr().out
    assert "The answer\n- Is the CPU saturated? " in said
    assert "hardly more than from batch 4 on" in said
    assert "compute binds" in said
    report = only(tmp_path)
    assert report.direct is not None
    assert report.direct.series[0].rows == ROWS
    assert report.ceilings == make.ceilings()
    (file,) = tmp_path.glob("*.json")
    assert program.main(["show", str(file)]) == Exit.OK
    assert capsys.readouterr().out.strip() in said


def test_a_backend_that_is_missing_is_unknown_with_what_to_install(played, tmp_path, capsys) -> None:
    def play(job: worker.ScanJob) -> JobResult[worker.Message]:
        if job.way and job.way.backend == "onnxruntime":
            return JobResult(Done(), (SeriesEnd("absent", "no onnxruntime", "pip install onnxruntime"),), 0.1)
        return good(job)

    played(play)
    assert run("--precision fp32", tmp_path) == Exit.OK
    assert "not measured: no onnxruntime (pip install onnxruntime)" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_absent_and_no_worker_is_started_for_it(played, tmp_path) -> None:
    jobs = []

    def play(job: worker.ScanJob) -> JobResult[worker.Message]:
        jobs.append(job)
        return good(job)

    played(play)
    assert run("--device gpu --precision fp32 --backend pytorch", tmp_path) == Exit.DEVICE
    assert [job.way for job in jobs] == [None]
    assert only(tmp_path).direct.series[0].reason == "this torch is a CPU build"


def test_an_interrupted_way_keeps_its_rows_and_ends_the_scan(played, tmp_path, capsys) -> None:
    def play(job: worker.ScanJob) -> JobResult[worker.Message]:
        if job.way is None:
            return good(job)
        return JobResult(Failed("interrupted", "", int(Exit.INTERRUPTED), wedged=False), ROWS[:2], 0.1)

    played(play)
    assert run("", tmp_path) == Exit.INTERRUPTED
    (file,) = tmp_path.glob("*.json")
    assert capsys.readouterr().err == f"interrupted; {file} holds what was measured\n"
    (series,) = only(tmp_path).direct.series
    assert (series.end, series.rows) == ("interrupted", ROWS[:2])


def test_a_scan_that_ended_before_its_first_row_says_so(played, tmp_path, capsys) -> None:
    played(lambda _job: JobResult(Failed("interrupted", "", int(Exit.INTERRUPTED), wedged=False), (), 0.1))
    assert run("", tmp_path) == Exit.INTERRUPTED
    (file,) = tmp_path.glob("*.json")
    assert f"report: {file}, written after every row" in capsys.readouterr().out
    assert program.main(["show", str(file)]) == Exit.OK
    assert "Nothing was measured: the scan ended before its first row." in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "said"), [(0.5, True), (2.0, False), (Unknown("no limit is set"), False)])
def test_a_cpu_limit_that_holds_the_scan_back_is_in_the_answer(
    limit: float | Unknown, said: bool, tmp_path: Path
) -> None:
    around = replace(host.surroundings(tmp_path), cpu_limit=limit)
    report = replace(make.report(), machine=replace(CPU, surroundings=around))
    found = "A CPU limit of 0.5 of 2 processors holds this container back" in THROUGHPUT.text(report)
    assert found == said


def test_a_row_is_in_the_file_before_it_is_shown(played, tmp_path, monkeypatch) -> None:
    kept = []

    def tell(line: str) -> None:
        if line.startswith("  batch"):
            kept.append(only(tmp_path).direct.series[-1])

    played(good)
    monkeypatch.setattr(throughput, "echo", tell)
    assert run("--backend pytorch --precision fp32", tmp_path) == Exit.OK
    assert [len(series.rows) for series in kept] == list(range(1, len(ROWS) + 1))
    assert {(series.end, series.reason) for series in kept} == {("interrupted", scan.CUT_OFF)}
    assert only(tmp_path).direct.series[-1].end == "finished"


def test_a_broken_way_does_not_end_the_others(played, tmp_path) -> None:
    def play(job: worker.ScanJob) -> JobResult[worker.Message]:
        if job.way and job.way.precision == "fp32":
            return JobResult(Failed("the worker was killed by SIGKILL", "", 4, wedged=False), ROWS[:1], 0.1)
        return good(job)

    played(play)
    assert run("--backend pytorch", tmp_path) == Exit.BROKEN
    assert [one.end for one in only(tmp_path).direct.series] == ["failed", "finished"]


def test_without_torch_nothing_is_measured(played, tmp_path, monkeypatch, capsys) -> None:
    played(good)
    monkeypatch.setattr(scan.this_machine, "describe", make.machine)
    assert run("", tmp_path) == Exit.DEVICE
    assert "runs a model in torch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_ceilings_that_cannot_be_measured_leave_shares_unknown(played, tmp_path, capsys) -> None:
    def play(job: worker.ScanJob) -> JobResult[worker.Message]:
        if job.way is None:
            return JobResult(Failed("no end within 300 s; it was stopped", "", 4, wedged=False), (), 300.0)
        return good(job)

    played(play)
    assert run("--backend pytorch --precision fp32", tmp_path) == Exit.OK
    assert "ceilings: unknown (no end within 300 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "--model nothing",
        "--shape 2x3",
        "--batches 1,x",
        "--batches 0",
        "--trials 0",
        "--longest -1",
        "--aim 1",
        "--aim nan",
        "--longest nan",
        "--shape 2xx3 --model pyproject.toml",
        "--model pyproject.toml",
        "--precision fp8",
        "--batches ''",
    ],
)
def test_what_makes_no_sense_is_a_usage_error(words: str, played, tmp_path, capsys) -> None:
    played(good)
    try:
        code = run(words, tmp_path)
    except SystemExit as error:
        code = error.code
    assert code == Exit.USAGE
    assert "Traceback" not in capsys.readouterr().err


def test_hostile_names_do_not_reach_the_terminal(capsys, tmp_path: Path) -> None:
    bad = "\x1b[31mred\x07"
    report = make.report()
    series = Series(Way("cpu", "onnxruntime", "fp32", "resident", bad), ROWS, "failed", bad, bad)
    report = replace(report, direct=DirectScan(make.direct().model, (series,)))
    file = tmp_path / "a.json"
    file.write_text(scan_text(report))
    assert program.main(["show", str(file)]) == Exit.OK
    assert "\x1b" not in capsys.readouterr().out


def scan_text(report: scan.ThroughputReport) -> str:
    from probes.core.codec import to_json

    return to_json(report)


def test_ways_are_every_combination_once_and_the_cpu_has_no_link() -> None:
    found = ways(("gpu", "cpu"), inputs=("copied", "in-place"), precisions=("fp32",), backends=("pytorch",))
    assert [(way.device, way.inputs) for way in found] == [
        ("gpu", "copied"),
        ("gpu", "in-place"),
        ("cpu", "resident"),
    ]
    assert {way.precision for way in ways(("gpu",))} == {"fp32", "tf32", "fp16", "bf16", "autocast"}
    assert len({way.label for way in ways(("gpu", "cpu"))}) == len(ways(("gpu", "cpu")))
    assert powers(100) == (1, 2, 4, 8, 16, 32, 64)


def test_every_model_that_the_command_line_offers_is_named_once() -> None:
    source = Path(scan.__file__).with_name("models.py").read_text()
    assert all(f'"{name}"' in source for name in throughput.MODELS)  # it imports torch, which isn't here


def test_text_names_what_ended_a_way_and_why_a_column_is_empty() -> None:
    series = Series(make.WAY, ROWS, "out of memory", "batch 64: refused")
    text = THROUGHPUT.text(replace(make.report(), direct=DirectScan(make.direct().model, (series,))))
    assert "Ended: out of memory, batch 64: refused" in text
    assert "? J/input: made without it" in text


@pytest.mark.thorough
def test_two_scans_of_one_second_do_not_share_a_file(played, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "2026-11-22T02:00:00Z")
    played(good)
    assert run("--precision fp32", tmp_path) == run("--precision fp32", tmp_path) == Exit.OK
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "20261122T020000Z-made-throughput-2.json",
        "20261122T020000Z-made-throughput.json",
    ]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    played, tmp_path, capsys
) -> None:
    jobs = []
    played(lambda job: jobs.append(job) or good(job))
    (tmp_path / "file").touch()
    assert run("--precision fp32", tmp_path / "file") == Exit.DATA
    assert "can't write" in capsys.readouterr().err
    assert jobs == []
