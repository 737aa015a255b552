"""Two full runs of one machine (WEIR_REPORT_BEFORE, WEIR_REPORT), and the second slowed down."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from device_bars import Bar

from probes.core.unknown import Unknown
from probes.records.rows import Measurement, Pass, Reads, Record
from probes.records.schema import ProbeReport, ProbeRun, read_report
from probes.reports.compare import Key
from probes.reports.run_compare import Comparison, compare
from probes.reports.run_findings import all_records, pick

LARGE = 2**20
SLOWDOWN = 1.05


@pytest.fixture(scope="module")
def two() -> tuple[ProbeReport, ProbeReport]:
    paths = [os.environ.get(name) for name in ("WEIR_REPORT_BEFORE", "WEIR_REPORT")]
    if not all(paths):
        pytest.skip("needs WEIR_REPORT_BEFORE and WEIR_REPORT, reports of two runs of this machine")
    before, after = (read_report(Path(str(path))) for path in paths)
    return before, after


def judged(before: ProbeReport, after: ProbeReport) -> dict[Key, str]:
    """The verdict on every row that both have."""
    found: Comparison = compare(before, after, names=("before", "after"))
    return {
        line.key: str(line.speed) if isinstance(line.speed, Unknown) else line.speed.verdict
        for line in found.lines
    }


def slowed(report: ProbeReport) -> ProbeReport:
    """Every sample of every row takes longer by SLOWDOWN."""

    def one(record: Record) -> Record:
        if not isinstance(record, Measurement | Reads | Pass):
            return record
        device_s = record.device_s
        if not isinstance(device_s, Unknown):
            device_s = tuple(t * SLOWDOWN for t in device_s)
        return replace(record, device_s=device_s, wall_s=tuple(t * SLOWDOWN for t in record.wall_s))

    def run(old: ProbeRun) -> ProbeRun:
        return replace(old, records=tuple(map(one, old.records)))

    return replace(report, runs=tuple(map(run, report.runs)))


def large_rows(report: ProbeReport) -> int:
    records = all_records(report)
    timed = [*pick(records, Measurement), *pick(records, Reads)]
    return len(pick(records, Pass)) + sum(row.payload_bytes >= LARGE for row in timed)


def is_large(key: Key) -> bool:
    """By the size in a row's key; a pass reads all of its weights."""
    return key[0] == "pass" or not key[2].split(",")[0].endswith(("KiB", " B"))


def test_two_runs_of_one_machine_are_not_called_different(
    bar: Bar, two: tuple[ProbeReport, ProbeReport]
) -> None:
    found = judged(*two)
    different = [" ".join(key) for key, verdict in found.items() if verdict in ("faster", "slower")]
    bar(
        "rows called different in two runs of one machine",
        len(different) / len(found),
        limit=0.02,
        unit="1",
        rows=len(found),
        different=different,
    )


def test_a_planted_slowdown_is_found(bar: Bar, two: tuple[ProbeReport, ProbeReport]) -> None:
    before, after = two
    found = {key: verdict for key, verdict in judged(before, slowed(after)).items() if is_large(key)}
    assert len(found) == large_rows(after)
    missed = [" ".join(key) for key, verdict in found.items() if verdict != "slower"]
    bar(
        f"rows of 1 MiB or more in which {SLOWDOWN - 1:.0%} are found",
        1 - len(missed) / len(found),
        limit=0.95,
        unit="1",
        at_least=True,
        rows=len(found),
        missed=missed,
    )
