"""The simulation of a pass: no lane does two things at once, nothing is used before it is there."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.placement.planner.costs import Option
from probes.placement.planner.timeline import simulate
from probes.placement.values import Rings

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
    st.builds(lambda c: Option("cpu", cpu_s=c), TIMES),
    st.builds(lambda c, s: Option("in_place", compute_s=c, shared_s=min(c, s)), TIMES, TIMES),
    st.builds(
        lambda c, w, d: Option("disk", compute_s=c, copy_s=w, disk_s=d, slot_bytes=1), TIMES, TIMES, TIMES
    ),
)


def test_a_streamed_pass_takes_as_long_as_the_link() -> None:
    blocks = [Option("streamed", compute_s=MS / 10, copy_s=MS, slot_bytes=1)] * 10
    assert simulate(blocks, Rings(slots=2)).seconds == pytest.approx(10 * MS, rel=0.02)


def test_with_one_slot_copies_wait_for_the_block_before() -> None:
    blocks = [Option("streamed", compute_s=MS, copy_s=MS, slot_bytes=1)] * 10
    assert simulate(blocks, Rings(slots=1)).seconds == pytest.approx(20 * MS, rel=0.02)
    assert simulate(blocks, Rings(slots=2)).seconds == pytest.approx(10 * MS, rel=0.15)


def test_copies_run_while_resident_blocks_compute() -> None:
    blocks = [
        Option("resident", compute_s=MS),
        Option("streamed", compute_s=MS / 100, copy_s=MS, slot_bytes=1),
    ] * 5
    assert simulate(blocks, Rings(slots=2)).seconds == pytest.approx(5.05 * MS, rel=0.05)


def test_a_pass_that_waits_for_python_takes_as_long_as_python() -> None:
    assert simulate(
        [Option("resident", compute_s=MS / 100, launch_s=MS)] * 4, Rings()
    ).seconds == pytest.approx(4 * MS, rel=0.01)


@pytest.mark.thorough
@given(
    blocks=st.lists(OPTIONS, min_size=1, max_size=12), slots=st.integers(1, 3), scratches=st.integers(1, 2)
)
def test_lanes_do_one_thing_at_a_time_and_in_order(blocks: list[Option], slots: int, scratches: int) -> None:
    made = simulate(blocks, Rings(slots=slots, scratches=scratches))
    device = sorted((s.begin_s, s.end_s) for s in made.spans if s.lane in ("compute", "unpack", "cpu"))
    link = sorted((s.begin_s, s.end_s) for s in made.spans if s.lane == "copy")
    for lane in (device, link):
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(lane))
    lanes = [sum(option.lanes[lane] for option in blocks) for lane in range(4)]
    assert made.seconds >= max(lanes) - 1e-9
    assert made.seconds <= sum(lanes) + 1e-9
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
    assert simulate(blocks, Rings(slots=1)).seconds == pytest.approx(5 * MS, rel=0.01)
    assert simulate(blocks, Rings(slots=1), replayed=True).seconds == pytest.approx(8 * MS, rel=0.01)
    assert simulate(blocks[::-1], Rings(slots=1), replayed=True).seconds == pytest.approx(5 * MS, rel=0.01)


def test_a_block_has_the_same_slot_in_every_pass() -> None:
    """Three streamed blocks and two slots: the first block's copy waits for the third, which has its slot."""
    blocks = [Option("streamed", compute_s=3 * MS, copy_s=MS, slot_bytes=1)] * 3
    copies = sorted(s.begin_s for s in simulate(blocks, Rings(slots=2)).spans if s.lane == "copy")
    assert copies[0] >= 0.0
    assert simulate(blocks, Rings(slots=2)).seconds == pytest.approx(10 * MS, rel=0.01)
