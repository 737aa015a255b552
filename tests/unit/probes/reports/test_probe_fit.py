import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_fakes import FakeBench
from probe_samples import SETTINGS, done, report

from probes.core.errors import ContentMismatch
from probes.core.unknown import Unknown
from probes.measure import breakeven, transfer
from probes.records import stats
from probes.records.rows import Gap, Measurement, Reads, Record
from probes.records.schema import Settings
from probes.reports import crossover
from probes.reports.crossover import Fit, Point
from probes.reports.run_findings import findings, least_reads, pick, surely_reads

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = tuple(4 * KIB * 4**i for i in range(10))
alphas = st.floats(1e-6, 1e-3)
rates = st.floats(1e9, 5e12)


def on_line(alpha: float, beta: float, sizes: tuple[int, ...] = SIZES) -> list[Point]:
    return [Point(n, alpha + n / beta) for n in sizes]


def fitted(points: list[Point]) -> Fit:
    found = crossover.fit(points)
    assert isinstance(found, Fit), found
    return found


@given(alphas, rates)
def test_points_on_a_line_give_it_back_in_one_piece(alpha: float, beta: float) -> None:
    found = fitted(on_line(alpha, beta))
    assert len(found.pieces) == 1
    assert found.residual < 1e-6
    assert found.pieces[0].alpha_s == pytest.approx(alpha, rel=1e-3)
    assert found.seconds(GIB) == pytest.approx(alpha + GIB / beta, rel=1e-6)


@given(alphas, rates)
def test_half_of_the_bandwidth_is_reached_at_n_half(alpha: float, beta: float) -> None:
    piece = fitted(on_line(alpha, beta)).pieces[0]
    if math.isfinite(piece.half_bytes):
        reached = piece.half_bytes / piece.seconds(piece.half_bytes)
        assert reached == pytest.approx(piece.beta_gb_per_s * 1e9 / 2)


@pytest.mark.thorough
@settings(max_examples=50)
@given(alphas, rates, st.integers(3, 6), st.floats(3, 50))
def test_a_break_is_found_where_the_way_changes(alpha: float, beta: float, place: int, jump: float) -> None:
    """Beyond the break both latency and time per byte are `jump` times those before it."""
    points = [
        Point(p.n_bytes, p.seconds * (1.0 if i <= place else jump))
        for i, p in enumerate(on_line(alpha, beta))
    ]
    found = crossover.fit(points)
    one = Fit((crossover.line(points),), 0.0)
    straight = max(abs(one.seconds(p.n_bytes) / p.seconds - 1) for p in points)
    if isinstance(found, Fit):
        assert found.residual <= min(straight, crossover.WORST_RESIDUAL)
        assert all(a.last_bytes == b.first_bytes for a, b in pairwise(found.pieces))


@pytest.mark.thorough
@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=10))
def test_whatever_the_times_the_fit_is_good_enough_or_refused(times: list[float]) -> None:
    points = [Point(n, t) for n, t in zip(SIZES, times, strict=False)]
    found = crossover.fit(points)
    if isinstance(found, Unknown):
        assert found.reason
        return
    assert found.residual <= crossover.WORST_RESIDUAL
    assert all(p.alpha_s >= 0 and p.s_per_byte >= 0 for p in found.pieces)
    assert all(
        abs(found.seconds(p.n_bytes) / p.seconds - 1) <= found.residual + 1e-9 for p in ends(found, points)
    )


def ends(found: Fit, points: list[Point]) -> list[Point]:
    """The points that belong to one piece alone: at a shared end two pieces may say two things."""
    shared = {piece.last_bytes for piece in found.pieces[:-1]}
    return [p for p in points if p.n_bytes not in shared]


@given(alphas, rates, st.floats(0.9, 1.1))
def test_a_scale_of_time_scales_the_fit(alpha: float, beta: float, scale: float) -> None:
    one = fitted(on_line(alpha, beta))
    other = fitted([Point(p.n_bytes, p.seconds * scale) for p in on_line(alpha, beta)])
    assert other.seconds(MIB) == pytest.approx(one.seconds(MIB) * scale, rel=1e-6)


