"""A throughput report as a file: there and back, refused where it doesn't fit, its schema published."""

import json
from dataclasses import replace
from pathlib import Path

import made_scans as make
import pytest
from jsonschema import Draft202012Validator

from probes.core.codec import to_json
from probes.core.errors import ReportError
from probes.throughput.report import from_json, named_scan, throughput_schema, write_scan

ROOT = Path(__file__).parents[4]
SCHEMA = Draft202012Validator(json.loads(throughput_schema()))


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = make.report()
    write_scan(report, tmp_path / "a.json")
    assert named_scan(tmp_path / "a.json")[0] == report
    assert not list(SCHEMA.iter_errors(json.loads(to_json(report))))


def test_a_half_that_was_not_asked_for_is_null_or_missing() -> None:
    text = json.loads(to_json(replace(make.report(), direct=None)))
    assert text["direct"] is None
    del text["direct"], text["served"]
    assert from_json(json.dumps(text)).direct is None


def test_another_kind_of_report_is_refused() -> None:
    with pytest.raises(ReportError, match="not a throughput report"):
        from_json('{"schema_version": 1, "runs": []}')
    later = json.loads(to_json(make.report())) | {"schema_version": 2}
    with pytest.raises(ReportError, match="not a throughput report of version 1"):
        from_json(json.dumps(later))


def test_a_damaged_report_names_the_place() -> None:
    text = json.loads(to_json(make.report()))
    text["direct"]["series"][0]["rows"][0]["wall_s"][1] = "soon"
    with pytest.raises(ReportError, match=r"series\[0\]\.rows\[0\]\.wall_s\[1\]"):
        from_json(json.dumps(text))


@pytest.mark.thorough
def test_the_published_schema_is_that_of_the_code() -> None:
    published = (ROOT / "docs" / "schema" / "throughput.schema.json").read_text()
    assert published == throughput_schema(), (
        "run: python3 -m probes schema throughput > docs/schema/throughput.schema.json"
    )
    Draft202012Validator.check_schema(json.loads(published))
