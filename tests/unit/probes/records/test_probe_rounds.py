"""Rounds put together, and what a report of the first schema has of them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_samples import SETTINGS, TIMES, passes, report

from probes.core.codec import to_json
from probes.core.unknown import Unknown
from probes.measure import catalog, schedule
from probes.records.rounds import FULL_ROUNDS, QUICK_ROUNDS, merged
from probes.records.rows import Gap, Measurement, Noise, Reads, Split, Stop
from probes.records.schema import Done, Failed, ProbeReport, ProbeRun, Settings, from_json
from probes.records.stats import summarize
from probes.reports.kinds import RUN
from probes.reports.run_findings import all_records, pick

FULL = Settings(quick=False, seed=1, vram_cap_bytes=None)


def row(name: str, size: int, seconds: float, **more: object) -> Measurement:
    samples = (seconds, seconds * 1.001)
    return replace(Measurement(name, size, size, 1, "device", samples, (1.0,)), **more)  # type: ignore[arg-type]


def rounds(*records: tuple[object, ...]) -> ProbeReport:
    """A report of one probe, a run for each round."""
    runs = [ProbeRun("transfer", Done(), 2.0, each, turn) for turn, each in enumerate(records)]  # type: ignore[arg-type]
    return report(*runs)


def test_each_case_comes_once_with_the_samples_of_every_process() -> None:
    kept = rounds(
        (row("a", 1, 1.0), row("b", 1, 5.0)), (row("b", 1, 6.0), row("a", 1, 2.0)), (row("a", 1, 3.0),)
    )
    found = pick(all_records(kept), Measurement)
    assert [(one.case, [times[0] for times in one.times_s]) for one in found] == [
        ("a 1", [1.0, 2.0, 3.0]),
        ("b 1", [5.0, 6.0]),
    ]
    (run,) = merged(kept).runs
    assert (run.processes, run.seconds) == (3, 6.0)
    assert "done in 6.0 s by 3 processes" in RUN.text(kept)


def test_what_was_seen_beside_any_process_counts() -> None:
    first = row("a", 1, 1.0, noise=Noise((), ("no NVML",)))
    second = row("a", 1, 1.0, noise=Noise(("foreign: x",), ("no NVML",)), host_bound=True)
    (found,) = pick(all_records(rounds((first,), (second,))), Measurement)
    assert found.noise == Noise(("foreign: x",), ("no NVML",))
    assert found.host_bound


def test_the_worst_difference_and_a_known_split_represent_a_pass() -> None:
    one = replace(passes(1, TIMES)[0], difference=0.1, split=Unknown("host-bound"))
    other = replace(one, difference=0.2, split=Split(1.0, 0.0, 2.0))
    found = merged(rounds((one,), (other,))).runs[0].records[0]
    assert (found.difference, found.split) == (0.2, Split(1.0, 0.0, 2.0))  # type: ignore[union-attr]


def test_a_gap_gives_way_to_a_row_and_comes_once() -> None:
    gap, other = Gap("a", 1, "memory was short"), Gap("c", 1, "none here")
    # a gap has its path's name in its case, as a row of the same size has
    found = merged(rounds((gap, other), (row("a", 1, 1.0), other))).runs[0].records
    assert [type(record) for record in found] == [Gap, Measurement]


def test_records_that_represent_no_case_are_all_kept() -> None:
    stop = Stop("refused", 1, "no more")
    assert merged(rounds((stop,), (stop,))).runs[0].records == (stop, stop)


def test_a_failure_in_any_round_is_the_probes() -> None:
    broken = Failed("it broke", "", 4, wedged=False)
    kept = report(ProbeRun("transfer", Done(), 1.0, ()), ProbeRun("transfer", broken, 1.0, (), 1))
    assert merged(kept).runs[0].outcome == broken


@pytest.mark.thorough
@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from("abc"), unique=True, max_size=3), min_size=1, max_size=4))
def test_putting_together_twice_changes_nothing_and_loses_no_sample(cases: list[list[str]]) -> None:
    kept = rounds(*[tuple(row(name, 1, 1.0 + i) for name in names) for i, names in enumerate(cases)])
    once = merged(kept)
    assert merged(once) == once
    assert sum(len(m.times_s) for m in pick(once.runs[0].records, Measurement)) == sum(map(len, cases))


def test_a_file_holds_a_run_for_each_process_and_no_derived_field() -> None:
    kept = rounds((row("a", 1, 1.0),), (row("a", 1, 2.0),))
    text = to_json(kept)
    assert from_json(text) == kept
    value = json.loads(text)
    assert [run["round"] for run in value["runs"]] == [0, 1]
    assert "repeats" not in text
    assert "processes" not in value["runs"][0]
    # what was put together is no longer what a file holds: it is written from the runs
    assert len(json.loads(to_json(merged(kept)))["runs"]) == 1


def test_a_report_of_the_first_schema_is_read_as_one_process() -> None:
    value = json.loads(to_json(rounds((row("a", 1, 1.0), Reads("in_place", 1, 1, 1, (1.0,), (1.0,))))))
    value["schema_version"] = 1
    for run in value["runs"]:
        del run["round"]
        for record in run["records"]:
            record.pop("host_bound")
    found = from_json(json.dumps(value))
    assert [one.times_s for one in pick(all_records(found), Measurement)] == [((1.0, 1.001),)]
    assert summarize(pick(all_records(found), Measurement)[0].times_s).between is None


def test_rounds_alternate_so_that_those_of_a_case_are_apart_in_time() -> None:
    for mode, count in ((SETTINGS, QUICK_ROUNDS), (FULL, FULL_ROUNDS)):
        order = [(probe.name, turn) for probe, turn in schedule.schedule(catalog.PROBES, mode)]
        assert order[:4] == [("transfer", 0), ("breakeven", 0), ("spill", 0), ("scenarios", 0)]
        assert order[4:6] == [("transfer", 1), ("breakeven", 1)]
        turns = {name: [turn for each, turn in order if each == name] for name, _ in order}
        assert turns["transfer"] == turns["breakeven"] == list(range(count))
        assert turns["spill"] == [0]
        assert turns["scenarios"] == ([0] if mode.quick else list(range(count)))
    assert (QUICK_ROUNDS, FULL_ROUNDS) == (2, 3)
