"""A plan over several equal cards: the blocks are cut into stages, one a card. No torch, no GPU. Pure.

In one pass the cards compute in turn. Their links are their own, but a card whose turn hasn't come can copy
no more than its slots hold: so a pass takes about as long as all stages together. With as many passes under
way as there are cards, a pass ends each time that the slowest stage is through, or what the stages share: the
CPU and Python.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from probes.core.errors import PlanImpossible, UsageError
from probes.placement.models.description import DTYPE_BITS, BlockDescription, ModelDescription
from probes.placement.models.ranges import Ranges
from probes.placement.planner.compute_dtype import Compute, with_compute_dtype
from probes.placement.planner.costs import Option
from probes.placement.planner.machine import Constants, with_host
from probes.placement.planner.plan import PlanResult, check_numbers, make_plan
from probes.placement.planner.simulation import Timeline, simulate_cards
from probes.placement.planner.tiers import SYNC_S
from probes.placement.types import CardsPlan, Objective, PassTime, Plan, Workload

MOST_CARDS: Final = 16
STAGE_MARK: Final = ", part "  # between a model's name and the number of a stage


@dataclass(frozen=True)
class CardsResult:
    """A plan over several cards, and what a picture of it needs."""

    plan: CardsPlan
    timeline: Timeline

    @property
    def joined(self) -> Plan:
        """All blocks as if they were of one plan, for a picture."""
        first, *others = self.plan.cards
        name = first.model.partition(STAGE_MARK)[0]
        machine = f"{len(self.plan.cards)} x {first.machine}"
        blocks = (*first.blocks, *(block for card in others for block in card.blocks))
        return replace(first, model=name, machine=machine, blocks=blocks, time=self.plan.time)


def make_cards_plan(
    model: ModelDescription,
    machine: Constants,
    *,
    cards: int,
    vram: int,
    host: int | None,
    workload: Workload,
    objective: Objective,
    captured: bool = False,
    compute: Compute = "auto",
    ranges: Ranges | None = None,
) -> CardsResult:
    """The plan over `cards` equal cards with `vram` bytes each, and `host` bytes in all.

    Raises PlanImpossible for a stage that fits no card, UsageError for more cards than blocks or none.
    """
    check_numbers(workload, vram=vram, host=host)
    if isinstance(cards, bool) or not isinstance(cards, int):
        raise UsageError(f"cards is {str(cards)[:40]!r}, not a whole number", "give how many there are")
    if not 1 <= cards <= min(MOST_CARDS, len(model.blocks)):
        most = min(MOST_CARDS, len(model.blocks))
        raise UsageError(f"{model.name} can be cut into 1 to {most} stages, not {cards}", "lower --cards")
    model = with_compute_dtype(model, machine, objective=objective, compute=compute, ranges=ranges)
    machine, host = with_host(machine, host)
    memory = machine.host_bytes if host is None else host
    stages = [
        _stage(
            part,
            machine,
            vram=vram,
            host=None if memory is None else memory // cards,
            workload=workload,
            objective=objective,
            captured=captured,
        )
        for part in _parts(model, cards)
    ]
    rows = workload.batch * (1 if workload.context_tokens else workload.tokens)
    firsts = [part.blocks[0].computed(model.becomes) for part in _parts(model, cards)]
    row = max(map(_row_bytes, firsts[1:]), default=0)
    return _joined(stages, machine, rows * row)


def _stage(
    part: ModelDescription,
    machine: Constants,
    *,
    vram: int,
    host: int | None,
    workload: Workload,
    objective: Objective,
    captured: bool,
) -> PlanResult:
    try:
        return make_plan(
            part,
            machine,
            vram=vram,
            host=host,
            workload=workload,
            objective=objective,
            captured=captured,
        )
    except PlanImpossible as error:
        raise PlanImpossible(error.message, f"for this part: {error.hint}") from error


def _parts(model: ModelDescription, cards: int) -> Iterator[ModelDescription]:
    """The blocks cut where the bytes so far come closest to equal shares; no part is empty."""
    total, begin = model.weight_bytes, 0
    sums = [0]
    for block in model.blocks:
        sums.append(sums[-1] + block.weight_bytes)
    for card in range(1, cards + 1):
        last = len(model.blocks) - (cards - card)
        ends = range(begin + 1, last + 1)
        end = last if card == cards else min(ends, key=lambda at: abs(sums[at] - total * card / cards))
        name = f"{model.name}{STAGE_MARK}{card} of {cards}" if cards > 1 else model.name
        yield replace(model, name=name, blocks=model.blocks[begin:end])
        begin = end


def _row_bytes(block: BlockDescription) -> int:
    """Bytes of one row of a block's input: what its first matrix multiplies."""
    matrix = next((tensor for tensor in block.tensors if len(tensor.shape) >= 2), None)
    return matrix.inputs * DTYPE_BITS[matrix.dtype] // 8 if matrix else 0


def _joined(stages: Sequence[PlanResult], machine: Constants, moved: int) -> CardsResult:
    """The stages in one pass; activations go to the next card by way of the host."""
    over = 2 * (machine.link_alpha_s + moved / machine.link_rate) + SYNC_S
    chosen = [stage.found.chosen for stage in stages]
    for later in range(1, len(chosen)):
        first: Option = chosen[later][0]
        chosen[later] = (replace(first, compute_s=first.compute_s + over), *chosen[later][1:])
    timeline = simulate_cards(
        [(options, stage.found.rings) for options, stage in zip(chosen, stages, strict=True)]
    )
    seconds, spread = timeline.seconds, machine.spread
    slowest = max((stage.plan.time for stage in stages), key=lambda time: time.middle_s)
    time = PassTime(seconds, seconds * (1 - spread), seconds * (1 + spread), slowest.bound)
    plans = tuple(stage.plan for stage in stages)
    interval = max(slowest.middle_s, *_shared(stages))
    return CardsResult(CardsPlan(plans, time, interval, moved), timeline)


def _shared(stages: Sequence[PlanResult]) -> tuple[float, float]:
    """Seconds of a pass on the CPU, and of Python, which all cards share."""
    options = [option for stage in stages for option in stage.found.chosen]
    return sum(option.cpu_s for option in options), sum(option.launch_s for option in options)
