"""The judgement of two reports, on simulated runs that scatter as an H200's rows were seen to.

RECORDED holds, for each kind of row, how many of a full run are of that kind, whether they are of 1 MiB or
more, and the relative standard deviation of its processes' medians (three processes, one full run of
2026-11-21). One process in forty is off by up to a sixth, as the first of a cold machine is.
"""

import math
import random
import statistics
from dataclasses import replace
from functools import cache

import made_reports as make
import pytest

from probes.records.schema import Measurement, Noise, ProbeReport, ProbeRun, Reads, Unknown
from probes.report.compare import compare
from probes.report.ratio import Ratio, Scatter, scatter, shared_by_kind, speed_ratio, typical

pytestmark = pytest.mark.thorough

RECORDED = (  # kind, rows, of 1 MiB or more, standard deviation between processes
    ("link, large", 30, True, 0.0020),
    ("link, small", 20, False, 0.0090),
    ("VRAM, large", 24, True, 0.0030),
    ("VRAM, small", 16, False, 0.0090),
    ("reads, large", 40, True, 0.0040),
    ("reads, small", 16, False, 0.0180),
    ("pageable, large", 12, True, 0.0230),
    ("pageable, small", 8, False, 0.0700),
    ("passes", 40, True, 0.0080),
)
PROCESSES, SAMPLES, OFF = 3, 20, 1 / 40
Row = tuple[tuple[float, ...], ...]


def process(draw: random.Random, scatter: float) -> tuple[float, ...]:
    """Samples of one process, which itself is a little faster or slower than others."""
    middle = math.exp(draw.gauss(0, scatter)) * (1 + (draw.uniform(0.02, 0.17) if draw.random() < OFF else 0))
    return tuple(middle * draw.gauss(1, 0.003) for _ in range(SAMPLES))


@cache
def two_runs(seed: int) -> tuple[dict[tuple[str, int], tuple[Row, Row]], dict[tuple[str, int], bool]]:
    """Rows of two runs of one machine, and whether each is of 1 MiB or more."""
    draw = random.Random(seed)
    rows = {}
    large = {}
    for kind, count, is_large, spread in RECORDED:
        for i in range(count):
            own = spread * math.exp(draw.gauss(0, 0.3))
            a, b = (tuple(process(draw, own) for _ in range(PROCESSES)) for _ in range(2))
            rows[kind, i], large[kind, i] = (a, b), is_large
    return rows, large


def called(seed: int, slowdown: float) -> tuple[list[bool], list[bool]]:
    """Whether each row is called different in two runs of one machine: all rows, and those from 1 MiB on."""
    unslowed, large = two_runs(seed)
    rows = {
        key: (a, tuple(tuple(t * slowdown for t in one) for one in b)) for key, (a, b) in unslowed.items()
    }
    shared = shared_by_kind((kind, a, b) for (kind, _), (a, b) in rows.items())
    found = {(kind, i): speed_ratio(a, b, shared=shared[kind]).verdict for (kind, i), (a, b) in rows.items()}
    different = {key: verdict in ("faster", "slower") for key, verdict in found.items()}
    return [*different.values()], [different[key] for key in rows if large[key]]


def test_two_runs_of_one_machine_differ_in_no_more_than_two_percent_of_rows() -> None:
    shares = [statistics.mean(called(seed, 1.0)[0]) for seed in range(12)]
    assert statistics.mean(shares) <= 0.02


def test_a_slowdown_of_five_percent_is_found_in_95_percent_of_rows_of_1_mib_or_more() -> None:
    shares = [statistics.mean(called(seed, 1.05)[1]) for seed in range(12)]
    assert statistics.mean(shares) >= 0.95


def times(*medians: float) -> Row:
    return tuple((m * 0.999, m, m, m * 1.001) for m in medians)


def test_a_row_scatters_as_its_processes_do_and_one_that_is_off_counts_little() -> None:
    steady, off = scatter(times(1, 1.002, 1), times(1, 1.002, 0.998)), None
    off = scatter(times(1, 1.002, 1.3), times(1, 1.002, 0.998))
    assert (steady.freedom, off.freedom) == (4, 4)
    assert math.sqrt(off.variance) < 0.01
    wild = scatter(times(1, 1.1, 0.9), times(1, 1.2, 0.9))
    assert math.sqrt(wild.variance) > 0.1
    assert scatter(times(1), times(1)) == Scatter(0.0, 0)


