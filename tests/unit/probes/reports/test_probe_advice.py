"""From how many reads on a copy pays: predicted from rows whose truth is known, with their errors."""

import math
import random

import pytest

from probes.core.unknown import Unknown
from probes.measure.workbench import READS_AFTER
from probes.records.rows import Measurement, Reads, Way
from probes.reports import crossover
from probes.reports.crossover import COPY, IN_PLACE, REREAD, Adviser, BreakEven

MIB = 2**20
SIZES = tuple(MIB * 4**i for i in range(6))
ALPHA, COPIED, LEFT, RESIDENT = 20e-6, 50e9, 40e9, 2000e9  # seconds; bytes per second
STEADY = (1.0,) * 20
NOISY = tuple(random.Random(1).sample((0.9, 1.1) * 10, 20))


def row(name: str, n_bytes: int, seconds: float, spread: tuple[float, ...] = STEADY) -> Measurement:
    samples = tuple(seconds * share for share in spread)
    return Measurement(name, n_bytes, n_bytes, 1, "device", samples, samples)


def rows(
    *, unlucky: int = 0, by: float = 1.0, noisy: str = "", sizes: tuple[int, ...] = SIZES
) -> list[Measurement]:
    """The three paths on a machine of known figures; a copy of `unlucky` bytes took `by` times as long."""
    found = []
    for n in sizes:
        copy = (ALPHA + n / COPIED) * (by if n == unlucky else 1.0)
        times = {COPY: copy + READS_AFTER * n / RESIDENT, IN_PLACE: n / LEFT, REREAD: n / RESIDENT}
        found += [
            row(name, n, seconds, NOISY if name == noisy else STEADY) for name, seconds in times.items()
        ]
    return found


def truth(n_bytes: int) -> float:
    return (ALPHA + n_bytes / COPIED) / (n_bytes / LEFT - n_bytes / RESIDENT)


def advice(found: list[Measurement]) -> Adviser:
    made = crossover.adviser(found)
    assert isinstance(made, Adviser), made
    return made


@pytest.mark.parametrize("n_bytes", [MIB, 3 * MIB, 64 * MIB, 2**30, 2**32])
def test_a_known_machine_is_predicted_at_and_between_its_sizes(n_bytes: int) -> None:
    told = advice(rows()).at(n_bytes)
    assert told.n_bytes == n_bytes
    assert told.reads == pytest.approx(truth(n_bytes), rel=1e-3)
    assert told.error == pytest.approx(0, abs=1e-6)


def test_an_unlucky_copy_is_evened_out_by_the_others() -> None:
    told = advice(rows(unlucky=16 * MIB, by=1.04)).at(16 * MIB)
    assert told.reads == pytest.approx(truth(16 * MIB), rel=0.025)


@pytest.mark.parametrize("noisy", [COPY, IN_PLACE, REREAD])
def test_noise_of_each_path_is_in_the_error(noisy: str) -> None:
    assert advice(rows(noisy=noisy)).at(16 * MIB).error > 1e-4 * truth(16 * MIB)


def test_rereads_err_as_often_as_they_are_taken_off_a_copy() -> None:
    read, reread = crossover.Timed(10.0, 0.3), crossover.Timed(1.0, 0.1)
    alone = crossover._copy_alone(read, reread)
    assert alone.seconds == pytest.approx(10.0 - READS_AFTER)
    assert alone.error_s == pytest.approx(math.hypot(0.3, READS_AFTER * 0.1))


def test_a_share_of_the_buffer_needs_more_reads() -> None:
    made = advice(rows())
    assert made.at(4 * MIB, share=0.25).reads == pytest.approx(4 * truth(4 * MIB), rel=1e-3)


def test_a_path_measured_at_one_size_predicts_nothing_and_at_two_it_does() -> None:
    few = [r for r in rows() if r.name != IN_PLACE or r.payload_bytes == MIB]
    told = crossover.adviser(few)
    assert isinstance(told, Unknown)
    assert "zero_copy_read was measured at 1 sizes" in told.reason
    assert isinstance(crossover.adviser(rows(sizes=SIZES[:2])), Adviser)
    apart = [r for r in rows() if r.name != REREAD or r.payload_bytes in SIZES[:2]]
    assert advice(apart).at(2 * MIB).reads == pytest.approx(truth(2 * MIB), rel=1e-3)


