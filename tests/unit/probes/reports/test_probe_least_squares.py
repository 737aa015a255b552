"""The straight pieces of a fit: the best ones there are, with no figure below zero."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.core.unknown import Unknown
from probes.reports import crossover as fit
from probes.reports.crossover import Fit, Piece, Point

KIB, MIB = 2**10, 2**20
seconds = st.floats(1e-6, 1e-2)


def squared(points: list[Point], alpha: float, slope: float) -> float:
    return sum(((alpha + slope * p.n_bytes) / p.seconds - 1) ** 2 for p in points)


@given(st.lists(seconds, min_size=2, max_size=8))
def test_no_line_with_both_figures_above_zero_is_nearer(times: list[float]) -> None:
    points = [Point(KIB * 4**i, t) for i, t in enumerate(times)]
    found = fit.line(points)
    assert found.alpha_s >= 0
    assert found.s_per_byte >= 0
    best = squared(points, found.alpha_s, found.s_per_byte)
    scale = max(found.alpha_s, 1e-6), max(found.s_per_byte, 1e-12)
    for a in (-0.1, -0.001, 0.0, 0.001, 0.1):
        for b in (-0.1, -0.001, 0.0, 0.001, 0.1):
            near = max(found.alpha_s + a * scale[0], 0.0), max(found.s_per_byte + b * scale[1], 0.0)
            assert best <= squared(points, *near) + 1e-9


def test_latency_that_would_be_negative_is_zero_and_the_slope_makes_up_for_it() -> None:
    points = [Point(n, n / 1e9 - 0.4e-6) for n in (KIB, 2 * KIB, 4 * KIB, 8 * KIB)]
    found = fit.line(points)
    assert found.alpha_s == 0
    ratios = [p.n_bytes / p.seconds for p in points]
    assert found.s_per_byte == pytest.approx(sum(ratios) / sum(r * r for r in ratios))
    assert found.s_per_byte < 1e-9


def test_time_that_falls_with_size_is_flat_at_its_weighted_mean() -> None:
    points = [Point(KIB, 4e-6), Point(2 * KIB, 3e-6), Point(4 * KIB, 2e-6)]
    found = fit.line(points)
    assert found.s_per_byte == 0
    weights = [1 / p.seconds for p in points]
    assert found.alpha_s == pytest.approx(sum(weights) / sum(w * w for w in weights))
    assert found.beta_gb_per_s == math.inf
    assert found.half_bytes == math.inf


def test_points_of_one_size_have_no_slope_of_their_own() -> None:
    found = fit.line([Point(KIB, 2e-6), Point(KIB, 2e-6)])
    assert found.seconds(KIB) == pytest.approx(2e-6)
    assert (found.first_bytes, found.last_bytes) == (KIB, KIB)


def test_latency_and_slope_above_zero_are_kept_however_small() -> None:
    found = fit.line([Point(KIB, 1e-9 + KIB * 1e-9), Point(MIB, 1e-9 + MIB * 1e-9), Point(16, 17e-9)])
    assert found.alpha_s == pytest.approx(1e-9, rel=1e-6)
    assert found.s_per_byte == pytest.approx(1e-9, rel=1e-9)
    flat = fit.line([Point(n, 1e-3 + n * 1e-12) for n in (KIB, MIB, 64 * MIB)])
    assert flat.alpha_s == pytest.approx(1e-3, rel=1e-6)
    assert flat.s_per_byte == pytest.approx(1e-12, rel=1e-4)


def test_figures_of_a_piece_have_their_units() -> None:
    piece = Piece(KIB, MIB, 1e-5, 1e-10)
    assert piece.seconds(10**6) == pytest.approx(1.1e-4)
    assert piece.beta_gb_per_s == pytest.approx(10.0)
    assert piece.half_bytes == pytest.approx(100_000)


def test_a_change_of_way_makes_two_pieces_that_share_a_measured_size() -> None:
    points = [Point(n, max(4e-6 + n / 1e10, n / 1e9)) for n in (KIB * 2**i for i in range(10))]
    found = fit.fit(points)
    assert isinstance(found, Fit)
    assert len(found.pieces) == 2
    first, second = found.pieces
    assert first.last_bytes == second.first_bytes
    assert found.residual <= fit.GOOD_RESIDUAL
    assert found.piece(first.last_bytes) is first
    assert found.piece(first.last_bytes + 1) is second
    assert found.piece(1 << 40) is second
    assert found.seconds(512 * KIB) == pytest.approx(512 * KIB / 1e9, rel=0.06)


def test_residual_is_the_largest_relative_distance_of_a_point_from_its_piece() -> None:
    points = [
        Point(n, (1e-5 + n / 1e10) * (1.04 if i == 2 else 1.0))
        for i, n in enumerate(KIB * 4**j for j in range(6))
    ]
    found = fit.fit(points)
    assert isinstance(found, Fit)
    assert len(found.pieces) == 1
    misses = [abs(found.seconds(p.n_bytes) / p.seconds - 1) for p in points]
    assert found.residual == max(misses)
    assert found.residual > 0.01


def test_a_second_piece_is_not_added_to_a_fit_that_is_good_already() -> None:
    points = [Point(KIB * 4**i, (1e-5 + KIB * 4**i / 1e10) * (1.02 if i % 2 else 0.98)) for i in range(9)]
    found = fit.fit(points)
    assert isinstance(found, Fit)
    assert len(found.pieces) == 1


def test_every_piece_has_three_points_and_there_are_four_pieces_at_most() -> None:
    found = fit.fit([Point(KIB * 2**i, 10.0 ** -(6 - i // 3)) for i in range(12)])
    if isinstance(found, Fit):
        assert len(found.pieces) <= 4
        assert all(piece.last_bytes >= 4 * piece.first_bytes for piece in found.pieces)
    assert isinstance(fit.fit([Point(KIB * 2**i, 1e-6) for i in range(3)]), Fit)


def test_points_are_fitted_in_order_of_size_whatever_order_they_come_in() -> None:
    points = [Point(KIB * 4**i, 1e-5 + KIB * 4**i / 1e10) for i in range(6)]
    assert fit.fit(points[::-1]) == fit.fit(points)


def test_sizes_measured_twice_don_t_count_twice() -> None:
    twice = [Point(KIB, 1e-6), Point(KIB, 1e-6), Point(2 * KIB, 2e-6)]
    found = fit.fit(twice)
    assert isinstance(found, Unknown)
    assert "needs 3 sizes, there are 2" in found.reason


def test_a_miss_of_a_fifth_is_refused_with_its_size_and_less_is_not() -> None:
    def zigzag(by: float) -> list[Point]:
        return [Point(n, t) for n, t in zip((KIB, 2 * KIB, 4 * KIB), (1.0, 1.0 + by, 1.0), strict=True)]

    refused = fit.fit(zigzag(0.6))
    assert isinstance(refused, Unknown)
    assert "%" in refused.reason
    kept = fit.fit(zigzag(0.3))
    assert isinstance(kept, Fit)
    assert fit.GOOD_RESIDUAL < kept.residual <= fit.WORST_RESIDUAL


def test_between_uses_the_two_neighbours_and_beyond_the_ends_the_outermost_two() -> None:
    points = [Point(10, 1.0), Point(20, 3.0), Point(40, 4.0), Point(80, 20.0)]
    assert fit.between(points, 10) == 1.0
    assert fit.between(points, 15) == 2.0
    assert fit.between(points, 20) == 3.0
    assert fit.between(points, 30) == 3.5
    assert fit.between(points, 40) == 4.0
    assert fit.between(points, 60) == 12.0
    assert fit.between(points, 100) == 28.0
    assert fit.between(points, 5) == 0.0
    assert fit.between(points[:2], 30) == 5.0


@pytest.mark.parametrize(
    ("count", "pieces", "ends"),
    [
        (3, 1, [(0, 2)]),
        (4, 2, []),  # a point too few: neighbours share one
        (5, 2, [(0, 2, 4)]),
        (7, 2, [(0, 2, 6), (0, 3, 6), (0, 4, 6)]),
        (7, 3, [(0, 2, 4, 6)]),
    ],
)
def test_cuts_are_all_ways_to_leave_three_points_to_each_piece(
    count: int, pieces: int, ends: list[tuple[int, ...]]
) -> None:
    assert list(fit._cuts(count, pieces)) == ends


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_up_to_four_pieces_are_found_where_there_are_as_many(pieces: int) -> None:
    """From a measured size on, each way is ten times as fast as the one before."""
    points, seconds = [Point(KIB, 2e-5)], 2e-5
    for step in range(2 * pieces):
        size = KIB * 4 ** (step + 1)
        seconds += (size - points[-1].n_bytes) * 10.0 ** -(8 + step // 2)
        points.append(Point(size, seconds))
    found = fit.fit(points)
    assert isinstance(found, Fit)
    assert [piece.last_bytes for piece in found.pieces] == [KIB * 16**i for i in range(1, pieces + 1)]
    assert found.residual < 1e-6


def test_more_ways_than_four_are_reported_as_the_best_four_or_not_at_all() -> None:
    points = [Point(KIB * 4**i, 1e-6 * (1 + 9 * (i // 2 % 2))) for i in range(11)]
    found = fit.fit(points)
    assert isinstance(found, Unknown) or len(found.pieces) <= 4
