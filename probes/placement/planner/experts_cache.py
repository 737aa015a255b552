"""The cache of experts: in the VRAM that a placement leaves free, and what the plan says of it. Pure.

The search places all other blocks as if no expert were in VRAM: their bytes are read in every pass, an
expert's only when it is chosen. What VRAM is left then is the cache. How often a pass finds an expert there
depends on the router, which no plan knows: the assumed hit rate is the cached share, the least that a cache
of the most popular ones can reach in the long run.
"""

from collections.abc import Sequence
from dataclasses import replace

from probes.placement.packing.format import aligned
from probes.placement.planner.costs import BlockCosts, Option
from probes.placement.planner.experts import ExpertSizes, by_experts, packs, routed_rows, table_bytes
from probes.placement.planner.kinds import Kind
from probes.placement.planner.machine import Constants
from probes.placement.planner.pools import Limits, pool_bytes
from probes.placement.planner.rules import Pass
from probes.placement.planner.search import SearchResult
from probes.placement.planner.simulation import simulate
from probes.placement.types import EXPERTS, ExpertsPlan


class _Placed:
    """The blocks of one kind that are placed expert by expert."""

    def __init__(self, kind: Kind, machine: Constants, work: Pass) -> None:
        self.kind, self.number = kind, len(kind.places)
        self.costs = BlockCosts(kind.block, machine, work)
        rows = routed_rows(kind.block, work.rows)
        self.sizes = ExpertSizes.of(kind.block, rows, packed=packs(self.costs))
        self.experts = kind.block.experts
        self.stored_bytes = self.experts * self.sizes.stored_bytes
        self.fixed_bytes = table_bytes(kind.block, packed=packs(self.costs))

    def option(self, room: int) -> Option:
        """With at most `room` bytes of VRAM for each block."""
        cache = min(room, self.stored_bytes + self.fixed_bytes + aligned(1))
        share = max(cache - self.fixed_bytes, 0) / max(self.stored_bytes, 1)
        return by_experts(self.costs, cached=min(share, 1.0), cache=cache)


def _placed(result: SearchResult, kinds: Sequence[Kind], machine: Constants, work: Pass) -> list[_Placed]:
    return [
        _Placed(kind, machine, work)
        for kind in kinds
        if kind.block.experts and result.chosen[kind.places[0]].tier in EXPERTS
    ]


def with_cache(
    result: SearchResult, kinds: Sequence[Kind], machine: Constants, work: Pass, limits: Limits
) -> SearchResult:
    """The placement with a cache of experts in the VRAM that it leaves free."""
    placed = _placed(result, kinds, machine, work)
    left = limits.vram - pool_bytes(result.pool) - sum(option.vram_bytes for option in result.chosen)
    total = sum(each.number * each.stored_bytes for each in placed)
    if left <= 0 or not total:
        return result
    chosen = list(result.chosen)
    for each in placed:
        option = each.option(left * each.stored_bytes // total + each.fixed_bytes)
        for place in each.kind.places:
            chosen[place] = option
    timeline = simulate(tuple(chosen), result.pool, replayed=limits.replayed)
    return replace(result, chosen=tuple(chosen), timeline=timeline)


def experts_plan(
    result: SearchResult, kinds: Sequence[Kind], machine: Constants, work: Pass
) -> ExpertsPlan | None:
    """What the plan says of its experts; None where no block is in a tier of theirs."""
    placed = _placed(result, kinds, machine, work)
    if not placed:
        return None
    options = [result.chosen[place] for each in placed for place in each.kind.places]
    count = sum(each.number * each.experts for each in placed)
    largest = max(each.sizes.stored_bytes for each in placed)
    cache = sum(option.vram_bytes for option in options)
    fixed = 8 * count * (3 * max(each.sizes.columns for each in placed) + 1)
    cached = max(min((cache - fixed) // max(largest, 1), count), 0)
    read = sum(each.number * each.sizes.read * each.sizes.stored_bytes for each in placed)
    missed_s = sum(option.wire_bytes for option in options) / machine.zero_copy_rate
    return ExpertsPlan(
        count=count,
        chosen=sum(each.number * each.sizes.read for each in placed),
        expert_bytes=largest,
        cached=cached,
        cache_bytes=cache,
        cached_s=max(result.timeline.seconds - missed_s, 0.0),
        missing_s=read / machine.zero_copy_rate,
        assumed_hit_rate=cached / count if count else 0.0,
    )