def test_copies_that_cost_nothing_beside_their_reads_predict_nothing() -> None:
    free = [
        row(COPY, r.payload_bytes, READS_AFTER * r.payload_bytes / RESIDENT) for r in rows() if r.name == COPY
    ]
    told = crossover.adviser([r for r in rows() if r.name != COPY] + free)
    assert isinstance(told, Unknown)
    assert "costs nothing measurable" in told.reason


def reads(way: Way, count: int, seconds: float, spread: tuple[float, ...] = STEADY) -> Reads:
    samples = tuple(seconds * share for share in spread)
    return Reads(way, count, MIB, 1, samples, samples)


def lines(*, start: float = 6.0, slope: float = 1.0, left: float = 3.0, noisy: str = "") -> list[Reads]:
    found = []
    for k in (1, 2, 4, 8):
        found.append(reads("copy_first", k, start + slope * k, NOISY if noisy == "copy_first" else STEADY))
        found.append(reads("in_place", k, left * k, NOISY if noisy == "in_place" else STEADY))
    return found


def crossing(found: list[Reads]) -> BreakEven:
    told = crossover.measured(found, MIB)
    assert isinstance(told, BreakEven), told
    return told


def test_two_lines_cross_where_both_take_as_long() -> None:
    assert crossing(lines()).reads == pytest.approx(3.0)
    assert crossing(lines()).error == pytest.approx(0, abs=1e-9)
    assert crossing(lines(start=1.0, left=1.5)).reads == pytest.approx(2.0)


@pytest.mark.parametrize("noisy", ["copy_first", "in_place"])
def test_noise_of_either_line_is_in_the_error_of_their_crossing(noisy: str) -> None:
    assert crossing(lines(noisy=noisy)).error > 0.01


def test_lines_that_never_meet_never_pay() -> None:
    assert math.isinf(crossing(lines(left=1.0)).reads)
    assert math.isinf(crossing(lines(left=0.5)).reads)
    free = crossover.measured(lines(start=0.0), MIB)
    assert isinstance(free, Unknown)
    assert "costs nothing measurable" in free.reason


def test_one_count_of_reads_is_no_line_and_another_size_doesn_t_count() -> None:
    one = crossover.measured([r for r in lines() if r.reads == 1], MIB)
    assert isinstance(one, Unknown)
    assert isinstance(crossover.measured(lines(), 2 * MIB), Unknown)


def test_distance_of_a_prediction_is_relative_to_the_measurement() -> None:
    low = crossover.Crossing(MIB, BreakEven(MIB, 2.0, 0.0), BreakEven(MIB, 4.0, 0.0))
    assert (low.off, low.distance) == (-0.5, 0.5)
    high = crossover.Crossing(MIB, BreakEven(MIB, 5.0, 0.0), BreakEven(MIB, 4.0, 0.0))
    assert (high.off, high.distance) == (0.25, 0.25)


def test_only_counts_that_were_read_in_both_ways_have_a_faster_one() -> None:
    found = [*lines(), reads("in_place", 16, 1.0)]
    assert crossover.faster(found) == {
        (MIB, 1): "in_place", (MIB, 2): "in_place", (MIB, 4): "copy_first", (MIB, 8): "copy_first",
    }  # fmt: skip


def test_prediction_and_measurement_are_compared_where_both_are_finite() -> None:
    never = [Reads(r.way, r.reads, 4 * MIB, 1, r.device_s, r.wall_s) for r in lines(left=0.5)]
    met = crossover.crossings(rows(), [*lines(), *never])
    assert isinstance(met, tuple)
    assert [one.n_bytes for one in met] == [MIB]
    assert met[0].measured.reads == pytest.approx(3.0)
    assert met[0].predicted.reads == pytest.approx(truth(MIB), rel=1e-3)
    assert isinstance(crossover.crossings([], lines()), Unknown)


def test_errors_of_k_star_are_those_of_first_order() -> None:
    copy, left, kept = crossover.Timed(6.0, 0.3), crossover.Timed(4.0, 0.2), crossover.Timed(1.0, 0.1)
    told = crossover.k_star(MIB, copy, in_place=left, vram=kept, share=0.5)
    assert told.reads == pytest.approx(6.0 / 1.5)
    gain_error = 0.5 * math.hypot(0.2, 0.1)
    assert told.error == pytest.approx(math.hypot(0.3 / 1.5, 4.0 * gain_error / 1.5))
    assert math.isinf(crossover.k_star(MIB, copy, in_place=kept, vram=kept).error)
