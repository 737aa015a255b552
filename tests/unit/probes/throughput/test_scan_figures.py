"""Throughput with its error, the knee and saturation, on rows whose truth is known."""

import math
import random

import made_scans as make
import pytest

from probes.core.unknown import Unknown
from probes.throughput.ceilings import Ceilings, DeviceCeilings, FlopCeiling
from probes.throughput.direct.knee import Flat, Growing, Knee, Point, find, of_series, saturation
from probes.throughput.direct.results import BatchRow, Way, Work, joules_per_input, latency_s, throughput

NONE = Unknown("made without it")


def bare(
    batch: int, walls: tuple[float, ...], *, joules: float | Unknown = NONE, powered: int = 0
) -> BatchRow:
    return BatchRow(batch, walls, NONE, NONE, NONE, joules, powered, NONE)


def test_throughput_is_the_mean_of_the_trials_and_not_of_their_times() -> None:
    found = throughput(bare(8, (1.0, 2.0)))
    assert (found.n, found.mean) == (2, 6.0)  # of 8 and 4; 8 over the mean time would be 5.33
    assert found.error == pytest.approx(math.sqrt(8) / math.sqrt(2))
    assert throughput(bare(8, (1.0,))).error is None
    with pytest.raises(ValueError, match="no trials"):
        throughput(bare(8, ()))


def covered(draw: random.Random, r: float) -> bool:
    """Whether the true rate, 100 inputs/s, is within two standard errors; neighbours correlate by r."""
    away, rates = draw.gauss(0, 1), []
    for _ in range(100):
        away = r * away + math.sqrt(1 - r * r) * draw.gauss(0, 1)
        rates.append(100 + 3 * away)
    found = throughput(bare(1, tuple(1 / rate for rate in rates)))
    assert found.error is not None
    return abs(found.mean - 100) <= 2 * found.error


@pytest.mark.thorough
@pytest.mark.parametrize("r", [0.0, 0.5, 0.8])
def test_the_error_covers_the_truth_also_where_trials_correlate(r: float) -> None:
    draw = random.Random(7)
    times = sum(covered(draw, r) for _ in range(300))
    assert times >= 270, f"{times} of 300 within two standard errors"  # 95 % if it were exact


def test_alternating_trials_do_not_make_the_error_smaller_than_independent_ones() -> None:
    found = throughput(bare(1, (1.0, 1.1) * 50))
    assert found.lag1 is not None
    assert found.lag1 < -0.9
    assert found.error == pytest.approx((1 / 1.0 - 1 / 1.1) / 2 / 10, rel=0.02)


def test_latency_and_energy() -> None:
    assert latency_s(bare(4, (0.1, 0.2, 0.3))) == (pytest.approx(0.2), pytest.approx(0.29))
    assert joules_per_input(bare(4, (1.0,), joules=80.0, powered=10)) == 2.0
    assert "power gauge" in str(joules_per_input(bare(4, (1.0,), joules=80.0)))
    assert joules_per_input(bare(4, (1.0,))) == NONE


# ---- the knee ------------------------------------------------------------------------------------------

BATCHES = tuple(2**power for power in range(13))


def planted(knee: float, *, noise: float = 0.0, seed: int = 0, after: float = 0.0) -> list[Point]:
    draw = random.Random(seed)
    made = []
    for batch in BATCHES:
        rate = 1000 * min(batch, knee) * (max(batch, knee) / knee) ** after
        made.append(Point(batch, rate * (1 + draw.gauss(0, noise)), rate * noise))
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(50))
def test_a_planted_knee_is_found_within_its_error_and_a_step(seed: int) -> None:
    true = 2 ** random.Random(seed).uniform(1.5, 10.5)
    found = find(planted(true, noise=0.01, seed=seed))
    assert isinstance(found, Knee)
    assert abs(math.log2(found.batch / true)) <= min(1.0, 4 * found.octaves + 1 / 64)


@pytest.mark.thorough
def test_an_exact_bend_is_found_exactly_and_points_come_in_any_order() -> None:
    points = planted(64)
    assert find(points) == find(points[::-1])
    found = find(points)
    assert isinstance(found, Knee)
    assert found.batch == pytest.approx(64, rel=0.01)
    assert found.saturated_from == 64


def test_a_soft_bend_says_how_uncertain_its_knee_is() -> None:
    soft = [Point(batch, batch / (1 + batch / 64), 0.0) for batch in BATCHES]
    found = find(soft)
    assert isinstance(found, Knee)
    assert found.least < 64 * 2
    assert found.most > 64 / 2
    assert found.octaves > 0.1  # an exact bend has less
    assert found.saturated_from == 1024  # 94 % of 64 is at 1024, 95 % of the largest measured too


