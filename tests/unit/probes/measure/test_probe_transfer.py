import gc
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_fakes import FakeBench, FakeOperation, FakeSpan
from probe_samples import SETTINGS

from probes.core.errors import ContentMismatch, DeviceUnusable, OutOfMemory
from probes.core.units import gb_per_s
from probes.core.unknown import Unknown
from probes.measure import sampling, transfer
from probes.measure.sampling import Effort
from probes.measure.workbench import Pattern, signed
from probes.records.rows import Gap, Measurement
from probes.records.schema import Settings
from probes.records.stats import median

MIB, GIB = 2**20, 2**30


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_SLOTS", 32)  # simulated caches need no rotation
    monkeypatch.setattr(sampling, "SAMPLE_S", 50e-6)  # nor does their clock need long batches


def measured(bench: FakeBench, settings: Settings = SETTINGS) -> list[Measurement]:
    return [m for m in transfer.run(bench, settings, 32 * GIB) if isinstance(m, Measurement)]


def test_each_size_rotates_through_the_whole_buffer() -> None:
    offsets = transfer.Grid(64 * MIB, MIB).offsets
    assert len(offsets) == 32
    assert max(offsets) >= 60 * MIB
    assert all(b - a >= MIB for a, b in pairwise(offsets))


def rates(bench: FakeBench) -> dict[str, float]:
    return {
        m.name: gb_per_s(m.moved_bytes, median(m.samples_s))
        for m in measured(bench)
        if m.payload_bytes == 256 * MIB
    }


def test_every_path_is_measured_at_every_size() -> None:
    found = measured(FakeBench())
    assert Counter((m.name, m.payload_bytes) for m in found) == Counter(
        (path.name, size) for path in transfer.GPU_PATHS for size in transfer.QUICK_SIZES
    )


def test_bandwidths_are_those_of_the_simulated_machine() -> None:
    found = rates(FakeBench())
    assert found["h2d_pinned"] == pytest.approx(55, rel=0.02)
    assert found["h2d_pageable"] == pytest.approx(9, rel=0.02)
    assert found["zero_copy_read"] == pytest.approx(51, rel=0.02)
    assert found["vram_read"] == pytest.approx(3000, rel=0.1)
    assert found["vram_copy"] == pytest.approx(6000, rel=0.1)  # read and written


def test_without_a_gpu_only_host_paths_are_measured_by_the_wall_clock() -> None:
    found = measured(FakeBench(has_gpu=False))
    assert {m.name for m in found} == {"h2h_copy", "h2h_read", "h2h_write"}
    assert all(m.clock == "wall" and isinstance(m.device_s, Unknown) for m in found)


def test_copies_of_pageable_memory_lead_with_the_wall_clock() -> None:
    clocks = {m.name: m.clock for m in measured(FakeBench())}
    assert clocks["h2d_pageable"] == clocks["d2h_pageable"] == "wall"
    assert clocks["h2d_pinned"] == clocks["vram_read"] == "device"


@pytest.mark.parametrize("action", ["copy", "kernel_copy", "read", "write"])
def test_wrong_content_stops_the_probe(action: str) -> None:
    with pytest.raises(ContentMismatch, match="not what was sent"):
        measured(FakeBench(corrupts=action))


def test_a_copy_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBench, "operation", lambda *_: FakeOperation(1e-6))
    with pytest.raises(ContentMismatch):
        measured(FakeBench())


def test_a_timed_copy_that_was_lost_is_noticed_wherever_it_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first operations of a row run, the later ones do nothing: their places still hold the scrub."""
    one_row(monkeypatch, "h2d_pinned")
    counted = FakeBench()
    one_mib(counted)
    assert counted.done > 32
    one_mib(FakeBench(loses_after=32))  # every place was written once
    for lost in (31, 17, 3):
        with pytest.raises(ContentMismatch):
            one_mib(FakeBench(loses_after=lost))


def one_row(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A path with 32 places of 1 MiB."""
    monkeypatch.setattr(transfer, "GPU_PATHS", tuple(p for p in transfer.GPU_PATHS if p.name == name))
    monkeypatch.setattr(transfer, "QUICK_SIZES", (MIB, 32 * MIB))


