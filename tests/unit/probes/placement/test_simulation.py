"""The simulation of a pass: no lane does two things at once, nothing is used before it is there."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.placement.planner.costs import Option
from probes.placement.planner.simulation import ARRIVAL_S, BUSY, RELEASE_S, simulate
from probes.placement.types import PrefetchPool

MS = 1e-3
TIMES = st.floats(0.001, 10.0)
OPTIONS = st.one_of(
    st.builds(lambda c, p: Option("resident", compute_s=c, launch_s=p), TIMES, TIMES),
    st.builds(lambda c, u: Option("packed", compute_s=c, unpack_s=u, scratch_bytes=1), TIMES, TIMES),
    st.builds(lambda c, w: Option("streamed", compute_s=c, copy_s=w, slot_bytes=1), TIMES, TIMES),
    st.builds(
        lambda c, u, w: Option(
            "streamed_packed", compute_s=c, unpack_s=u, copy_s=w, slot_bytes=1, scratch_bytes=1
        ),
        TIMES,
        TIMES,
        TIMES,
    ),
    st.builds(
        lambda c, u, w, n: Option(
            "streamed_packed", compute_s=c, unpack_s=u, copy_s=w, slot_bytes=1, scratch_bytes=1, pieces=n
        ),
        TIMES,
        TIMES,
        TIMES,
        st.integers(2, 9),
    ),
    st.builds(lambda c: Option("cpu", cpu_s=c), TIMES),
    st.builds(lambda c, s: Option("in_place", compute_s=c, shared_s=min(c, s)), TIMES, TIMES),
    st.builds(
        lambda c, w, d: Option("disk", compute_s=c, copy_s=w, disk_s=d, slot_bytes=1), TIMES, TIMES, TIMES
    ),
)


def test_a_streamed_pass_takes_as_long_as_the_link() -> None:
    blocks = [Option("streamed", compute_s=MS / 10, copy_s=MS, slot_bytes=1)] * 10
    assert simulate(blocks, PrefetchPool(slots=2)).seconds == pytest.approx(10 * MS, rel=0.02)


def test_with_one_slot_copies_wait_for_the_block_before() -> None:
    blocks = [Option("streamed", compute_s=MS, copy_s=MS, slot_bytes=1)] * 10
    handed_over = 10 * (ARRIVAL_S + RELEASE_S)
    slower = 10 * MS * BUSY  # kernels run as long as copies do
    assert simulate(blocks, PrefetchPool(slots=1)).seconds == pytest.approx(
        20 * MS + handed_over + slower, rel=1e-6
    )
    assert simulate(blocks, PrefetchPool(slots=2)).seconds == pytest.approx(10 * MS + slower, rel=0.15)


@pytest.mark.parametrize("replayed", [False, True])
def test_three_slots_for_pieces_of_an_eighth_keep_the_link_busy_while_packed_blocks_compute(
    replayed: bool,
) -> None:
    """As measured: 17.25 ms with pieces, 17.73 with a slot for a whole block, 16.95 on the link alone."""
    whole = Option("streamed_packed", 0.09 * MS, 0.14 * MS, copy_s=4.24 * MS, slot_bytes=8, scratch_bytes=1)
    cut = replace(whole, slot_bytes=1, pieces=8)
    stays = Option("packed", 0.09 * MS, 0.14 * MS, scratch_bytes=1)
    pool = PrefetchPool(slots=1, scratches=1)
    by_one_slot = simulate([whole, *[stays] * 4] * 4, pool, replayed=replayed).seconds
    by_pieces = simulate([cut, *[stays] * 4] * 4, replace(pool, slots=3), replayed=replayed).seconds
    assert by_one_slot == pytest.approx(17.7 * MS, rel=0.02)
    assert by_pieces == pytest.approx(17.25 * MS, rel=0.015)


def test_copies_run_while_resident_blocks_compute() -> None:
    blocks = [
        Option("resident", compute_s=MS),
        Option("streamed", compute_s=MS / 100, copy_s=MS, slot_bytes=1),
    ] * 5
    assert simulate(blocks, PrefetchPool(slots=2)).seconds == pytest.approx(5.05 * MS * (1 + BUSY), rel=0.05)


def test_a_pass_that_waits_for_python_takes_as_long_as_python() -> None:
    assert simulate(
        [Option("resident", compute_s=MS / 100, launch_s=MS)] * 4, PrefetchPool()
    ).seconds == pytest.approx(4 * MS, rel=0.01)


@pytest.mark.thorough
@given(
    blocks=st.lists(OPTIONS, min_size=1, max_size=12), slots=st.integers(1, 3), scratches=st.integers(1, 2)
)
def test_lanes_do_one_thing_at_a_time_and_in_order(blocks: list[Option], slots: int, scratches: int) -> None:
    made = simulate(blocks, PrefetchPool(slots=slots, scratches=scratches))
    device = sorted((s.begin_s, s.end_s) for s in made.spans if s.lane in ("compute", "unpack", "cpu"))
    link = sorted((s.begin_s, s.end_s) for s in made.spans if s.lane == "copy")
    for lane in (device, link):
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(lane))
    lanes = [sum(option.lanes[lane] for option in blocks) for lane in range(4)]
    assert made.seconds >= max(lanes) - 1e-9
    waits = len(blocks) * (ARRIVAL_S + RELEASE_S) + BUSY * sum(option.copy_s for option in blocks)
    assert made.seconds <= sum(lanes) + waits + 1e-9
    for block, option in enumerate(blocks):
        mine = {span.lane: span for span in made.spans if span.block == block}
        if option.copy_s:
            first = mine.get("unpack", mine["compute"])
            assert mine["copy"].end_s <= first.begin_s + 1e-9


def test_nothing_of_a_replayed_pass_runs_beside_the_pass_before() -> None:
    """28 layers, 5 of them streamed, took 17.7 ms on an H200 where link and GPU needed 13 each.

    The slots are full when a graph begins, so the link waits for the first streamed block; and the copies
    for the next pass are made when this one has computed nearly everything.
    """
    blocks = [Option("resident", compute_s=MS)] * 3 + [
        Option("streamed", compute_s=MS, copy_s=4 * MS, slot_bytes=1)
    ]
    copied = 4 * MS * (1 + BUSY)
    assert simulate(blocks, PrefetchPool(slots=1)).seconds == pytest.approx(MS + copied, rel=0.01)
    assert simulate(blocks, PrefetchPool(slots=1), replayed=True).seconds == pytest.approx(
        4 * MS + copied, rel=0.01
    )
    backwards = simulate(blocks[::-1], PrefetchPool(slots=1), replayed=True).seconds
    assert backwards == pytest.approx(MS + copied, rel=0.01)


def test_a_graph_unpacks_nothing_for_the_next_pass() -> None:
    """4 layers of experts took 14.6 ms on an H100, not 12.1, while the runtime unpacked ahead."""
    moving = Option(
        "streamed_packed", compute_s=MS / 4, unpack_s=MS / 4, copy_s=6 * MS, slot_bytes=1, scratch_bytes=1
    )
    blocks = [moving, *[Option("resident", compute_s=MS)] * 2, moving, moving]
    for scratches in (1, 2):
        made = simulate(blocks, PrefetchPool(slots=1, scratches=scratches), replayed=True)
        assert [span.block for span in made.spans if span.lane == "unpack"] == [0, 3, 4]
        first = min(span.begin_s for span in made.spans if span.lane == "copy")
        assert first == pytest.approx(MS / 4, rel=0.01)


def test_a_small_block_keeps_its_slot_from_the_next_large_one_at_a_graphs_end() -> None:
    """Each block has one slot: 9 blocks of a diffusion transformer took 23.4 ms on an H100, not 24.5."""
    small = Option("streamed", compute_s=MS, copy_s=MS / 100, slot_bytes=1)
    large = Option(
        "streamed_packed", compute_s=2 * MS, unpack_s=MS / 10, copy_s=2 * MS, slot_bytes=1, scratch_bytes=1
    )
    made = simulate([small, large, large, large], PrefetchPool(slots=2, scratches=1), replayed=True)
    assert [span.block for span in made.spans if span.lane == "copy"] == [2, 3, 0, 1]
    assert max((span.end_s, span.block, span.lane) for span in made.spans)[1:] == (1, "copy")


def test_a_block_has_the_same_slot_in_every_pass() -> None:
    """Three streamed blocks and two slots: the first block's copy waits for the third, which has its slot."""
    blocks = [Option("streamed", compute_s=3 * MS, copy_s=MS, slot_bytes=1)] * 3
    copies = sorted(s.begin_s for s in simulate(blocks, PrefetchPool(slots=2)).spans if s.lane == "copy")
    assert copies[0] >= 0.0
    assert simulate(blocks, PrefetchPool(slots=2)).seconds == pytest.approx(10 * MS, rel=0.01)


def test_copies_wait_while_the_cpu_reads_the_same_memory() -> None:
    """A block on the CPU takes its share of the host's memory from the copies beside it."""
    streamed = [Option("streamed", compute_s=MS / 10, copy_s=MS, slot_bytes=1)] * 10
    alone = Option("cpu", cpu_s=MS / 10)
    beside = replace(alone, shared_s=4 * MS)
    quiet = simulate([*streamed, alone], PrefetchPool(slots=2)).seconds
    assert simulate([*streamed, beside], PrefetchPool(slots=2)).seconds == pytest.approx(
        quiet + 4 * MS, rel=0.05
    )