def test_throughput_that_falls_behind_the_knee_is_a_knee_too() -> None:
    found = find(planted(64, after=-0.2))
    assert isinstance(found, Knee)
    assert found.batch == pytest.approx(64, rel=0.02)


def test_growth_at_the_end_is_not_called_saturated() -> None:
    found = find(planted(1e9))
    assert found == Growing(4096, pytest.approx(1.0))
    assert isinstance(find(planted(3000)), Growing)


def test_flat_throughput_is_saturated_from_the_first_batch() -> None:
    assert find(planted(0.5)) == Flat(1, first=True)


def test_a_jump_is_saturated_behind_it_and_has_no_knee() -> None:
    # as a CPU's convolutions did, which take another path from batch 8 on
    rates = {1: (50.8, 0.8), 2: (45.1, 0.9), 4: (47.47, 1.0), 8: (90.9, 5.0), 16: (90.61, 3.2)}
    found = find([Point(batch, rate, error) for batch, (rate, error) in rates.items()])
    assert found == Flat(8, first=False)


def test_growth_within_the_errors_is_no_growth() -> None:
    noisy = [Point(batch, 100 + (8 if batch == 4096 else 0), 5.0) for batch in BATCHES]
    assert not isinstance(find(noisy), Growing)


def test_too_few_batch_sizes_have_no_knee() -> None:
    assert "3 batch sizes" in str(find(planted(64)[:3]))
    assert isinstance(of_series(make.series()), Unknown)


# ---- saturation ----------------------------------------------------------------------------------------

GPU = DeviceCeilings(
    device="gpu",
    name="made",
    flop=(FlopCeiling("fp16", make.ceiling(1e12)), FlopCeiling("fp32", make.ceiling(1e11))),
    memory=make.ceiling(1e12),
    to_device=make.ceiling(1e10),
    from_device=make.ceiling(1e10),
    launches=make.ceiling(1e5),
)
ON = Ceilings((GPU,))


def shares(work: Work, *, pass_s: float | Unknown = 0.9, inputs: str = "copied", precision: str = "fp16"):
    row = BatchRow(1, (1.0,) * 5, pass_s, work, NONE, NONE, 0, NONE)
    return saturation(row, Way("gpu", "pytorch", precision, inputs), ON)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("work", "binds", "share"),
    [
        (Work(9e11, 1e11, 1e10, 10, 10), "compute", 0.9),
        (Work(1e11, 8e11, 1e10, 10, 10), "memory", 0.8),
        (Work(1e11, 1e11, 1e10, 7 * 10**9, 10), "link", 0.7),
    ],
)
def test_the_resource_that_needs_most_of_the_trial_binds(work: Work, binds: str, share: float) -> None:
    found = shares(work)
    assert found.binds == binds
    assert found.share(found.binds) == pytest.approx(share)


def test_a_device_that_waits_for_the_host_is_bound_by_the_host() -> None:
    found = shares(Work(1e10, 1e10, 1e10, 10**9, 10), pass_s=0.2)
    assert (found.binds, found.link) == ("host", pytest.approx(0.1))
    assert found.host == pytest.approx(0.7)


def test_without_a_device_clock_the_host_share_comes_from_counted_operations() -> None:
    found = shares(Work(1e10, 1e10, 1e10, 10, 60_000), pass_s=NONE)
    assert (found.binds, found.host) == ("host", pytest.approx(0.6))


def test_nothing_binds_where_no_resource_explains_half_of_a_trial() -> None:
    found = shares(Work(1e11, 1e11, 1e10, 10, 10))
    assert found.binds == "none"


def test_autocast_is_compared_with_the_ceiling_of_what_it_casts_to() -> None:
    work = Work(5e10, 0.0, 0.0, 0, 0)
    assert shares(work, precision="autocast").compute == pytest.approx(0.05)
    assert shares(work, precision="fp32").compute == pytest.approx(0.5)


def test_inputs_that_are_in_the_device_do_not_load_the_link() -> None:
    assert shares(Work(1e11, 1e11, 1e10, 7 * 10**9, 10), inputs="resident").link == 0.0


def test_what_lacks_a_ceiling_or_a_count_is_unknown_and_not_zero() -> None:
    found = shares(Work(1e11, 1e11, 1e10, 10, 10), precision="bf16")
    assert "bf16" in str(found.compute)
    uncounted = BatchRow(1, (1.0,), NONE, NONE, NONE, NONE, 0, NONE)
    way = Way("gpu", "pytorch", "fp16", "copied")
    for ceilings in (ON, Unknown("no ceilings")):
        blank = saturation(uncounted, way, ceilings)
        assert isinstance(blank.compute, Unknown)
        assert blank.binds == "none"
