"""The files of ranks and of reports, and what is shown of them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from made_runs import epoch, rank, run
from strict_readers import html_of

from probes.cli import main
from probes.core.codec import encode
from probes.core.errors import Exit, ReportError
from probes.core.unknown import Unknown
from probes.records.watch import CardSample, Energy, Look, Sample, Subject, WatchedCard
from probes.reports.epochs import DOCUMENT, epochs_document
from probes.reports.kinds import EPOCHS, load_report
from probes.training import figures
from probes.training.report import (
    Fault,
    epochs_schema,
    named_epochs,
    report_of,
    run_in,
    runs_below,
    write_rank,
)
from probes.watch.recording import LineWriter, first_line, open_recorders

SCHEMA = Path(__file__).parents[4] / "docs" / "schema" / "epochs.schema.json"
NONE = Unknown("no watch ran beside it")


def written(folder: Path, world: int = 2, **more: object) -> Path:
    folder.mkdir(parents=True)
    for report in run(world, 1.0, **more).ranks:
        write_rank(report, folder)
    return folder


def test_the_published_schema_is_the_programs_and_a_report_fits_it() -> None:
    assert SCHEMA.read_text() == epochs_schema(), "run: python3 -m probes schema epochs"
    report = report_of((run(1, 1.0), run(2, 0.6)))
    Draft202012Validator(json.loads(epochs_schema())).validate(encode(report))


@pytest.mark.thorough
def test_what_ranks_wrote_anywhere_below_a_folder_becomes_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for repetition in range(3):
        written(tmp_path / f"one-{repetition}", world=1)
        written(tmp_path / "n2" / f"two-{repetition}")
    out = tmp_path / "r.json"
    assert main(["epochs", "--from", str(tmp_path), "--json", str(out)]) == Exit.OK
    assert "Scaling efficiency of 2 processes" in capsys.readouterr().out
    report, _ = named_epochs(out)
    assert [len(case.runs) for case in figures.cases_of(report)] == [3, 3]
    loaded = load_report(out)
    assert loaded.kind is EPOCHS
    assert html_of(loaded.kind.page(loaded.report, raw=loaded.raw, name="r.json"))


def test_a_report_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["epochs", "--from", "runs", "--json", "-"]) == Exit.OK
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(json.loads(capsys.readouterr().out))
    assert not Path("-").exists()


def test_a_failed_run_is_shown_with_its_cause_and_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "good", world=1)
    (tmp_path / "bad").mkdir()
    fault = Fault(3, "out of memory in compute: \x1b[31mred", 3)
    write_rank(rank(0, 1, fault=fault), tmp_path / "bad")
    assert main(["epochs", "--from", str(tmp_path)]) == Exit.BROKEN
    said = capsys.readouterr().out
    assert "rank 0, step 3: out of memory in compute" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "weir-training-rank/1"}', "\xff"])
def test_a_broken_rank_is_refused_by_its_name(content: str, tmp_path: Path) -> None:
    written(tmp_path / "run")
    (tmp_path / "run" / "rank-1.json").write_text(content, encoding="latin-1")
    with pytest.raises(ReportError, match=r"rank-1\.json"):
        runs_below(tmp_path)


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "good")
    broken = written(tmp_path / "broken") / "rank-1.json"
    broken.write_text(broken.read_text()[:300])
    assert main(["epochs", "--from", str(tmp_path), "--json", str(tmp_path / "all.json")]) == Exit.DATA
    told = capsys.readouterr()
    assert f"error: {broken} can't be used: not JSON" in told.err
    assert "Quickest: 2 processes" in told.out
    report, _ = named_epochs(tmp_path / "all.json")
    assert [run.name for run in report.runs] == ["good"]


def test_a_pipe_is_no_report_and_is_not_waited_for(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    (folder / "rank-1.json").unlink()
    os.mkfifo(folder / "rank-1.json")
    (run_there,), _ = runs_below(tmp_path)
    assert run_there.silent == (1,)


def test_ranks_of_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    write_rank(replace(run(2, 1.0, batch=99).ranks[1]), folder)
    with pytest.raises(ReportError, match="ranks of different runs: 0 and 1"):
        run_in(folder)


@pytest.mark.parametrize("words", [[], ["bert-base", "--from", "x"], ["--from", "absent"]])
def test_what_is_asked_wrongly_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epochs", *words]) in (Exit.USAGE, Exit.DATA)
    assert "Traceback" not in capsys.readouterr().err


def test_energy_of_each_epoch_is_read_from_a_watch_beside_the_run(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", world=1)
    card = WatchedCard("card", "nvidia", "0000:01:00.0", NONE, NONE)
    subject = Subject("2026-02-08T12:00:00Z", "n1", 0.25, (card,), (), begun_s=999.0)
    writer, lines = LineWriter(), [first_line(subject)]
    for at in range(41):  # 100 W until the second epoch begins, at 1001 s; 300 W then
        at_s = at * 0.25
        look = Look({"power_w": 100.0 if 999.0 + at_s < 1001.0 else 300.0}, {"energy_j": "none"})
        lines.append(writer.line(Sample(at_s, 0.0, Look({}, {}), (CardSample(look, NONE, NONE),))))
    (folder / "watch-n1.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (case,) = figures.cases_of(report_of((run_in(folder),)))
    energy = figures.energy_j(case)
    assert isinstance(energy, figures.Mean)
    assert energy.value == pytest.approx(300.0)


def test_energy_is_that_of_all_watches_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", world=1)
    write_rank(rank(0, 1, epoch(0), epoch(1)), folder)
    card = WatchedCard("card", "nvidia", "0000:01:00.0", NONE, NONE)
    for begun_s, watts in ((999.0, 100.0), (1001.1, 300.0)):  # each beside an epoch
        subject = Subject("2026-02-08T12:00:00Z", "n1", 0.25, (card,), (), begun_s=begun_s)
        (recorder,) = open_recorders(subject, jsonl=folder / "watch-n1.jsonl", csv=None)
        for at in range(7):
            look = Look({"power_w": watts}, {"energy_j": "none"})
            recorder.add(Sample(at * 0.25, 0.0, Look({}, {}), (CardSample(look, NONE, NONE),)))
        recorder.close()
    found = run_in(folder)
    assert not isinstance(found.watched, Unknown)
    ((first, second),) = (watched.epochs for watched in found.watched)
    assert isinstance(first, Energy)
    assert isinstance(second, Energy)
    assert first.joules / first.covers_s == pytest.approx(100.0)
    assert second.joules / second.covers_s == pytest.approx(300.0)


def test_the_documents_own_figures_stand_beside_and_say_so() -> None:
    text = EPOCHS.text(report_of((run(1, 1.0),)))
    table = text.partition("From the document")[2]
    for time in ("5 min 33 s", "17 min 17 s", "8 min 35 s", "5 min 23 s"):
        assert time in table
    assert "not measured here" in table
    assert len(DOCUMENT) == 4
    assert "5 min 33 s" not in text.partition("From the document")[0]


def test_unknown_parts_of_fsdp_are_no_zeros() -> None:
    unknown = Unknown("FSDP exchanges while it computes")
    epochs = (epoch(0), replace(epoch(1), exchange_s=unknown, waiting_s=unknown, last=unknown))
    ranks = tuple(rank(at, 2, *epochs) for at in range(2))
    report = report_of((replace(run(2, 1.0), ranks=ranks),))
    text = EPOCHS.text(report)
    assert epochs_document(report).headline
    assert "100.0%" in text
    assert "0.0%     0.0%" not in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"world": 0}, "0 ranks"),
        ({"world": 10**9}, "1000000000 ranks"),
        ({"rank": 5}, "ranks aren't"),
        ({"epochs": []}, "no epoch"),
        ({"losses": []}, "no loss"),
        ({"epochs": [{**encode(epoch(1)), "wall_s": 0.0}]}, "without time"),
        ({"epochs": [{**encode(epoch(1)), "samples": 0}]}, "or samples"),
    ],
)
def test_a_report_that_contradicts_itself_is_an_error_and_no_traceback(
    change: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = encode(report_of((run(1, 1.0),)))
    report["runs"][0]["ranks"][0].update(change)
    path = tmp_path / "epochs.json"
    path.write_text(json.dumps(report))
    assert main(["show", str(path)]) == Exit.DATA
    assert says in capsys.readouterr().err