def one_mib(bench: FakeBench) -> None:
    done = {f"{path.name} {32 * MIB}" for path in transfer.GPU_PATHS}
    assert len(list(transfer.run(bench, SETTINGS, 32 * GIB, done=done))) == 1


def test_a_timed_read_that_was_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one_row(monkeypatch, "zero_copy_read")
    one_mib(FakeBench(loses_after=32))
    with pytest.raises(ContentMismatch):
        one_mib(FakeBench(loses_after=20))


def test_a_single_place_with_wrong_content_stops_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first nor the last of its places."""

    class OneBad(FakeBench):
        def fill(self, span: FakeSpan, pattern: Pattern) -> None:
            bad = span.count == 1 and span.offset == 5 * 8 * MIB and pattern == transfer.SOURCE
            super().fill(span, Pattern(666) if bad else pattern)

    with pytest.raises(ContentMismatch, match="not what was sent"):
        measured(OneBad())


@pytest.mark.thorough
def test_no_row_can_pass_on_what_an_earlier_row_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target is scrubbed before it is timed: copies that never ran can't pass."""
    seen: list[str] = []

    class Watching(FakeBench):
        def fill(self, span: FakeSpan, pattern: Pattern) -> None:
            if pattern == transfer.SCRUB:
                seen.append("scrub")
            super().fill(span, pattern)

        def wall_s(self, operations: Sequence[FakeOperation]) -> float:
            if seen[-1:] != ["timed"]:
                seen.append("timed")
            return super().wall_s(operations)

    rows = measured(Watching())
    assert seen == ["scrub", "timed"] * len(rows)


def test_a_wait_is_as_long_as_the_host_needs_and_grows_where_it_was_too_short() -> None:
    bench = FakeBench(needs_lead_s=20e-6)  # the queueing was measured as 3 us: a first use was cached, say
    found = sampling.sample(
        bench, [FakeOperation(1e-3)], effort=Effort(10, 5, 1.0), queued=True, now=Ticks(0)
    )
    assert not found.host_bound
    assert bench.longest_lead_s >= 20e-6


@pytest.mark.thorough
def test_a_row_in_which_the_device_waited_for_the_host_is_marked() -> None:
    """No wait helps: the host hands the work over more slowly than the device does it."""
    bench = FakeBench(needs_lead_s=10.0)
    found = sampling.sample(
        bench, [FakeOperation(1e-3)], effort=Effort(10, 5, 1.0), queued=True, now=Ticks(0)
    )
    assert found.host_bound
    assert len(found.device_s) == 10  # type: ignore[arg-type]
    rows = measured(FakeBench(needs_lead_s=10.0))
    assert {m.name for m in rows if m.host_bound} == {p.name for p in transfer.GPU_PATHS if p.queued}
    assert not any(m.host_bound for m in measured(FakeBench()))


@pytest.mark.parametrize("true_rate", [100e6, 1e9, 1.98e9, 2.6e9])
def test_the_wait_is_calibrated_on_the_card_whatever_its_clock_counts(true_rate: float) -> None:
    asked: list[int] = []

    def sleep(ticks: int) -> float:
        asked.append(ticks)
        rate = true_rate * (0.2 if len(asked) == 1 else 1.0)  # asleep at first
        return ticks / rate + 1e-6

    found = sampling.ticks_per_s(sleep)
    assert found == pytest.approx(true_rate, rel=0.01)
    assert sum(ticks / true_rate for ticks in asked) < 0.2


def test_a_clock_that_falls_makes_waits_longer_and_never_shorter() -> None:
    rates = iter([1e9, 2e9, 1.5e9, 1.2e9, 1.0e9])
    assert sampling.ticks_per_s(lambda ticks: ticks / next(rates)) == pytest.approx(2e9)


