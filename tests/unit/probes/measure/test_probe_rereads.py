"""Buffers, places and counts of the probe `breakeven`, and what a run of it costs."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from probe_fakes import FakeBench, FakeMemory, FakeOperation, FakeSpan

from probes.core.errors import ContentMismatch
from probes.measure import breakeven, sampling, transfer
from probes.measure.sampling import Effort
from probes.measure.transfer import SCRUB, SOURCE
from probes.measure.workbench import Pattern
from probes.records.rows import Gap, Reads, Record
from probes.records.schema import Settings

KIB, MIB, GIB = 2**10, 2**20, 2**30
QUICK = Settings(quick=True, seed=7, vram_cap_bytes=None)
FULL = Settings(quick=False, seed=7, vram_cap_bytes=None)


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transfer, breakeven):
        monkeypatch.setattr(module, "MOST_SLOTS", 4)
    monkeypatch.setattr(sampling, "SAMPLE_S", 50e-6)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two samples, where only the cases are of interest."""
    monkeypatch.setattr(breakeven, "QUICK_EFFORT", Effort(2, 1, 1.0))


@dataclass
class Watched(FakeBench):
    """A bench that notes which buffers it was asked for, what they were filled with, and what was done."""

    buffers: list[tuple[str, int]] = field(default_factory=list)
    fills: list[tuple[str, int, int, Pattern]] = field(default_factory=list)
    moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @contextmanager
    def memory(self, kind: str, n_bytes: int) -> Iterator[FakeMemory]:
        self.buffers.append((kind, n_bytes))
        with super().memory(kind, n_bytes) as memory:
            yield memory

    def fill(self, span: FakeSpan, pattern: Pattern) -> None:
        self.fills.append((span.memory.kind, span.offset, span.n_bytes, pattern))
        super().fill(span, pattern)

    def operation(self, action: str, target: FakeSpan, source: FakeSpan) -> FakeOperation:
        done = super().operation(action, target, source)
        move = (action, source.memory.kind, target.memory.kind)
        return FakeOperation(done.seconds, lambda: (self.moves.update([move]), done.effect()), self)


def measured(bench: FakeBench, settings: Settings = QUICK, available: int = 32 * GIB) -> list[Record]:
    return list(breakeven.run(bench, settings, available))


def one(bench: Watched, case: str, settings: Settings = QUICK) -> Reads:
    done = {other for other, _ in breakeven.planned(settings) if other != case}
    (record,) = breakeven.run(bench, settings, 32 * GIB, done=done)
    assert isinstance(record, Reads)
    return record


@pytest.mark.usefixtures("brief")
def test_every_case_is_planned_and_run_once() -> None:
    sizes = {64 * KIB, MIB, 16 * MIB, 64 * MIB}
    cases = {f"{way} {k} {n}" for way in ("copy_first", "in_place") for k in (1, 2, 8) for n in sizes}
    found = [record.case for record in measured(FakeBench())]  # type: ignore[union-attr]
    assert Counter(found) == Counter(dict(breakeven.planned(QUICK)).keys()) == Counter(cases)
    full = [case.split() for case, _ in breakeven.planned(FULL)]
    assert {int(reads) for _, reads, _ in full} == {1, 2, 4, 8}  # docs/probes.md
    assert sorted({int(n) for _, _, n in full}) == [64 * KIB * 4**i for i in range(7)]
    assert len(full) == 2 * 4 * 7


def test_a_copy_is_made_once_and_then_read_as_often_as_the_case_says() -> None:
    bench = Watched()
    row = one(bench, f"copy_first 8 {MIB}")
    assert (row.way, row.reads, row.payload_bytes, row.batch) == ("copy_first", 8, MIB, 1)
    copies = bench.moves["copy", "zero_copy", "vram"]
    assert copies > 10
    assert bench.moves == {("copy", "zero_copy", "vram"): copies, ("read", "vram", "vram"): 8 * copies}


def test_in_place_nothing_is_copied() -> None:
    bench = Watched()
    one(bench, f"in_place 2 {MIB}")
    assert set(bench.moves) == {("read", "zero_copy", "vram")}
    assert bench.moves.total() % 2 == 0


