"""How far the spill probe asks, what it notes about each block, and at which figures it stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from probe_fakes import FakeBench, FakeMemory, FakeSpan, gauges

from probes.core.errors import ContentMismatch
from probes.core.unknown import Unknown
from probes.measure import spill
from probes.measure.spill import Gauges, Plan
from probes.measure.workbench import Pattern
from probes.records.rows import Block, Expectation, Gap, Reading, Record, Request, Stop
from probes.records.schema import Settings
from probes.reports.run_findings import pick

MIB, GIB = 2**20, 2**30
EXPECTED = Expectation("refuses", "It refuses.", "a test")
QUICK = Settings(quick=True, seed=7, vram_cap_bytes=None)
FULL = Settings(quick=False, seed=7, vram_cap_bytes=None)


@dataclass
class Watched(FakeBench):
    """A bench that notes its buffers, the caps that it was given and the waits before its reads."""

    buffers: list[tuple[str, int]] = field(default_factory=list)
    caps: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @contextmanager
    def memory(self, kind: str, n_bytes: int) -> Iterator[FakeMemory]:
        self.buffers.append((kind, n_bytes))
        with super().memory(kind, n_bytes) as memory:
            yield memory

    def cap_vram(self, n_bytes: int) -> None:
        self.caps.append(n_bytes)
        super().cap_vram(n_bytes)

    def device_s(self, operations: object, *, lead_s: float) -> object:  # type: ignore[override]
        self.waits.append(lead_s)
        return super().device_s(operations, lead_s=lead_s)  # type: ignore[arg-type]


def run(bench: FakeBench, settings: Settings = FULL, seen: Gauges | None = None) -> list[Record]:
    return list(
        spill.run(
            bench,
            settings,
            vram_total_bytes=bench.vram_bytes,
            expectation=EXPECTED,
            gauges=seen or gauges(bench),
        )
    )


@pytest.mark.parametrize(
    ("quick", "cap", "total", "free", "expected"),
    [
        (False, None, 16 * GIB, 15 * GIB, Plan(None, 15 * GIB, 18 * GIB + 768 * MIB, 960 * MIB)),
        (False, None, 80 * GIB, 80 * GIB, Plan(None, 80 * GIB, 100 * GIB, GIB)),
        (False, None, GIB, GIB, Plan(None, GIB, 1280 * MIB, 64 * MIB)),
        (False, None, 2 * GIB, 2000 * MIB, Plan(None, 2000 * MIB, 2500 * MIB, 124 * MIB)),  # whole pages
        (False, GIB, 16 * GIB, 15 * GIB, Plan(GIB, GIB, 1280 * MIB, 64 * MIB)),
        (False, 20 * GIB, 16 * GIB, 8 * GIB, Plan(20 * GIB, 8 * GIB, 10 * GIB, 512 * MIB)),
        (True, None, 8 * GIB, 8 * GIB, Plan(None, 8 * GIB, 10 * GIB, 512 * MIB)),
        (True, None, 8 * GIB + 1, 8 * GIB, Plan(4 * GIB, 4 * GIB, 5 * GIB, 256 * MIB)),
        (True, 2 * GIB, 80 * GIB, 80 * GIB, Plan(2 * GIB, 2 * GIB, 2560 * MIB, 128 * MIB)),
    ],
)
def test_plan_goes_a_quarter_past_the_limit_in_sixteenths_of_it(
    quick: bool, cap: int | None, total: int, free: int, expected: Plan
) -> None:
    settings = Settings(quick=quick, seed=1, vram_cap_bytes=cap)
    assert spill.plan(settings, vram_total_bytes=total, vram_free_bytes=free) == expected


def test_records_come_in_the_order_in_which_a_reader_can_follow_them() -> None:
    bench = Watched(vram_bytes=GIB)

    def readings(moment: str) -> tuple[Reading, ...]:
        return (Reading(moment, "free", bench.vram_free_bytes()),)

    found = run(bench, seen=replace(gauges(bench), readings=readings))
    assert found[:2] == [EXPECTED, Reading("before", "free", GIB)]
    assert found[-1] == Reading("after", "free", GIB)
    names = [getattr(one, "purpose", getattr(one, "moment", type(one).__name__)) for one in found[2:-1]]
    granted = 15  # of 64 MiB, and the word for sums keeps the last one from fitting
    assert names == [
        "oversize", *["block"] * (granted + 1), "Stop", "full", *["Block"] * (granted + 2), *["forced"] * 30,
    ]  # fmt: skip
    assert pick(found, Stop) == [Stop("refused", granted * 64 * MIB, "out of memory")]


def test_driver_is_asked_once_for_256_mib_more_than_is_free_and_before_any_cap() -> None:
    bench = Watched(vram_bytes=16 * GIB)
    asked = pick(run(bench, QUICK), Request)[0]
    expected = Request("oversize", 16 * GIB + 256 * MIB, 0, 16 * GIB, None, False, "out of memory")
    assert asked == expected
    assert bench.buffers[0] == ("vram", 16 * GIB + 256 * MIB)
    spilling = pick(run(Watched(vram_bytes=GIB + MIB, spills=True), QUICK), Request)[0]
    assert spilling == Request("oversize", GIB + 256 * MIB, 0, GIB + MIB, None, True, "")  # whole pages


@pytest.mark.parametrize(("spendable", "asked"), [(512 * MIB, 1), (512 * MIB - 1, 0)])
def test_driver_is_not_asked_where_twice_that_isn_t_to_spare(spendable: int, asked: int) -> None:
    found = run(Watched(vram_bytes=GIB, host_has_bytes=spendable))
    assert sum(one.purpose == "oversize" for one in pick(found, Request)) == asked


def test_cap_is_set_where_there_is_one_and_never_else() -> None:
    for bench, settings, caps in (
        (Watched(vram_bytes=16 * GIB), QUICK, [4 * GIB]),
        (Watched(vram_bytes=GIB), QUICK, []),
    ):
        requests = pick(run(bench, settings), Request)
        assert bench.caps == caps
        assert {one.cap_bytes for one in requests if one.purpose == "block"} == {*(caps or [None])}


def test_requests_note_what_is_held_and_free_and_blocks_what_the_accounts_did() -> None:
    bench = Watched(vram_bytes=GIB, spills=True)
    found = run(bench)
    blocks = [one for one in pick(found, Request) if one.purpose == "block"]
    size = 64 * MIB
    assert [one.held_bytes for one in blocks] == [size * i for i in range(20)]  # up to 1.25 GiB
    assert [one.vram_free_bytes for one in blocks[:15]] == [GIB - 8 - size * i for i in range(15)]
    assert all(one.granted and one.message == "" and one.asked_bytes == size for one in blocks)
    (stop,) = pick(found, Stop)
    assert (stop.cause, stop.held_bytes) == ("target", 20 * size)
    assert "1.25 GiB" in stop.note
    read = pick(found, Block)
    assert [(one.index, one.asked, one.control) for one in read] == [
        (i, "zero_copy" if i < 2 else "vram", i < 4) for i in range(22)
    ]
    moved = [(0, size)] * 2 + [(size, 0)] * 15 + [(0, size)] * 5  # from VRAM's account to the host's
    assert [(one.vram_drop_bytes, one.gtt_growth_bytes) for one in read] == moved
    assert {one.n_bytes for one in read} == {size}
    assert {len(one.read_s) for one in read} == {5}


def test_accounts_that_can_t_be_read_leave_the_growth_unknown() -> None:
    bench = Watched(vram_bytes=GIB)
    for answers in ([Unknown("no GTT")], [0, Unknown("gone")]):
        turns = iter(answers * 99)
        found = run(bench, seen=replace(gauges(bench), gtt_used_bytes=lambda turns=turns: next(turns)))
        assert {one.gtt_growth_bytes for one in pick(found, Block)} == {answers[-1]}


@pytest.mark.parametrize(("spendable", "controls"), [(3 * 64 * MIB, 2), (3 * 64 * MIB - 1, 0)])
def test_controls_in_host_memory_leave_room_for_one_more_block(spendable: int, controls: int) -> None:
    found = run(Watched(vram_bytes=GIB, host_has_bytes=spendable))
    assert sum(one.asked == "zero_copy" for one in pick(found, Block)) == controls
    gaps = [] if controls else [("zero_copy control", 64 * MIB)]
    assert [(gap.name, gap.payload_bytes) for gap in pick(found, Gap)] == gaps


@pytest.mark.parametrize(("over", "granted"), [(0, 20), (-1, 19)])
def test_asking_stops_before_a_block_that_could_take_the_host_below_its_floor(
    over: int, granted: int
) -> None:
    """Twice a block's size is kept free: of 20 blocks five spill, and two are controls."""
    bench = Watched(vram_bytes=GIB, spills=True, host_has_bytes=(2 + 4 + 2) * 64 * MIB + over)
    found = run(bench)
    (stop,) = pick(found, Stop)
    assert (stop.cause, stop.held_bytes) == (("target", "floor")[granted < 20], granted * 64 * MIB)


