"""Relations that the report of a quick run must show on any discrete GPU (WEIR_REPORT names the file)."""

import os
import re
import statistics
from pathlib import Path

import pytest
from device_bars import Bar

from probes.records import stats
from probes.records.rounds import merged
from probes.records.rows import Block, Expectation, Measurement, Noise, Pass, Reads, Request, Stop
from probes.records.schema import Done, ProbeReport, read_report
from probes.reports import crossover, run_findings
from probes.reports.run_findings import all_records, best_gb_per_s, pick, took_s

QUICK_S, FULL_S = 45.0, 600.0


@pytest.fixture(scope="module")
def report() -> ProbeReport:
    path = os.environ.get("WEIR_REPORT")
    if not path:
        pytest.skip("needs WEIR_REPORT, the report of a run on this machine")
    found = merged(read_report(Path(path)))
    if found.machine.torch.tag == "unknown" or found.machine.torch.obstacle:
        pytest.skip("needs the report of a run with a GPU")
    return found


def rate(report: ProbeReport, name: str) -> float:
    found = best_gb_per_s(all_records(report), name)
    assert found is not None, f"{name} was not measured"
    return found


def test_every_probe_ran_to_its_end(report: ProbeReport) -> None:
    assert [run.probe for run in report.runs] == ["transfer", "breakeven", "spill", "scenarios"]
    assert all(isinstance(run.outcome, Done) for run in report.runs), report.runs


def test_a_run_takes_no_longer_than_it_may(bar: Bar, report: ProbeReport) -> None:
    took = os.environ.get("WEIR_QUICK_S")
    if not took:
        pytest.skip("needs WEIR_QUICK_S, the seconds that the run took")
    parts = {run.probe: round(run.seconds, 1) for run in report.runs}
    mode, limit = ("quick", QUICK_S) if report.settings.quick else ("full", FULL_S)
    bar(f"{mode} run of all probes", float(took), limit=limit, unit="s", parts=parts)


LEFT = re.compile(
    r"-- (?:(?P<min>\d+) min )?(?P<s>\d+) s so far, .* about (?P<left>\d+) (?P<unit>s|min) left"
)


def test_the_time_left_is_shown_and_about_right(bar: Bar) -> None:
    log, took = os.environ.get("WEIR_LOG"), os.environ.get("WEIR_QUICK_S")
    if not log or not took:
        pytest.skip("needs WEIR_LOG, what the run printed, and WEIR_QUICK_S")
    shown = list(LEFT.finditer(Path(log).read_text()))
    bar("lines that tell the time left", len(shown), limit=4, unit="lines", at_least=True)
    foretold = [
        60 * int(m["min"] or 0) + int(m["s"]) + int(m["left"]) * (60 if m["unit"] == "min" else 1)
        for m in shown
    ]
    off = [abs(whole / float(took) - 1) for whole in foretold]
    bar("whole time foretold, half of the lines within", statistics.median(off), limit=0.35, unit="1")


def test_break_even_is_as_predicted(bar: Bar, report: ProbeReport) -> None:
    records = all_records(report)
    met = crossover.crossings(pick(records, Measurement), pick(records, Reads))
    assert isinstance(met, tuple), met
    assert met
    for crossing in met:
        bar(
            f"break-even at {crossing.n_bytes >> 10} KiB, predicted against measured",
            crossing.distance,
            limit=0.15,
            unit="1",
            predicted=round(crossing.predicted.reads, 3),
            measured=round(crossing.measured.reads, 3),
        )


def test_pinned_copies_follow_a_fit(report: ProbeReport) -> None:
    """A fit that misses a point by more than 20 % is refused, with the reason in its place."""
    for name in ("h2d_pinned", "d2h_pinned", "zero_copy_write"):
        found = crossover.fit(crossover.points_of(pick(all_records(report), Measurement), name))
        assert isinstance(found, crossover.Fit), (name, found)