def test_buffers_hold_two_of_the_largest_size_and_targets_are_scrubbed() -> None:
    bench = Watched()
    one(bench, f"copy_first 1 {16 * MIB}")
    arena = 128 * MIB
    assert bench.buffers == [("zero_copy", arena), ("vram", arena), ("vram", 4 * 8)]
    filled = [("zero_copy", 0, arena, SOURCE), ("vram", 0, 32, SCRUB), ("vram", 0, 4 * 16 * MIB, SCRUB)]
    assert bench.fills[:3] == filled
    in_place = Watched()
    one(in_place, f"in_place 1 {16 * MIB}")
    assert [fill for fill in in_place.fills if fill[3] == SCRUB] == filled[1:2]


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("vram", "lacking"), [(512 * MIB, set()), (511 * MIB, {64 * MIB}), (128 * MIB, {64 * MIB})]
)
def test_sizes_beyond_the_buffers_are_one_gap_each_and_cost_no_other_size(
    vram: int, lacking: set[int]
) -> None:
    found = measured(FakeBench(vram_bytes=vram))
    gaps = [(gap.name, gap.payload_bytes) for gap in found if isinstance(gap, Gap)]
    assert gaps == [("breakeven", size) for size in lacking]
    assert len(found) == 6 * (4 - len(lacking)) + len(lacking)


@pytest.mark.usefixtures("brief")
def test_host_memory_holds_buffers_down_as_vram_does() -> None:
    found = measured(FakeBench(), available=128 * MIB)
    assert [gap.payload_bytes for gap in found if isinstance(gap, Gap)] == [64 * MIB]


def test_without_zero_copy_each_size_of_the_mode_is_a_gap_with_the_reason() -> None:
    found = [*measured(FakeBench(has_zero_copy=False), FULL)]
    assert {(gap.name, gap.payload_bytes) for gap in found if isinstance(gap, Gap)} == {
        ("breakeven", 64 * KIB * 4**i) for i in range(7)
    }


def test_a_timed_read_that_was_lost_is_noticed_at_the_places_that_were_used() -> None:
    case = f"in_place 1 {16 * MIB}"
    assert len(one(Watched(), case).wall_s) > 1

    class Lossy(Watched):
        def words(self, span: FakeSpan) -> tuple[int, ...]:
            *kept, last = super().words(span)
            return (*kept, last + 1)

    with pytest.raises(ContentMismatch, match=r"breakeven, in_place of 16\.00 MiB"):
        one(Lossy(), case)


@pytest.mark.parametrize(
    ("settings", "case", "seconds"),
    [
        # at 400 GB/s in VRAM and 20 GB/s over the link; 30 samples or 0.05 s, a quarter of it by the wall
        (QUICK, f"in_place 8 {64 * KIB}", 0.05 + 30 * 8 * 64 * KIB / 20e9),
        (QUICK, f"copy_first 8 {16 * MIB}", 0.05 + 0.05 / 4),
        (QUICK, f"in_place 8 {64 * MIB}", 4 * 8 * 64 * MIB / 20e9 + 2 * 8 * 64 * MIB / 20e9),
        (FULL, f"copy_first 8 {256 * MIB}", 0.6 + 0.6 / 4),
        (FULL, f"in_place 1 {64 * KIB}", 0.2 + 50 * 64 * KIB / 20e9),
        (FULL, f"copy_first 8 {64 * KIB}", 0.2 + 50 * 64 * KIB * (1 / 20e9 + 8 / 400e9)),
    ],
)
def test_a_row_s_time_is_foreseen_from_an_ordinary_machine_s_bandwidths(
    settings: Settings, case: str, seconds: float
) -> None:
    assert dict(breakeven.planned(settings))[case] == pytest.approx(0.05 + seconds, rel=1e-6)


def test_rows_get_the_effort_of_their_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Effort] = []
    real = sampling.sample

    def sample(*given: object, effort: Effort, **more: object) -> sampling.Samples:
        seen.append(effort)
        return real(*given, effort=Effort(4, 2, 9.0), **more)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "sample", sample)
    one(Watched(), f"in_place 1 {MIB}")
    one(Watched(), f"in_place 1 {MIB}", FULL)
    assert seen == [Effort(30, 4, 0.05, spread_s=0.05), Effort(50, 10, 0.6, spread_s=0.2)]