def test_two_points_are_no_fit_and_wild_ones_are_refused_with_the_miss() -> None:
    assert isinstance(crossover.fit(on_line(1e-6, 1e9)[:2]), Unknown)
    wild = crossover.fit([Point(n, t) for n, t in zip(SIZES, [1.0, 9.0, 1.0, 9.0], strict=False)])
    assert isinstance(wild, Unknown)
    assert "miss by up to" in wild.reason
    with pytest.raises(ValueError, match="no points"):
        crossover.line([])


def test_between_measured_sizes_is_the_straight_line() -> None:
    points = on_line(1e-5, 1e10)
    for n in (KIB, 6 * KIB, 3 * MIB, 2 * GIB):
        assert crossover.between(points, n) == pytest.approx(1e-5 + n / 1e10)
    with pytest.raises(ValueError, match="two points"):
        crossover.between(points[:1], 1)


def timed(seconds: float, error: float = 0.0) -> crossover.Timed:
    return crossover.Timed(seconds, error)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_at_k_star_both_ways_take_as_long(copy: float, in_place: float, vram: float) -> None:
    found = crossover.k_star(MIB, timed(copy), in_place=timed(in_place), vram=timed(vram))
    if math.isinf(found.reads):
        assert in_place <= vram
    else:
        assert copy + found.reads * vram == pytest.approx(found.reads * in_place, rel=1e-6)


def test_a_read_that_touches_a_tenth_needs_ten_times_as_many() -> None:
    whole = crossover.k_star(MIB, timed(1.0), in_place=timed(2.0), vram=timed(1.0))
    tenth = crossover.k_star(MIB, timed(1.0), in_place=timed(2.0), vram=timed(1.0), share=0.1)
    assert tenth.reads == pytest.approx(10 * whole.reads)


def test_errors_are_carried_on() -> None:
    found = crossover.k_star(MIB, timed(1.0, 0.1), in_place=timed(2.0), vram=timed(1.0))
    assert found.error == pytest.approx(0.1)
    both = crossover.k_star(MIB, timed(1.0, 0.1), in_place=timed(2.0, 0.1), vram=timed(1.0))
    assert both.error == pytest.approx(math.hypot(0.1, 0.1))


@pytest.fixture(scope="module")
def simulated() -> list[Record]:
    """Transfer and breakeven on the simulated machine, which knows its true k*."""
    kept, transfer.MOST_SLOTS = transfer.MOST_SLOTS, 4
    bench = FakeBench()
    found = [*transfer.run(bench, SETTINGS, 32 * GIB), *breakeven.run(bench, SETTINGS, 32 * GIB)]
    transfer.MOST_SLOTS = kept
    return found


@pytest.mark.thorough
def test_prediction_meets_measurement_on_a_simulated_machine(simulated: list[Record]) -> None:
    met = crossover.crossings(pick(simulated, Measurement), pick(simulated, Reads))
    assert isinstance(met, tuple)
    assert {crossing.n_bytes for crossing in met} == set(breakeven.QUICK_SIZES)
    assert all(crossing.distance < 0.01 for crossing in met)
    assert all(crossing.measured.error == pytest.approx(0, abs=1e-6) for crossing in met)


@pytest.mark.thorough
def test_the_faster_way_is_reported_for_each_count_of_reads(simulated: list[Record]) -> None:
    ways = crossover.faster(pick(simulated, Reads))
    assert len(ways) == len(breakeven.QUICK_SIZES) * len(breakeven.QUICK_READS)
    assert ways[(64 * MIB, 8)] == "copy_first"


@pytest.mark.thorough
def test_the_advice_is_in_words(simulated: list[Record]) -> None:
    text = "\n".join(findings(report(done("transfer", *simulated))))
    assert "copy it to VRAM first, even for one read" in text
    assert "Predicted and measured break-even differ by" in text


@pytest.mark.parametrize(
    ("reads", "error", "least", "sure"),
    [
        (0.5, 0.0, 1, 1),
        (1.0, 0.0, 2, 2),
        (1.5, 0.0, 2, 2),
        (0.99, 0.01, 1, 2),
        (1.01, 0.01, 1, 2),
        (1.5, 0.3, 1, 3),
        (math.inf, math.inf, None, None),
    ],
)
def test_whole_reads_from_which_copying_pays_take_the_error_into_account(
    reads: float, error: float, least: int | None, sure: int | None
) -> None:
    at = crossover.BreakEven(MIB, reads, error)
    assert (least_reads(at), surely_reads(at)) == (least, sure)