def test_for_passes_the_wall_clock_gets_the_full_effort() -> None:
    found = sampling.sample(
        FakeBench(), [FakeOperation(1.0)], effort=Effort(100, 8, 0.5), queued=True, leads="wall", now=Ticks(1)
    )
    assert (len(found.device_s), len(found.wall_s)) == (2, 8)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_seed_fixes_the_order_and_another_changes_it() -> None:
    def order(seed: int) -> list[tuple[str, int]]:
        found = measured(FakeBench(), Settings(quick=True, seed=seed, vram_cap_bytes=None))
        return [(m.name, m.payload_bytes) for m in found]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_buffers_are_freed_between_paths() -> None:
    bench = FakeBench()
    for _ in transfer.run(bench, SETTINGS, 32 * GIB):
        assert bench.used_vram <= 2 * 256 * MIB
    assert (bench.used_vram, bench.host_used) == (0, 0)


def test_sizes_that_do_not_fit_are_gaps_with_the_reason() -> None:
    bench = FakeBench(vram_bytes=512 * MIB)
    found = list(transfer.run(bench, SETTINGS, 32 * GIB))
    gaps = {(gap.name, gap.payload_bytes) for gap in found if isinstance(gap, Gap)}
    assert gaps == {(path.name, 256 * MIB) for path in transfer.GPU_PATHS}


def test_the_cap_holds_for_buffers_too() -> None:
    settings = Settings(quick=True, seed=1, vram_cap_bytes=512 * MIB)
    assert any(isinstance(record, Gap) for record in transfer.run(FakeBench(), settings, 32 * GIB))


@pytest.mark.parametrize(("host", "vram"), [(100 * MIB, GIB), (GIB, 100 * MIB), (0, None)])
def test_too_little_memory_is_reported(host: int, vram: int | None) -> None:
    with pytest.raises(DeviceUnusable, match="free memory"):
        transfer.arena_bytes(GIB, host_available_bytes=host, vram_free_bytes=vram)


@given(st.integers(2**27, 2**40), st.none() | st.integers(2**27, 2**40))
def test_both_buffers_stay_within_a_quarter_of_either_memory(host: int, vram: int | None) -> None:
    size = transfer.arena_bytes(GIB, host_available_bytes=host, vram_free_bytes=vram)
    assert size & (size - 1) == 0
    assert 2 * size <= min(host, host if vram is None else vram) / 4


def test_a_refused_buffer_is_the_callers_to_hear() -> None:
    bench = FakeBench(vram_bytes=4 * GIB)
    bench.cap_bytes = 100 * MIB
    with pytest.raises(OutOfMemory):
        measured(bench)


@given(st.integers(0, 2**40), st.integers(1, 200), st.integers(0, 2**64), st.integers(0, 2**64))
def test_the_closed_form_is_the_sum_of_the_words(first: int, words: int, start: int, step: int) -> None:
    pattern = Pattern(start, step)
    assert pattern.total(first, words) == signed(sum(step * i + start for i in range(first, first + words)))


class Ticks:
    """A clock that advances by a step at every look."""

    def __init__(self, step: float) -> None:
        self.time, self.step = 0.0, step

    def __call__(self) -> float:
        self.time += self.step
        return self.time


def test_short_operations_are_batched_and_the_sample_is_per_operation() -> None:
    found = sampling.sample(
        FakeBench(), [FakeOperation(2.5e-6)], effort=Effort(10, 2, 1.0), queued=True, now=Ticks(0)
    )
    assert found.batch * 2.5e-6 >= sampling.SAMPLE_S
    assert found.batch < 2 * sampling.SAMPLE_S / 2.5e-6
    assert found.device_s == pytest.approx((2.5e-6,) * 10)
    assert found.wall_s == pytest.approx((12.5e-6,) * 10)


def test_operations_take_turns() -> None:
    turns: list[int] = []
    operations = [FakeOperation(1e-3, lambda i=i: turns.append(i)) for i in range(3)]
    sampling.sample(FakeBench(), operations, effort=Effort(6, 2, 1.0), queued=False, now=Ticks(0))
    assert turns == [i % 3 for i in range(len(turns))]
    assert len(turns) >= 12


