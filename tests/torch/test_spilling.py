"""Which blocks stream instead when weights pack worse than the plan counts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from probes.placement.models.reading import describe
from probes.placement.planner.machine import profile
from probes.placement.planner.plan import make_plan
from probes.placement.runtime.builder import PlannedBytes, SpillCandidate, choose_spilled
from probes.placement.types import Workload

MIB = 1 << 20


def blocks(*sizes: int, packed: bool = True) -> list[SpillCandidate]:
    return [SpillCandidate(place, size, (size, 0), packed) for place, size in enumerate(sizes)]


def moved(candidates: Sequence[SpillCandidate], over: int, count: int, size: int) -> list[int] | None:
    found = choose_spilled(candidates, over, (count, 0), (size, 0))
    return None if found is None else sorted(one.freed for one in found)


def test_the_largest_blocks_are_moved_until_it_is_enough() -> None:
    assert moved(blocks(5, 9, 7, 20), 6, 2, 20) == [20]
    assert moved(blocks(5, 9, 7, 20), 27, 2, 20) == [9, 20]


def test_no_slot_becomes_larger_where_smaller_blocks_are_enough() -> None:
    assert moved(blocks(4, 4, 4, 30), 9, 2, 4) == [4, 4, 4]


def test_a_block_that_makes_slots_larger_has_to_free_what_they_take_besides() -> None:
    assert moved(blocks(4, 10, 10, 10), 15, 2, 4) == [4, 10, 10, 10]
    assert moved(blocks(10, 10), 9, 1, 0) == [10, 10]
    assert moved(blocks(10), 1, 1, 0) is None


def test_a_block_in_pieces_needs_small_slots_only() -> None:
    block = SpillCandidate(3, 80, (10, 0))
    assert choose_spilled([block], 50, (6, 1), (10, 0)) == [block]


def test_a_block_that_needs_a_larger_scratch_buffer_comes_last() -> None:
    larger, other = SpillCandidate(0, 90, (10, 60)), SpillCandidate(1, 30, (10, 0))
    assert choose_spilled([larger, other], 30, (2, 1), (10, 0)) == [other]
    assert choose_spilled([larger, other], 31, (2, 1), (10, 0)) == [other, larger]
    assert choose_spilled([larger], 31, (2, 1), (10, 0)) is None


def test_of_those_that_need_no_larger_slots_packed_blocks_go_first() -> None:
    both = [*blocks(5, 6), *blocks(100, 7, packed=False)]
    assert moved(both, 11, 1, 100) == [5, 6]
    assert moved(both, 12, 1, 100) == [5, 6, 100]
    assert moved(both, 12, 1, 7) == [5, 6, 7]
    assert moved(both, 119, 1, 100) is None


@pytest.mark.parametrize("seed", range(200))
def test_what_is_moved_is_enough_and_nothing_is_moved_for_no_reason(seed: int) -> None:
    draw = random.Random(seed)
    count, slot = draw.randint(1, 4), draw.choice([0, 10, 60])
    candidates = [
        SpillCandidate(
            place, size := draw.randint(1, 60), (draw.choice([size, size // 4 + 1]), 0), draw.random() < 0.7
        )
        for place in range(draw.randint(0, 8))
    ]
    over = draw.randint(1, 150)
    found = choose_spilled(candidates, over, (count, 0), (slot, 0))
    if found is None:
        several = (chosen for n in range(len(candidates) + 1) for chosen in combinations(candidates, n))
        assert all(_left(chosen, over, count, slot) > 0 for chosen in several)
        return
    assert len(set(found)) == len(found)
    assert _left(found, over, count, slot) <= 0
    assert _left(found[:-1], over, count, slot) > 0


def _left(found: Sequence[SpillCandidate], over: int, count: int, slot: int) -> int:
    """The bytes that are still too many."""
    wider = max((one.needs[0] for one in found), default=0)
    return over + count * max(wider - slot, 0) - sum(one.freed for one in found)


def test_a_plan_counts_what_stays_in_vram_and_what_its_budget_leaves_of_host_memory() -> None:
    plan = make_plan(
        describe("qwen2.5-3b"),
        profile("wx4100"),
        vram=4 << 30,
        host=16 << 30,
        workload=Workload(2, 16, 64),
        objective="exact",
    ).plan
    counted = PlannedBytes.of(plan)
    assert counted is not None
    arena = plan.vram.weights + plan.vram.slots + plan.vram.scratch
    assert arena <= counted.vram < arena + 2 * MIB
    assert plan.vram.total - plan.vram.context + counted.vram - arena <= plan.vram_budget + 2 * MIB
    assert set(counted.blocks) == {block.name for block in plan.blocks}
    arena = sum(block.host_bytes for block in plan.blocks if block.tier != "cpu")
    assert counted.host - arena == plan.host_budget - plan.host.total
    exact = replace(plan, vram=replace(plan.vram, rounding=0))
    assert PlannedBytes.of(exact) == replace(
        counted, vram=plan.vram.weights + plan.vram.slots + plan.vram.scratch
    )
    assert PlannedBytes.of(replace(plan, vram_budget=0, host_budget=0)) is None