def test_rows_of_a_kind_share_what_they_scatter_without_the_wildest_tenth() -> None:
    rows = [Scatter(1e-4, 4)] * 18 + [Scatter(1.0, 4)] * 2
    assert typical(rows) == pytest.approx(1e-4)
    assert typical([]) == 0.0


def test_reports_of_one_process_are_not_judged() -> None:
    ratio = speed_ratio(times(1.0), times(2.0), shared=0.0)
    assert (ratio.value, ratio.error) == (0.5, None)
    assert ratio.verdict == "can't be judged: one process"
    found = compare(make.full_report(), make.full_report(seed=2), names=("a", "b"))
    verdicts = {line.speed.verdict for line in found.lines if not isinstance(line.speed, Unknown)}
    assert verdicts == {"can't be judged: one process"}


def test_samples_that_scatter_within_a_process_widen_the_error_too() -> None:
    """Processes agree by chance; their own medians are known to a tenth only."""
    wide = ((0.5, 1.0, 1.5, 0.6, 1.4),) * 3
    assert speed_ratio(wide, wide, shared=0.0).error > 0.1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(1.2, 0.01), "faster"),
        (Ratio(0.8, 0.01), "slower"),
        (Ratio(1.2, 0.1), "same within errors"),
        (Ratio(1.02, 0.0001), "same within errors"),
        (Ratio(1.2, 0.01, disturbed=True), "can't be judged: disturbed"),
        (Ratio(1.0, 0.01, disturbed=True), "same within errors"),
        (Ratio(1.2, None), "can't be judged: one process"),
    ],
)
def test_ratio_is_called_different_only_beyond_errors_and_a_notable_amount(
    ratio: Ratio, verdict: str
) -> None:
    assert ratio.verdict == verdict


def slowed(report: ProbeReport, factor: float, *, flags: tuple[str, ...] = ()) -> ProbeReport:
    """The same report with every transfer's and reread's time multiplied."""

    def one(record: object) -> object:
        if not isinstance(record, Measurement | Reads) or isinstance(record.device_s, Unknown):
            return record
        device, wall = (tuple(t * factor for t in side) for side in (record.device_s, record.wall_s))
        return replace(record, device_s=device, wall_s=wall, noise=Noise(flags, ()))

    def run(old: ProbeRun) -> ProbeRun:
        return replace(old, records=tuple(map(one, old.records)))  # type: ignore[arg-type]

    return replace(report, runs=tuple(map(run, report.runs)))


def test_compare_judges_by_what_differs_between_processes() -> None:
    """Processes scatter by 0.4 % here: 5 % are found, and another run of the same machine is the same."""
    a, b = make.three_rounds(seed=1), make.three_rounds(seed=2)

    def verdicts(of: ProbeReport) -> list[str]:
        lines = compare(a, of, names=("a", "b")).lines
        return [x.speed.verdict for x in lines if not isinstance(x.speed, Unknown) and x.key[0] != "pass"]

    assert verdicts(b).count("same within errors") >= 0.98 * len(verdicts(b))
    assert verdicts(slowed(b, 1.05)).count("slower") >= 0.95 * len(verdicts(b))


def test_a_disturbed_row_is_not_called_slower() -> None:
    a, b = make.three_rounds(seed=1), slowed(make.three_rounds(seed=2), 1.3, flags=("foreign: x",))
    found = compare(a, b, names=("a", "b")).lines
    judged = {x.speed.verdict for x in found if not isinstance(x.speed, Unknown) and x.key[0] == "transfer"}
    assert judged == {"can't be judged: disturbed"}


def test_a_comparison_names_the_processes_behind_each_figure() -> None:
    line = compare(make.three_rounds(), make.full_report(), names=("a", "b")).lines[0]
    assert line.a.endswith("(n=60, 3 processes)")
    assert line.b.endswith("(n=20, 1 process)")