def test_a_spent_budget_ends_a_row_but_not_before_the_least_samples() -> None:
    found = sampling.sample(
        FakeBench(), [FakeOperation(1.0)], effort=Effort(100, 7, 0.5), queued=False, now=Ticks(1)
    )
    assert (len(found.device_s), len(found.wall_s)) == (7, 7)  # type: ignore[arg-type]


def test_where_the_devices_clock_leads_the_wall_gets_less() -> None:
    found = sampling.sample(
        FakeBench(), [FakeOperation(1.0)], effort=Effort(100, 8, 0.5), queued=True, now=Ticks(1)
    )
    assert (len(found.device_s), len(found.wall_s)) == (8, 2)  # type: ignore[arg-type]


def test_a_row_is_spread_over_more_time_than_a_slow_spell_lasts_and_pauses_cost_no_samples() -> None:
    """The clock goes on only while the bench rests; the budget is far less than the pauses."""

    class Resting(FakeBench):
        def rest(self, seconds: float) -> None:
            super().rest(seconds)
            clock.time += seconds

    clock, bench = Ticks(0), Resting()
    effort = Effort(100, 2, 0.01, spread_s=0.6)
    found = sampling.sample(bench, [FakeOperation(1e-3)], effort=effort, queued=True, now=clock)
    assert len(found.device_s) == 100  # type: ignore[arg-type]
    assert bench.rested_s == pytest.approx(0.6 * 0.9)  # none after the last group
    assert sampling.cost_s(effort, 1e-3, device=True) > 0.6


def test_only_rows_that_cross_the_link_are_spread() -> None:
    full = Settings(quick=False, seed=1, vram_cap_bytes=None)
    spread = {path.name: transfer._effort(full, path, has_gpu=True).spread_s for path in transfer.GPU_PATHS}
    assert spread["h2d_then_read"] == spread["zero_copy_read"] == sampling.FULL_SPREAD_S
    assert spread["vram_reread"] == 0
    assert spread["h2d_pageable"] == sampling.HOST_SPREAD_S  # a processor has slow spells as well


@pytest.mark.parametrize("hiccups", [1, 2, 5])
def test_a_slow_start_does_not_make_the_batches_short(hiccups: int) -> None:
    """The first readings of an operation are a hundred times too long, as the first launch of a kernel is."""
    bench = FakeBench()
    slow = [1e-3] * hiccups

    def effect() -> None:
        bench.worked_s += slow.pop() if slow else 0.0

    operation = FakeOperation(2e-6, effect, bench)
    found = sampling.sample(bench, [operation], effort=Effort(10, 2, 1.0), queued=True, now=Ticks(0))
    assert found.batch * 2e-6 >= 0.9 * sampling.SAMPLE_S
    assert found.device_s == pytest.approx((2e-6,) * 10)


def test_the_collector_is_off_while_samples_are_taken_and_on_again_after() -> None:
    seen: list[bool] = []
    operation = FakeOperation(1e-3, lambda: seen.append(gc.isenabled()))
    sampling.sample(FakeBench(), [operation], effort=Effort(3, 1, 1.0), queued=False, now=Ticks(0))
    assert not any(seen)
    assert gc.isenabled()


@pytest.mark.thorough
def test_cases_that_are_done_are_not_measured_again_and_the_order_stays() -> None:
    first = measured(FakeBench())
    done = {m.case for m in first[:20]}
    rest = [m for m in transfer.run(FakeBench(), SETTINGS, 32 * GIB, done=done) if isinstance(m, Measurement)]
    assert [m.case for m in rest] == [m.case for m in first[20:]]


def test_without_zero_copy_the_other_paths_are_measured() -> None:
    found = list(transfer.run(FakeBench(has_zero_copy=False), SETTINGS, 32 * GIB))
    gaps = {gap.name: gap.reason for gap in found if isinstance(gap, Gap)}
    assert set(gaps) == {"zero_copy_read", "zero_copy_write"}
    assert all("can't make a zero-copy tensor" in reason for reason in gaps.values())
    assert {m.name for m in found if isinstance(m, Measurement)} == {
        path.name for path in transfer.GPU_PATHS if path.name not in gaps
    }
