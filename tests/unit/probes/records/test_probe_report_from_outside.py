"""A report, or a manifest, that somebody else wrote: bounded in size and depth, never a traceback."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from probe_samples import done, report

from probes.cli import program
from probes.core import codec
from probes.core.errors import Exit, ReportError
from probes.hardware import prune_manifest
from probes.records import rows, schema
from probes.reports import run_findings

DEEP = "[" * 200_000


def test_a_report_without_end_is_refused_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MOST_BYTES", 1 << 20)
    with pytest.raises(ReportError, match="more than 1,048,576 bytes"):
        schema.read_report(Path("/dev/zero"))


def test_a_report_of_great_depth_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep.json"
    file.write_text(DEEP)
    assert program.main(["show", str(file)]) == Exit.DATA
    assert "is not a probe report: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text", [DEEP, '{"targets": 5}', "\xff", json.dumps({"targets": [5]})])
def test_a_malformed_prune_manifest_holds_no_targets(text: str, tmp_path: Path) -> None:
    file = tmp_path / "weir-prune.json"
    file.write_text(text, encoding="latin-1")
    assert prune_manifest.held_targets(file) == ()


def test_a_prune_manifest_without_end_holds_no_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune_manifest, "MOST_BYTES", 1 << 20)
    assert prune_manifest.held_targets(Path("/dev/zero")) == ()


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        ("NaN", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("1e999", "expected a finite number"),
        ("9" * 399, "expected a finite number"),
        ("9" * 5000, "expected a finite number"),
        ("[" * 500 + "]" * 500, "nested more than 64 levels deep"),
        ('1.0, "seconds": 2.0', "the key 'seconds' twice"),
    ],
    ids=["NaN", "infinity", "1e999", "399 digits", "5,000 digits", "500 levels", "twice"],
)
def test_a_number_that_no_clock_gives_is_no_traceback_in_any_verb(
    seconds: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = codec.to_json(report(done("transfer")))
    hostile, kept = tmp_path / "hostile.json", tmp_path / "kept.json"
    kept.write_text(text)
    hostile.write_text(text.replace('"seconds": 1.0', f'"seconds": {seconds}'))
    for words in (["show"], ["html"], ["prometheus"], ["compare", str(kept)]):
        assert program.main([*words, str(hostile)]) == Exit.DATA
        told = capsys.readouterr().err
        assert why in told
        assert len(told) < 1000


@pytest.mark.thorough
def test_a_version_of_a_megabyte_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"schema_version": "\u202e" * 1_000_000}))
    assert program.main(["show", str(file)]) == Exit.DATA
    assert len(capsys.readouterr().err) < 1000


ROW = rows.Measurement("h2d_pinned", 4096, 4096, 1, "device", (1e-6, 2e-6, 3e-6), (2e-6, 3e-6))
BLOCK = rows.Block(0, "vram", False, 1 << 20, (1e-3,), 1 << 20, 0)


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (replace(ROW, wall_s=()), "wall_s: expected times"),
        (replace(ROW, device_s=(-1e-6, 2e-6)), "device_s: expected times"),
        (replace(ROW, device_s=(0.0, 0.0, 1e-6)), "device_s: expected times"),
        (replace(ROW, device_s=(1e308, 1e308)), "device_s: expected times"),
        (replace(ROW, payload_bytes=0), "payload_bytes: expected a size, found 0"),
        (replace(ROW, batch=-1), "batch: expected a size, found -1"),
        (replace(BLOCK, read_s=()), "read_s: expected times"),
        (replace(BLOCK, n_bytes=0), "n_bytes: expected a size, found 0"),
    ],
)
def test_what_no_run_can_have_measured_is_named_before_anything_is_computed_from_it(
    record: rows.Record, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text(codec.to_json(report(done("transfer", ROW, BLOCK, record))))
    for verb in ("show", "html", "prometheus"):
        assert program.main([verb, str(file)]) == Exit.DATA
        assert f"report.runs[0].records[2].{place}" in capsys.readouterr().err


def test_a_row_whose_clock_now_and_then_shows_no_time_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text(codec.to_json(report(done("transfer", replace(ROW, device_s=(0.0, 1e-6, 2e-6))))))
    assert program.main(["show", str(file)]) == Exit.OK
    assert "h2d_pinned" in capsys.readouterr().out


@pytest.mark.parametrize("started", ["\x1b[2J yesterday", "0001-01-01"])
def test_a_date_that_is_none_is_no_traceback(
    started: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text(codec.to_json(replace(report(), started=started)))
    assert program.main(["prometheus", str(file)]) == Exit.DATA
    told = capsys.readouterr().err
    assert "report.started: expected a date and time" in told
    assert "\x1b" not in told


def test_a_refusal_without_its_request_is_a_sentence_all_the_same() -> None:
    told = run_findings.verdict((), [BLOCK], rows.Stop("refused", 1 << 30, ""))
    assert told.startswith("refused with out of memory at 1.00 GiB; ")


def test_a_report_of_endless_lists_is_refused_before_memory_is_taken_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 MB of empty lists took 2.7 GB and 32 s."""
    monkeypatch.setattr(codec, "MOST_VALUES", 1000)
    file = tmp_path / "lists.json"
    file.write_text(f'{{"schema_version": 2, "x": [{"[]," * 1000}[]]}}')
    assert program.main(["show", str(file)]) == Exit.DATA
    assert "not JSON: more than 1,000 values" in capsys.readouterr().err