def test_reads_wait_200_us_and_a_warm_up_comes_first() -> None:
    bench = Watched(vram_bytes=GIB)
    blocks = pick(run(bench), Block)
    assert bench.waits == [200e-6] * (1 + 6 * len(blocks))


def test_a_card_without_a_clock_is_read_by_the_wall_s() -> None:
    class Clockless(Watched):
        def device_s(self, operations: object, *, lead_s: float) -> None:  # type: ignore[override]
            return None

        def wall_s(self, operations: object) -> float:  # type: ignore[override]
            super().wall_s(operations)  # type: ignore[arg-type]
            return 0.25

    blocks = pick(run(Clockless(vram_bytes=GIB)), Block)
    assert {one.read_s for one in blocks} == {(0.25,) * 5}
    assert {one.first_read_s for one in blocks} == {0.25}


@pytest.mark.parametrize("wrong", ["sum", "content"])
def test_a_block_that_changed_is_named_whether_the_timed_read_or_the_last_one_sees_it(wrong: str) -> None:
    class Faulty(Watched):
        def words(self, span: FakeSpan) -> tuple[int, ...]:
            found = super().words(span)
            return (found[0] + 1,) if wrong == "sum" else found

        def total(self, span: FakeSpan) -> int:
            return super().total(span) + (wrong == "content" and span.n_bytes > 8)

    with pytest.raises(ContentMismatch, match=r"block 0 of 64\.00 MiB"):
        run(Faulty(vram_bytes=GIB))


def test_blocks_hold_contents_that_no_other_block_has() -> None:
    assert spill.pattern_of(3) == Pattern(0x600DB10C + 3 * 2**32)
    words = {spill.pattern_of(index).total(0, 1) for index in range(200)}
    assert len(words) == 200


@pytest.mark.parametrize(("settings", "count"), [(QUICK, 6), (FULL, 30)])
def test_requests_around_the_limit_are_reported_after_the_blocks_are_freed(
    settings: Settings, count: int
) -> None:
    forced = [one for one in pick(run(Watched(vram_bytes=GIB), settings), Request) if one.purpose == "forced"]
    assert len(forced) == count
    assert {one.vram_free_bytes for one in forced} == {GIB}
    host = [one.asked_bytes / (64 * MIB) for one in forced if one.kind != "vram"]
    assert all(0.85 < size <= 1.5 for size in host)
