"""What a row says of itself: its name, its leading clock, the samples of each process; and older reports."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from probe_samples import done, report

from probes.core import files
from probes.core.codec import to_json
from probes.core.errors import ReportError
from probes.core.unknown import Unknown
from probes.records.rows import Block, Clock, Expectation, Gap, Measurement, Pass, Reads, Request, Split
from probes.records.schema import Settings, from_json, read_report

NONE = Unknown("none")
ROW = Measurement("h2d", 4096, 8192, 1, "device", (1.0,), (2.0,))
READS = Reads("in_place", 8, 4096, 1, (1.0,), (2.0,))
PASS = Pass("streamed", 16, 8, 1, 0, 1, "float16", (1.0,), (2.0,), 0.0)
SPLIT = Split(1.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("record", "case"),
    [
        (ROW, "h2d 4096"),
        (Gap("h2d", 4096, "none"), "h2d 4096"),
        (READS, "in_place 8 4096"),
        (PASS, "mlp float16 streamed 16"),
        (replace(PASS, model="gpt2-xl"), "gpt2-xl float16 streamed 16"),
    ],
)
def test_a_record_s_case_distinguishes_it_from_all_others(record: Measurement, case: str) -> None:
    assert record.case == case


@pytest.mark.parametrize(
    ("clock", "device_s", "leading"),
    [
        ("device", (1.0,), "device"),
        ("device", NONE, "wall"),
        ("wall", (1.0,), "wall"),
        ("wall", NONE, "wall"),
    ],
)
def test_a_row_is_led_by_the_device_s_clock_where_it_should_be_and_there_is_one(
    clock: Clock, device_s: tuple[float, ...] | Unknown, leading: str
) -> None:
    one = replace(ROW, clock=clock, device_s=device_s)
    assert (one.leading, one.samples_s) == (leading, (1.0,) if leading == "device" else (2.0,))


def test_reads_are_led_by_the_device_s_clock_and_passes_by_the_wall_s() -> None:
    assert (READS.leading, READS.samples_s) == ("device", (1.0,))
    without = replace(READS, device_s=NONE)
    assert (without.leading, without.samples_s) == ("wall", (2.0,))
    assert (PASS.leading, PASS.samples_s) == ("wall", (2.0,))


def test_each_process_keeps_its_own_samples_by_either_clock() -> None:
    row = replace(ROW, repeats=(replace(ROW, device_s=(3.0,), wall_s=(4.0,)),))
    reads = replace(READS, repeats=(replace(READS, device_s=(3.0,), wall_s=(4.0,)),))
    for one in (row, reads):
        assert one.times_s == ((1.0,), (3.0,))
        assert one.walls_s == ((2.0,), (4.0,))
    more = (replace(PASS, device_s=NONE, wall_s=(3.0,)), replace(PASS, device_s=(5.0,)))
    passes = replace(PASS, repeats=more)
    assert passes.times_s == ((2.0,), (3.0,), (2.0,))
    assert passes.devices_s == ((1.0,), (5.0,))
    assert isinstance(replace(PASS, device_s=NONE).devices_s, Unknown)


def test_what_an_older_report_lacks_means_what_it_meant_then() -> None:
    """Every field that has a default is left out, as in a file from before the field was added."""
    request = Request("block", 1, 0, 1, None, True, "")
    block = Block(0, "vram", False, 1, (1.0,), 0, 0)
    expectation = Expectation("refuses", "It refuses.", "a test")
    written = report(done("transfer", ROW, READS, PASS, request, block, expectation))
    value = json.loads(to_json(written))
    run, settings = value["runs"][0], value["settings"]
    for record in run["records"]:
        for name in ("noise", "host_bound", "model", "split", "kind", "declined", "first_read_s", "note"):
            record.pop(name, None)
    for whole, names in (
        (value, ("resumed", "asked")),
        (run, ("round",)),
        (settings, ("models", "dtypes", "numa")),
    ):
        for name in names:
            del whole[name]
    for name in ("nvidia", "surroundings", "numa_nodes", "gpu_numa_node"):
        del value["machine"][name]
    found = from_json(json.dumps(value))
    assert found == written
    assert (found.settings.numa, found.resumed, found.asked, found.runs[0].round) == ("as_found", 0, (), 0)
    row, reads, passed, asked, read, said = found.runs[0].records
    assert not any(one.host_bound for one in (row, reads, passed))  # type: ignore[union-attr]
    assert (passed.model, asked.kind, asked.declined, said.note) == ("mlp", "vram", False, "")  # type: ignore[union-attr]
    unknown = (row.noise, reads.noise, passed.noise, passed.split, read.first_read_s)  # type: ignore[union-attr]
    assert all(isinstance(one, Unknown) for one in unknown)
    assert found.runs[0].processes == 1


def test_settings_are_all_written() -> None:
    settings = Settings(True, 1, 2, ("mlp",), ("float16",), "gpu")
    assert set(json.loads(to_json(replace(report(), settings=settings)))["settings"]) == {
        field.name for field in fields(Settings)
    }


def test_a_file_that_is_missing_is_named_with_the_system_s_reason_alone(tmp_path: Path) -> None:
    with pytest.raises(ReportError) as caught:
        read_report(tmp_path / "none.json")
    assert caught.value.message == f"can't read {tmp_path / 'none.json'}: No such file or directory"


def test_reports_of_128_mib_are_read_and_larger_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = files.read_text
    monkeypatch.setattr(
        files,
        "read_text",
        lambda path, *, most_bytes: (seen.append(most_bytes), real(path, most_bytes=99_999))[1],
    )
    (tmp_path / "r.json").write_text(to_json(report()))
    assert read_report(tmp_path / "r.json") == report()
    assert seen == [128 * 2**20]
