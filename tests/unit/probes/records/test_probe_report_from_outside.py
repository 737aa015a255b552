"""A report, or a manifest, that somebody else wrote: bounded in size and depth, never a traceback."""

import json
from pathlib import Path

import pytest

from probes import cli
from probes.errors import Exit, ReportError
from probes.machine import prunemanifest
from probes.records import schema

DEEP = "[" * 200_000


def test_a_report_without_end_is_refused_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MOST_BYTES", 1 << 20)
    with pytest.raises(ReportError, match="more than 1,048,576 bytes"):
        schema.read_report(Path("/dev/zero"))


def test_a_report_of_great_depth_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep.json"
    file.write_text(DEEP)
    assert cli.main(["show", str(file)]) == Exit.DATA
    assert "is not a probe report: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text", [DEEP, '{"targets": 5}', "\xff", json.dumps({"targets": [5]})])
def test_a_malformed_prune_manifest_holds_no_targets(text: str, tmp_path: Path) -> None:
    file = tmp_path / "weir-prune.json"
    file.write_text(text, encoding="latin-1")
    assert prunemanifest.held_targets(file) == ()


def test_a_prune_manifest_without_end_holds_no_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prunemanifest, "MOST_BYTES", 1 << 20)
    assert prunemanifest.held_targets(Path("/dev/zero")) == ()
