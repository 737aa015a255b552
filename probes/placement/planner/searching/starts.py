"""Placements to begin with: of the best counts for many rings, and of those without some tiers. Pure.

The integer program takes lanes for independent. With a few slots they aren't: copies stand still while one
block is computed or unpacked for long. So different counts are placed, and the simulation judges them.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

from probes.placement.planner.costs.option import Option
from probes.placement.planner.searching.blockkinds import Kind, undominated
from probes.placement.planner.searching.countprogram import (
    Used,
    count_program,
    options_fitting,
    spread_out,
    used_options,
)
from probes.placement.planner.searching.placed import MANY_BLOCKS, Limits, Placed, placed
from probes.placement.planner.searching.ringsizes import notable, rings_tried, with_sizes
from probes.placement.planner.searching.simulation import Blocks
from probes.placement.planner.solver.integers import LOOSE_GAP, Search
from probes.placement.planner.solver.program import Counts
from probes.placement.values import Rings, Tier

MOST_WAYS: Final = 60  # in which the best counts are looked for, the most promising ones
WORTH_POLISHING: Final = 0.002  # of what the integer program promises, that a pass takes longer
# Tiers without which counts are looked for too; the plan is the one that the simulation finds quickest.
LEFT_OUT: Final[tuple[tuple[Tier, ...], ...]] = (
    ("cpu",),
    ("packed", "streamed_packed"),
    ("in_place",),
    ("streamed", "streamed_packed"),
    ("cpu", "packed", "streamed_packed", "in_place"),
)
LEFT_OUT_OF_MANY: Final = (LEFT_OUT[2], LEFT_OUT[-1])  # of very many blocks, of which each search takes long
# A link that waits for slots isn't always busy: counts are also looked for as if it took so much longer.
LONGER: Final = (1.06, 1.15, 1.3)
VARIED: Final = 5  # rings, the two best and those of other sizes, for which that is done
NEARBY: Final = 1.3  # times a size: those within are tried where the size is one of the two best


@dataclass(frozen=True)
class Way:
    """How counts are looked for."""

    rings: Rings
    least: int = 0  # bytes of the slot that a block which moves needs at least
    longer: float = 1.0  # times, that the link is taken to be busy with copies
    without: tuple[Tier, ...] = ()


@dataclass(frozen=True)
class Start:
    """Counts, how they were found, and their blocks placed."""

    counts: Counts
    way: Way
    placed: Placed

    @property
    def tiers(self) -> set[Tier]:
        """Those that any block has."""
        return {option.tier for option in self.placed.chosen}


class Starts:
    """Placements to begin with, of different counts, the quickest first."""

    def __init__(self, found: Sequence[Kind], limits: Limits) -> None:
        self._found, self._limits = found, limits
        self.made: list[Start] = []
        self.promised = math.inf  # the least time that the program promises
        self._answers: dict[tuple[Rings, float], list[_Answer]] = {}
        self._known: set[Used] = set()
        self._undominated: dict[tuple[int, tuple[Option, ...]], Kind] = {}

    @property
    def _least(self) -> float:
        return self.made[0].placed.seconds if self.made else math.inf

    def may_be_better(self) -> bool:
        """Whether a pass may take notably less time than the best so far."""
        return self._least > self.promised * (1 + WORTH_POLISHING)

    def of_all_rings(self) -> None:
        """The best counts for each of the rings that promise less than the best placement so far takes."""
        waiting: list[tuple[float, int, _Allowed]] = []
        ticket, seen = itertools.count(), set()

        def wait(way: Way) -> None:
            one = self._allowed(way)
            if (way.rings, one.moving) not in seen and not self._answered(one):
                seen.add((way.rings, one.moving))
                heapq.heappush(waiting, (one.search.promise, next(ticket), one))

        for rings in rings_tried(self._found, self._limits):
            wait(Way(rings))
        self.promised = waiting[0][0] if waiting else math.inf
        for _ in range(MOST_WAYS):
            if not waiting or waiting[0][0] >= self._least:
                break
            _, _, allowed = heapq.heappop(waiting)
            rings = allowed.way.rings
            smaller = self._try(allowed, better_than=self._least)
            if not notable(rings.slot_bytes, rings.scratch_bytes, self._limits):
                continue
            if smaller:
                wait(replace(allowed.way, rings=smaller))
            if not allowed.way.least:  # promises no more than this, so it isn't looked at before
                wait(replace(allowed.way, least=rings.slot_bytes // 2))

    def of_the_best_rings(self) -> None:
        """Counts for those as if the link took longer, without tiers that they use, in sizes nearby."""
        first = self.made[0].placed.chosen
        used = {start.way: start.tiers for start in reversed(self.made)}
        each_size = {start.way.rings.slot_bytes: start.way for start in reversed(self.made)}
        ranked = list(dict.fromkeys(start.way for start in self.made))
        different = sorted(each_size.values(), key=ranked.index)
        best = list(dict.fromkeys((*ranked[:2], *different)))[:VARIED]
        promising = min(self.made, key=lambda start: start.counts.cost).way
        if len(first) > MANY_BLOCKS:
            for tiers in LEFT_OUT_OF_MANY:
                self._try(self._allowed(replace(promising, without=tiers)))
            return
        ways = [replace(way, longer=longer) for way in best for longer in LONGER]
        others = dict.fromkeys((promising, *best))
        ways += [replace(way, without=t) for t in LEFT_OUT for way in others if used[way] & set(t)]
        slots = {option.slot_bytes for kind in self._found for option in kind.options}
        for way in best[:2]:
            slot, scratch = way.rings.slot_bytes, way.rings.scratch_bytes
            near = (size for size in slots if size != slot and slot < NEARBY * size < NEARBY**2 * slot)
            ways += [replace(way, rings=with_sizes(way.rings, size, scratch)) for size in near]
        for way in ways:
            self._try(self._allowed(way))

    def _try(self, allowed: "_Allowed", better_than: float = math.inf) -> Rings | None:
        """Place the best counts. The rings that they need, if there are any counts."""
        if self._answered(allowed):
            return None
        counts = allowed.search.run(better_than)
        if counts is None:
            return None
        used = used_options(allowed.kinds, counts)
        of_these = frozenset(option for one in used for option, _ in one)
        self._answers.setdefault(allowed.program, []).append(_Answer(allowed.options, of_these, counts.gap))
        if used not in self._known:
            self._known.add(used)
            ways = (
                spread_out(allowed.kinds, counts, early=e) for e in sorted({False, self._limits.replayed})
            )
            made = filter(None, (placed(Blocks(chosen), self._limits) for chosen in ways))
            if best := min(made, key=attrgetter("seconds"), default=None):
                self.made.append(Start(counts, allowed.way, best))
                self.made.sort(key=lambda start: start.placed.seconds)
        slot, scratch = max(o.slot_bytes for o in of_these), max(o.scratch_bytes for o in of_these)
        return with_sizes(allowed.way.rings, slot, scratch)

    def _answered(self, allowed: "_Allowed") -> bool:
        """Whether the best counts of these options are known, or those of more use no others."""
        answers = self._answers.get(allowed.program, ())
        return any(
            one.used <= allowed.options <= one.options
            and (one.gap <= LOOSE_GAP or allowed.options == one.options)
            for one in answers
        )

    def _allowed(self, way: Way) -> "_Allowed":
        made: list[Kind] = []
        options: list[Option] = []
        for nth, kind in enumerate(self._found):
            fitting = options_fitting(kind.options, way.rings.slot_bytes, way.rings.scratch_bytes)
            few = tuple(o for o in fitting if not 0 < o.slot_bytes < way.least and o.tier not in way.without)
            options += few
            if (nth, few) not in self._undominated:
                self._undominated[nth, few] = replace(kind, options=undominated(few))
            made.append(self._undominated[nth, few])
        return _Allowed(way, made, frozenset(options), self._limits)


class _Answer(NamedTuple):
    """The options that counts were looked for with, and those of the best ones."""

    options: frozenset[Option]
    used: frozenset[Option]
    gap: float


@dataclass(frozen=True)
class _Allowed:
    """The options of each kind that are of use on a way, and the search for counts of them."""

    way: Way
    kinds: Sequence[Kind]
    options: frozenset[Option]  # all that are allowed
    limits: Limits

    @cached_property
    def search(self) -> Search:
        """The search for counts."""
        return Search(count_program(self.kinds, self.way.rings, self.limits, self.way.longer))

    @property
    def program(self) -> tuple[Rings, float]:
        """What the program is made of, besides the options."""
        return self.way.rings, self.way.longer

    @property
    def moving(self) -> frozenset[int]:
        """The sizes of slots that blocks need which may move."""
        return frozenset(option.slot_bytes for kind in self.kinds for option in kind.options)