@pytest.mark.thorough
def test_the_error_of_a_measured_break_even_is_that_of_repeated_runs() -> None:
    """Lines through noisy times, again and again: their crossings scatter as the error says."""
    draw = random.Random(4)
    found = []
    for _ in range(80):
        rows = []
        for k in range(1, 9):
            for way, time_s in (("copy_first", 10e-6 + k * 1e-6), ("in_place", k * 6e-6)):
                times = [
                    tuple(time_s * (1 + off) * draw.gauss(1, 0.001) for _ in range(20))
                    for off in (draw.gauss(0, 0.01) for _ in range(3))
                ]
                one, *more = (Reads(way, k, MIB, 1, t, t) for t in times)  # type: ignore[arg-type]
                rows.append(replace(one, repeats=tuple(more)))
        seen = crossover.measured(rows, MIB)
        assert isinstance(seen, crossover.BreakEven)
        found.append(seen)
    assert stats.median([one.reads for one in found]) == pytest.approx(2.0, abs=0.01)
    scatter = stats.deviation([one.reads for one in found])
    assert stats.median([one.error for one in found]) == pytest.approx(scatter, rel=0.4)


@pytest.mark.thorough
def test_a_prediction_errs_by_its_own_size_and_not_by_the_worst_of_all() -> None:
    """The reads of the smallest buffer scatter widely; that of a large one isn't the worse for it."""
    rows = []
    for size in (64 * KIB, MIB, 16 * MIB, 256 * MIB):
        for name, rate in (("h2d_then_read", 40e9), ("zero_copy_read", 51e9), ("vram_reread", 3000e9)):
            noise = 0.2 if size == 64 * KIB else 0.001
            t = 1e-6 + size / rate
            one, *more = (
                Measurement(name, size, size, 1, "device", (t * f,) * 20, (t,) * 20)
                for f in (1 - noise, 1.0, 1 + noise)
            )
            rows.append(replace(one, repeats=tuple(more)))
    advice = crossover.adviser(rows)
    assert isinstance(advice, crossover.Adviser)
    small, large = advice.at(64 * KIB), advice.at(256 * MIB)
    assert small.error / small.reads > 0.1
    assert large.error / large.reads < 0.01


def test_without_the_paths_nothing_is_predicted(simulated: list[Record]) -> None:
    assert isinstance(crossover.adviser([]), Unknown)
    assert isinstance(crossover.measured([], MIB), Unknown)
    text = "\n".join(findings(report(done("breakeven", *pick(simulated, Reads)))))
    assert "can't be predicted: h2d_then_read was measured at 0 sizes" in text


def test_wrong_sums_stop_the_probe() -> None:
    with pytest.raises(ContentMismatch, match="breakeven"):
        list(breakeven.run(FakeBench(corrupts="read"), SETTINGS, 32 * GIB))


def test_without_zero_copy_every_size_is_a_gap() -> None:
    found = list(breakeven.run(FakeBench(has_zero_copy=False), SETTINGS, 32 * GIB))
    assert [type(record) for record in found] == [Gap] * len(breakeven.QUICK_SIZES)


@pytest.mark.thorough
def test_rereads_go_on_where_they_were_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_SLOTS", 4)
    first = pick(list(breakeven.run(FakeBench(), SETTINGS, 32 * GIB)), Reads)
    rest = pick(list(breakeven.run(FakeBench(), SETTINGS, 32 * GIB, done={r.case for r in first[:7]})), Reads)
    assert [r.case for r in rest] == [r.case for r in first[7:]]


def test_full_mode_reads_one_to_eight_times_from_64_kib_to_256_mib() -> None:
    assert breakeven.FULL_READS == (1, 2, 4, 8)
    assert (breakeven.FULL_SIZES[0], breakeven.FULL_SIZES[-1]) == (64 * KIB, 256 * MIB)
    assert Settings(quick=False, seed=1, vram_cap_bytes=None).models == ()
