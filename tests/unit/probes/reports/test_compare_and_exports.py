import json
import re
from dataclasses import replace
from pathlib import Path

import made_reports as make
import pytest
from jsonschema import Draft202012Validator

from buildtool.cli.program import main
from probes.core.codec import to_json
from probes.core.errors import ReportError
from probes.core.unknown import Unknown
from probes.records.json_schema import report_schema
from probes.records.schema import ProbeReport
from probes.reports.run_compare import compare, render_markdown
from probes.reports.run_metrics import HELP, exposition

ROOT = Path(__file__).parents[4]
RESULTS = sorted((ROOT / "docs" / "results").glob("h200*.json"))
NAMES = ("a.json", "b.json")


CUDA_GPU = replace(make.GPU, name="Another GPU")
UNLIKE = {
    "GPU": make.made(machine=make.machine(torch=replace(make.CUDA, gpus=(CUDA_GPU,)))),
    "mode": make.made(quick=False),
    "VRAM cap": make.made(cap=4 * make.GIB),
    "processors": make.made(machine=make.machine(cpus=8)),
    "torch's API": make.made(machine=make.machine(torch=replace(make.CUDA, api="hip"))),
    "WSL": make.made(machine=make.machine(wsl=True)),
    "system RAM": make.made(machine=make.machine(ram_total_bytes=16 * make.GIB)),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_unlike_reports_are_refused_with_what_is_unlike(what: str) -> None:
    with pytest.raises(ReportError, match=re.escape(f"can't be compared: {what}: ")) as refused:
        compare(make.made(), UNLIKE[what], names=NAMES)
    assert "--force" in refused.value.hint
    assert refused.value.exit_code == 5


def test_forced_comparison_shows_what_is_unlike() -> None:
    text = render_markdown(compare(make.full_report(), make.cpu_report(), names=NAMES, force=True))
    assert "**Unlike, compared because of --force:**\n- GPU: Some GPU (gfx1100) / none" in text
    assert "Only in A:\n- transfer d2h_pageable 4 KiB" in text


def test_another_driver_is_remarked_and_not_refused() -> None:
    other = replace(make.full_report(), machine=make.machine(gpu_driver="amdgpu 6.12"))
    found = compare(make.full_report(), other, names=NAMES)
    assert [str(r) for r in found.remarks] == ["GPU driver: unknown (the driver doesn't say) / amdgpu 6.12"]


def test_rows_by_different_clocks_get_no_ratio() -> None:
    report = make.full_report()
    run = report.runs[0]
    wall = tuple(replace(r, clock="wall") if hasattr(r, "clock") else r for r in run.records)
    found = compare(report, replace(report, runs=(replace(run, records=wall),)), names=NAMES)
    assert all(isinstance(line.speed, Unknown) for line in found.lines)
    assert "unknown (A is by the device clock, B by the wall clock)" in render_markdown(found)


def test_reports_without_a_common_row_are_refused() -> None:
    with pytest.raises(ReportError, match="no measured row in common"):
        compare(make.full_report(), make.made(), names=NAMES)


def test_comparison_is_a_markdown_table_with_equal_columns() -> None:
    text = render_markdown(compare(make.full_report(), make.full_report(), names=NAMES))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + len(make.PATHS) * 5 + 4 * 3 * 2 + 8


# Prometheus' text format, https://prometheus.io/docs/instrumenting/exposition_formats
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def parse_exposition(text: str) -> dict[str, dict[str, float]]:
    """Metrics by name and labels; fails on anything that the format forbids."""
    assert text.endswith("\n")
    found: dict[str, dict[str, float]] = {}
    current, typed = "", ""
    for line in text.splitlines():
        assert line
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in found, f"{current} comes in two groups"
            found[current] = {}
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert typed == current
            assert kind == "gauge"
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            name, labels, value = sample.groups()
            assert name == current == typed
            keys = re.findall(r'([a-zA-Z_][a-zA-Z0-9_]*)="', re.sub(r"\\.", "", labels or ""))
            assert len(keys) == len(set(keys)), line
            assert (labels or "") not in found[name], f"{line} stands twice"
            found[name][labels or ""] = float(value)
    assert all(found.values()), "a metric without samples"
    return found


@pytest.mark.parametrize(
    "report", [make.full_report(), make.three_rounds(), make.cpu_report(), make.broken_report()]
)
def test_exposition_keeps_to_the_format(report: ProbeReport) -> None:
    assert parse_exposition(exposition(report))["weir_report_info"]


def test_exposition_gives_base_units_and_true_figures() -> None:
    found = parse_exposition(exposition(make.three_rounds()))
    labels = 'path="h2d_pinned",payload_bytes="268435456",clock="device"'
    assert found["weir_transfer_bandwidth_gigabytes_per_second"][labels] == pytest.approx(50.0, rel=0.01)
    assert found["weir_transfer_time_seconds"][labels] == pytest.approx(256 * make.MIB / 50e9, rel=0.01)
    assert found["weir_transfer_samples"][labels] == 60
    assert found["weir_transfer_processes"][labels] == 3
    errors = [found[f"weir_transfer_time_{name}_seconds"][labels] for name in ("error", "within", "between")]
    assert all(0 < error < 0.02 * found["weir_transfer_time_seconds"][labels] for error in errors)
    assert found["weir_spill_label_bytes"]['label="host"'] == 6 * 256 * make.MIB
    assert found["weir_report_started_timestamp_seconds"][""] == 1770552000


def test_a_pass_has_the_wall_clock_time_and_the_devices_beside_it_named() -> None:
    """Made passes take half of their wall-clock time by the device's clock."""
    found = parse_exposition(exposition(make.three_rounds()))
    labels = 'model="mlp",dtype="float16",batch="1",scenario="streamed"'
    assert found["weir_scenario_pass_seconds"][labels] == pytest.approx(6.6e-3, rel=0.01)
    assert found["weir_scenario_pass_device_seconds"][labels] == pytest.approx(3.3e-3, rel=0.01)


def test_a_full_report_gives_every_metric_that_is_described() -> None:
    found = parse_exposition(exposition(make.full_report()))
    rounds = parse_exposition(exposition(make.three_rounds()))
    assert set(HELP) - set(found) - set(rounds) == {"weir_spill_first_read_seconds"}  # in no made report
    gpu = make.GPU
    labels = f'index="0",gpu="{gpu.name}"'
    assert found["weir_gpu_vram_total_bytes"] == {labels: gpu.vram_total_bytes}
    assert found["weir_gpu_vram_free_bytes"] == {labels: gpu.vram_free_bytes}
    assert set(found["weir_probe_outcome_info"].values()) == {1}
    assert set(found["weir_scenario_pass_samples"]) == set(found["weir_scenario_pass_seconds"])


def test_names_of_metrics_end_in_what_they_count() -> None:
    ends = (
        "_bytes",
        "_seconds",
        "_gigabytes_per_second",
        "_samples",
        "_reads",
        "_blocks",
        "_info",
        "_processes",
    )
    assert all(name.startswith("weir_") and name.endswith(ends) for name in HELP)


def test_unknown_figures_are_left_out_of_the_exposition() -> None:
    bare = make.machine(ram_total_bytes=Unknown("no /proc"), torch=Unknown("torch is not installed"))
    found = parse_exposition(exposition(make.made(machine=bare)))
    assert "weir_host_memory_total_bytes" not in found
    assert "weir_gpu_vram_total_bytes" not in found
    gauges = parse_exposition(exposition(make.full_report()))["weir_memory_gauge_bytes"]
    assert list(gauges) == ['gauge="driver free VRAM",moment="before"']


def test_labels_are_escaped() -> None:
    report = make.made(machine=make.machine(host='a"b\\c\nd'))
    assert 'host="a\\"b\\\\c\\nd"' in exposition(report)
    parse_exposition(exposition(report))


def test_published_schema_is_that_of_the_code() -> None:
    published = (ROOT / "docs" / "schema" / "probe-report.schema.json").read_text()
    assert published == report_schema(), (
        "reports have changed: python3 -m probes schema > docs/schema/probe-report.schema.json"
    )


SCHEMA = Draft202012Validator(json.loads(report_schema()))


@pytest.mark.thorough
def test_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(json.loads(report_schema()))


@pytest.mark.parametrize("report", [make.full_report(), make.cpu_report(), make.broken_report()])
def test_made_reports_keep_to_the_schema(report: ProbeReport) -> None:
    assert not list(SCHEMA.iter_errors(thinned(json.loads(to_json(report)))))


@pytest.mark.thorough
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_kept_results_keep_to_the_schema(path: Path) -> None:
    assert not list(SCHEMA.iter_errors(thinned(json.loads(path.read_text()))))


def thinned(value: object) -> object:
    """The document with one of each form in its lists, which in a full run hold 400,000 samples."""
    if isinstance(value, dict):
        return {key: thinned(each) for key, each in value.items()}
    if isinstance(value, list):
        return [thinned(each) for each in {form(each): each for each in value}.values()]
    return value


def form(value: object) -> object:
    """What two parts of a document must share to be one to a schema: keys, texts, and kinds of numbers."""
    if isinstance(value, dict):
        return tuple((key, form(each)) for key, each in value.items())
    if isinstance(value, list):
        return frozenset(map(form, value))
    return type(value) if isinstance(value, int | float) else value


def spoilt(change: str) -> object:
    value = json.loads(to_json(make.full_report()))
    first = value["runs"][0]["records"][0]
    match change:
        case "version":
            value["schema_version"] = 3
        case "missing":
            del value["machine"]["host"]
        case "type":
            first["payload_bytes"] = "4096"
        case "tag":
            first["is"] = "rumour"
        case "null":
            first["wall_s"] = None
    return value


@pytest.mark.parametrize("change", ["version", "missing", "type", "tag", "null"])
def test_schema_refuses_what_is_no_report(change: str) -> None:
    assert not SCHEMA.is_valid(thinned(spoilt(change)))


def test_schema_allows_keys_that_it_does_not_know() -> None:
    value = json.loads(to_json(make.full_report()))
    value["runs"][0]["records"][0]["moon_phase"] = "new"
    assert not list(SCHEMA.iter_errors(thinned(value)))


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, str]:
    paths = {}
    for name, report in {"full": make.full_report(), "cpu": make.cpu_report()}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(to_json(report))
        paths[name] = str(path)
    (tmp_path / "torn.json").write_text('{"schema_version": 1')
    return {**paths, "torn": str(tmp_path / "torn.json"), "absent": str(tmp_path / "absent.json")}


def test_unlike_reports_end_the_program_with_exit_code_5(kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "compare", kept["full"], kept["cpu"]]) == 5
    assert "can't be compared: GPU: Some GPU (gfx1100) / none" in capsys.readouterr().err
    assert main(["probe", "compare", kept["full"], kept["cpu"], "--force"]) == 0
    assert capsys.readouterr().out.startswith("# A: ")


@pytest.mark.parametrize("way", ["html", "prometheus"])
@pytest.mark.parametrize("which", ["torn", "absent"])
def test_file_that_is_no_report_is_named(
    way: str, which: str, kept, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", way, kept[which]]) == 5
    said = capsys.readouterr().err
    assert kept[which] in said
    assert "Traceback" not in said


def test_page_never_takes_the_place_of_its_report(kept, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(kept["full"]).read_text()
    assert main(["probe", "html", kept["full"], "--out", kept["full"]]) == 2
    assert "--out FILE.html" in capsys.readouterr().err
    assert Path(kept["full"]).read_text() == before


def test_metrics_go_to_standard_output(kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "prometheus", kept["full"]]) == 0
    parse_exposition(capsys.readouterr().out)
