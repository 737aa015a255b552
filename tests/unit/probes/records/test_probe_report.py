import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_samples import done, failed, report, waived

from probes.core.codec import Misfit, decode, encode, to_json
from probes.core.errors import Exit, ReportError
from probes.core.unknown import Unknown
from probes.measure.probe_worker import Job, Line
from probes.records.rows import Block, Gap, Measurement, Pass, Reading, Request, Stop
from probes.records.schema import from_json, read_report, write_report

finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.lists(finite, min_size=1, max_size=5).map(tuple)
sizes = st.integers(min_value=0, max_value=2**50)
unknowns = st.builds(Unknown, st.text())
records = st.one_of(
    st.builds(Measurement, st.text(), sizes, sizes, sizes, st.just("device"), seconds | unknowns, seconds),
    st.builds(Gap, st.text(), sizes, st.text()),
    st.builds(Reading, st.text(), st.text(), sizes | unknowns),
    st.builds(Request, st.just("block"), sizes, sizes, sizes, st.none() | sizes, st.booleans(), st.text()),
    st.builds(
        Block, sizes, st.just("vram"), st.booleans(), sizes, seconds, sizes | unknowns, sizes | unknowns
    ),
    st.builds(Stop, st.just("refused"), sizes, st.text()),
)


@pytest.mark.thorough
@settings(max_examples=25)  # each is a whole report
@given(st.lists(records, max_size=4))
def test_a_report_survives_its_file(found: list[object]) -> None:
    written = report(done("transfer", *found), failed(4, wedged=True), waived())
    assert from_json(to_json(written)) == written


@settings(max_examples=50)
@given(records)
def test_a_record_survives_the_pipe(record: object) -> None:
    line = Line(record)  # type: ignore[arg-type]
    assert decode(Line, json.loads(json.dumps(encode(line)))) == line


def test_a_job_survives_stdin() -> None:
    job = Job("spill", report().settings, report().machine)
    assert decode(Job, json.loads(json.dumps(encode(job)))) == job


def test_nan_never_enters_a_report() -> None:
    broken = Measurement("x", 1, 1, 1, "wall", Unknown("none"), (float("nan"),))
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(report(done("transfer", broken)))


def mutate(path: str, value: object) -> str:
    """A good report's text with the value at a dotted path replaced."""
    root = json.loads(to_json(report(done("transfer", Gap("h2d_pinned", 4096, "short")))))
    *steps, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place = root
    for step in steps:
        place = place[step]
    place[last] = value
    return json.dumps(root)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 3, "schema_version is 3, this program reads 1 and 2"),
        ("settings.quick", 1, "report.settings.quick: expected bool, found '1'"),
        ("machine.cpus", "two", "report.machine.cpus: expected int"),
        ("machine.cpus", True, "report.machine.cpus: expected int"),
        ("runs", {}, "report.runs: expected a list"),
        ("runs.0.outcome", {"is": "splendid"}, "done, waived, failed"),
        ("runs.0.records.0.payload_bytes", 1.5, r"report.runs\[0\].records\[0\].payload_bytes"),
        ("runs.0.records.0.is", "gap!", r"report.runs\[0\].records\[0\]"),
        ("machine.torch.api", "metal", "one of cuda, hip, none"),
        ("machine.kernel", 6, "report.machine.kernel: expected str"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(path: str, value: object, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        from_json(mutate(path, value))


def test_a_missing_key_is_named() -> None:
    text = json.loads(to_json(report()))
    del text["settings"]["seed"]
    with pytest.raises(ReportError, match=r"report\.settings: the key `seed` is missing"):
        from_json(json.dumps(text))


def test_a_key_of_a_later_version_is_skipped() -> None:
    assert from_json(mutate("settings.later", 1)).settings == report().settings


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\0", '{"schema_version": 1}'])
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(ReportError, match=r"r\.json is not a probe report") as raised:
        read_report(file)
    assert raised.value.exit_code == Exit.DATA


def test_a_missing_file_is_refused_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="probes run"):
        read_report(tmp_path / "none.json")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match="can't read"):
        read_report(tmp_path / "r.json")


def test_writing_makes_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "r.json"
    write_report(report(), path)
    write_report(report(waived()), path)
    assert read_report(path) == report(waived())
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]


def test_a_failed_write_keeps_the_older_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_report(report(), path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ReportError, match="No space left"):
        write_report(report(waived()), path)
    assert read_report(path) == report()
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_a_file_where_the_folder_should_be_is_reported(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ReportError, match="--out DIR"):
        write_report(report(), tmp_path / "taken" / "r.json")


def test_what_has_no_json_form_is_a_programming_error() -> None:
    with pytest.raises(TypeError):
        encode({"a": 1})


def test_headline_samples_follow_the_clock() -> None:
    both = Measurement("x", 1, 1, 1, "device", (1.0,), (2.0,))
    assert both.samples_s == (1.0,)
    assert replace(both, clock="wall").samples_s == (2.0,)
    assert replace(both, device_s=Unknown("none")).samples_s == (2.0,)


def test_passes_fall_back_to_the_wall_clock() -> None:
    one = Pass("resident", 1, 8, 1, 0, 1, "float16", Unknown("none"), (2.0,), 0.0)
    assert one.samples_s == (2.0,)


@dataclass(frozen=True)
class Tagged:
    tag: ClassVar[str] = "tagged"
    word: Literal["a"]


def test_an_untagged_alternative_is_tried_before_giving_up() -> None:
    assert decode(Tagged, {"is": "tagged", "word": "a"}) == Tagged("a")
    with pytest.raises(Misfit, match="one of a"):
        decode(Tagged, {"is": "tagged", "word": "b"})