def test_nothing_else_was_seen_on_this_machine(bar: Bar, report: ProbeReport) -> None:
    rows = [row for kind in (Measurement, Reads, Pass) for row in pick(all_records(report), kind)]
    watched = [row.noise for row in rows if isinstance(row.noise, Noise)]
    assert len(watched) == len(rows)
    foreign = [noise for noise in watched if any(flag.startswith("foreign") for flag in noise.flags)]
    bar("rows flagged for foreign users", len(foreign) / len(rows), limit=0.02, unit="1", rows=len(rows))


def test_pinned_copies_are_not_slower_than_pageable_ones(bar: Bar, report: ProbeReport) -> None:
    for way in ("h2d", "d2h"):
        pinned, pageable = rate(report, f"{way}_pinned"), rate(report, f"{way}_pageable")
        bar(
            f"{way}: pinned over pageable",
            pinned / pageable,
            limit=1.0,
            unit="1",
            at_least=True,
            gb_per_s=pinned,
        )


def test_the_memories_rank_as_they_must(bar: Bar, report: ProbeReport) -> None:
    pinned, in_place, vram = (rate(report, n) for n in ("h2d_pinned", "zero_copy_read", "vram_read"))
    bar("zero-copy read over pinned copy", in_place / pinned, limit=1.05, unit="1", gb_per_s=in_place)
    bar("VRAM read over zero-copy read", vram / in_place, limit=3.0, unit="1", at_least=True, gb_per_s=vram)


def test_samples_are_steady(bar: Bar, report: ProbeReport) -> None:
    records = all_records(report)
    rows = [*pick(records, Measurement), *pick(records, Reads), *pick(records, Pass)]
    told = [stats.summarize(row.times_s) for row in rows]
    steady = [one for one in told if one.within is not None and one.within <= 0.02 * one.median]
    agree = [one for one in told if one.error is not None and one.error <= 0.02 * one.median]
    bar(
        "rows with an error within a process <= 2 %",
        len(steady) / len(told),
        limit=0.9,
        unit="1",
        at_least=True,
        rows=len(told),
        with_what_differs_between_processes=round(len(agree) / len(told), 3),
    )


def test_spill_probe_did_what_was_expected(bar: Bar, report: ProbeReport) -> None:
    records = all_records(report)
    expected, requests = pick(records, Expectation)[0], pick(records, Request)
    oversize = [request for request in requests if request.purpose == "oversize"]
    assert pick(records, Stop)
    assert oversize
    if expected.behaviour == "refuses":
        assert not oversize[0].granted
        assert pick(records, Stop)[-1].cause == "refused"
    assert len([request for request in requests if request.purpose == "forced"]) >= 6


def test_every_block_is_labelled_as_it_was_placed(bar: Bar, report: ProbeReport) -> None:
    placed = run_findings.label_blocks(pick(all_records(report), Block))
    if pick(all_records(report), Expectation)[0].behaviour != "refuses":
        pytest.skip("where a driver spills, the place of a block isn't known beforehand")
    judged = [p for p in placed if not p.block.control]  # the controls are what the others are held against
    wrong = [p for p in judged if p.by_timing != ("vram" if p.block.asked == "vram" else "host")]
    bar("blocks labelled wrong", len(wrong), limit=0, unit="blocks", blocks=len(judged))
    assert not [p for p in placed if p.disagree]


def test_scenarios_rank_as_they_must(bar: Bar, report: ProbeReport) -> None:
    passes = pick(all_records(report), Pass)
    link = rate(report, "h2d_pinned")
    for rows in (1, 256):
        mine = [p for p in passes if p.model == "mlp" and p.rows == rows]
        took = {p.scenario: took_s(p) for p in mine}
        spilled = next(p.spilled_bytes for p in mine if p.scenario == "streamed")
        limit_s = spilled / link / 1e9
        others = min(took["zero_copy_weights"], took["zero_copy_all"])
        bar(
            f"batch {rows}: resident over the best split",
            took["resident"] / min(others, took["streamed"]),
            limit=1.0,
            unit="1",
        )
        streamed = took["streamed"]
        bar(f"batch {rows}: streamed over the link's limit", streamed / limit_s, limit=1.25, unit="1")
        bar(f"batch {rows}: zero-copy over streamed", others / streamed, limit=1.0, unit="1", at_least=True)
