"""Saved reports, read back: the same again, or a message with the place of what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from report_maker import HOSTILE, a_finding, audited, small_report

from buildtool.audit.counts import Duplicate
from buildtool.audit.findings import Prediction
from buildtool.audit.report import GpuCode, Verdict, parse_report, read_report, to_json
from buildtool.cli.program import main
from buildtool.core.errors import DataError, Exit
from buildtool.core.model import Budget


def test_a_report_reads_back_as_it_was() -> None:
    report = replace(small_report(Budget(1, None)), findings=(a_finding(),))
    again = parse_report(to_json(report), "r.json")
    assert to_json(again) == to_json(report)
    assert again.budget.verdict is Verdict.FAIL
    assert again.findings == report.findings
    assert again.tree == report.tree


def test_a_report_from_before_there_was_a_tree_can_be_read() -> None:
    document = json.loads(to_json(small_report()))
    del document["tree"]
    assert parse_report(json.dumps(document), "r.json").tree.rows == ()


def test_keys_of_newer_reports_are_skipped() -> None:
    document = json.loads(to_json(small_report()))
    document["later"] = document["image"]["later"] = {"x": [1]}
    assert parse_report(json.dumps(document), "r.json") == parse_report(to_json(small_report()), "r.json")


@pytest.mark.parametrize("name", HOSTILE)
def test_text_of_a_saved_report_is_escaped_again(name: str) -> None:
    report = replace(audited(), findings=(a_finding(paths=(name,), title=name),), owners={name: 1})
    again = parse_report(to_json(report), "r.json")
    told = (*again.findings[0].paths, again.findings[0].title, *again.owners)
    assert all(char.isprintable() or char in "\n\t" for text in told for char in text)


def broken(change: Callable[[dict], object]) -> str:  # type: ignore[type-arg]
    document = json.loads(to_json(replace(small_report(), findings=(a_finding(),))))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected an object"),
        ("{}", "schema_version is None"),
        (broken(lambda d: d.update(schema_version=99)), "schema_version is 99"),
        (broken(lambda d: d.pop("totals")), "the key `totals` is missing"),
        (
            broken(lambda d: d["totals"].update(unpacked_bytes="1")),
            r"unpacked_bytes: expected int, found '1'",
        ),
        (
            broken(lambda d: d["totals"].update(unpacked_bytes=-1)),
            r"expected a count, found '-1'",
        ),
        (broken(lambda d: d["totals"].update(unpacked_bytes=True)), r"expected int, found 'True'"),
        (broken(lambda d: d["totals"].update(unpacked_bytes=float("nan"))), r"not JSON \(NaN is not JSON\)"),
        (
            broken(lambda d: d["findings"][0].update(severity="dire")),
            r"findings\[0\].severity: expected one of error, warning, info, found 'dire'",
        ),
        (broken(lambda d: d["findings"][0].pop("bytes")), r"findings\[0\]: the key `bytes` is missing"),
        (broken(lambda d: d.update(layers={})), "layers: expected a list"),
        (broken(lambda d: d.update(gpu_code=[])), "gpu_code: expected an object"),
        (broken(lambda d: d.update(top_directories=[1])), r"top_directories\[0\]: expected an object"),
        (broken(lambda d: d.update(top_directories={})), "top_directories: expected a list"),
        (broken(lambda d: d.update(findings=[1])), r"findings\[0\]: expected an object"),
        (broken(lambda d: d.update(findings={})), "findings: expected a list"),
        (broken(lambda d: d.update(image=[])), r"r\.json\.image: expected an object"),
        (broken(lambda d: d.update(owners=[])), r"r\.json\.owners: expected an object"),
        (
            broken(lambda d: d["gpu_code"].pop("by_target")),
            r"r\.json\.gpu_code: the key `by_target` is missing",
        ),
        (
            broken(lambda d: d["top_directories"][0].pop("path")),
            r"top_directories\[0\]: the key `path` is missing",
        ),
        (
            broken(lambda d: d["layers"][1].update(command=7)),
            r"layers\[1\]\.command: expected str or NoneType, found '7'",
        ),
        (
            broken(lambda d: d["findings"][0].update(paths=[7])),
            r"findings\[0\]\.paths\[0\]: expected str",
        ),
        (broken(lambda d: d["budget"].update(unpacked=None)), r"budget\.unpacked: expected an object"),
    ],
)
def test_what_is_no_report_is_refused_with_its_place(text: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        parse_report(text, "r.json")


@pytest.mark.parametrize("digits", [19, 20, 400, 5000])
def test_sizes_that_no_image_has_are_no_traceback(tmp_path: Path, digits: int) -> None:
    document = json.loads(to_json(small_report()))
    text = json.dumps(document | {"totals": document["totals"] | {"unpacked_bytes": -7}})
    path = tmp_path / "r.json"
    path.write_text(text.replace("-7", "9" * digits))
    assert main(["audit", str(path)]) == Exit.DATA
    path.write_text(text.replace("-7", str((1 << 63) - 1)))
    assert main(["audit", str(path)]) == Exit.OK


@pytest.mark.thorough
def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"can't read .*none\.json"):
        read_report(tmp_path / "none.json")
    with pytest.raises(DataError, match=r"can't read .*: Is a directory"):
        read_report(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_report(tmp_path / "binary.json")
    with (tmp_path / "huge.json").open("wb") as handle:
        handle.truncate(65 << 20)
    with pytest.raises(
        DataError, match=r"huge\.json is too large .*: more than 64 MiB\n  audit the image itself"
    ):
        read_report(tmp_path / "huge.json")


def test_every_value_of_a_report_reads_back(tmp_path: Path) -> None:
    report = replace(
        small_report(Budget(1, None)),
        findings=(a_finding(paths=("a\nb", "c\td"), predicted_unpacked_bytes=5), a_finding("other")),
        duplicates=(Duplicate(5, 10, ("a", "b"), "why"),),
        gpu_code=GpuCode({"gfx906": 7}, {"gfx906": 3}),
        notes=("note é",),
        prediction=None,
    )
    (tmp_path / "r.json").write_text(to_json(report))
    assert read_report(tmp_path / "r.json") == report
    again = replace(report, prediction=Prediction(5, 7))
    assert parse_report(to_json(again), "r.json") == again


def test_counts_reach_from_nothing_to_63_bits() -> None:
    for count in (0, (1 << 63) - 1):
        report = replace(small_report(), owners={"deb": count})
        assert parse_report(to_json(report), "r.json").owners == {"deb": count}
    with pytest.raises(
        DataError,
        match=r"r\.json\.owners\.deb: expected a count, found '9223372036854775808'",
    ):
        parse_report(to_json(replace(small_report(), owners={"deb": 1 << 63})), "r.json")


def test_a_wrong_value_is_shown_by_its_first_60_characters() -> None:
    text = broken(lambda d: d["totals"].update(n_files="7" * 100))
    with pytest.raises(DataError, match=f": expected int, found '{'7' * 60}':"):
        parse_report(text, "r.json")


def test_the_report_that_is_wrong_is_named_without_its_control_characters() -> None:
    with pytest.raises(DataError, match=r"^r\\x1b: not JSON"):
        parse_report("{", "r\x1b")


def test_only_the_schema_that_this_program_writes_is_read() -> None:
    for version in (0, 2, "1", None):
        with pytest.raises(DataError, match="schema_version is"):
            parse_report(broken(lambda d, version=version: d.update(schema_version=version)), "r.json")
