"""A plan over several equal cards: the blocks are cut into stages, one for each card. No torch, no GPU. Pure.

In one pass the cards compute in turn. Each has a link of its own, but a card whose turn hasn't come can copy
no more than its slots hold, so a pass takes about as long as all stages together. With as many passes under
way as there are cards, a pass ends as often as the slowest stage does, or as what the stages share lets it:
the CPU and Python.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from probes.core.errors import PlanImpossible, UsageError
from probes.placement.models.description import DTYPE_BITS, BlockDescription, ModelDescription
from probes.placement.planner.compute_dtype import with_compute_dtype
from probes.placement.planner.costs import Option
from probes.placement.planner.machine import Constants, with_host
from probes.placement.planner.plan import PlanResult, check_numbers, make_plan, pass_time
from probes.placement.planner.simulation import Timeline, simulate_cards
from probes.placement.planner.tiers import SYNC_S
from probes.placement.types import CardsPlan, Objective, Plan, Workload

MOST_CARDS: Final = 16
STAGE_MARK: Final = ", part "  # between the model's name and the number of the stage, in a stage's name


@dataclass(frozen=True)
class CardsResult:
    """A plan over several cards, and the timeline for a picture of it."""

    plan: CardsPlan
    timeline: Timeline

    @property
    def joined(self) -> Plan:
        """All blocks in one plan, for a picture."""
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
    model = with_compute_dtype(model, machine, objective=objective)
    machine, host = with_host(machine, host)
    host_bytes = machine.host_bytes if host is None else host
    parts, stages = list(_parts(model, cards)), []
    for part in parts:
        try:
            stage = make_plan(
                part,
                machine,
                vram=vram,
                host=None if host_bytes is None else host_bytes // cards,
                workload=workload,
                objective=objective,
                captured=captured,
                experts_apart=False,
            )
        except PlanImpossible as error:
            raise PlanImpossible(error.message, f"for this part: {error.hint}") from error
        stages.append(stage)
    rows = workload.batch * (1 if workload.context_tokens else workload.tokens)
    row_bytes = max((_row_bytes(part.blocks[0].computed(model.becomes)) for part in parts[1:]), default=0)
    return _joined(model, stages, machine, rows * row_bytes)


def _parts(model: ModelDescription, cards: int) -> Iterator[ModelDescription]:
    """The model cut into stages where the bytes come closest to equal shares; no stage is empty."""
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
    """Bytes of one row of a block's input, which its first matrix multiplies."""
    matrix = next((tensor for tensor in block.tensors if len(tensor.shape) >= 2), None)
    return matrix.inputs * DTYPE_BITS[matrix.dtype] // 8 if matrix else 0


def _joined(
    model: ModelDescription, stages: Sequence[PlanResult], machine: Constants, handed_over: int
) -> CardsResult:
    """The plan of all stages. `handed_over`: bytes of activations that cross the host to the next card."""
    crossing_s = 2 * (machine.link_alpha_s + handed_over / machine.link_rate) + SYNC_S
    chosen = [stage.search.chosen for stage in stages]
    for later in range(1, len(chosen)):
        first: Option = chosen[later][0]
        chosen[later] = (replace(first, compute_s=first.compute_s + crossing_s), *chosen[later][1:])
    timeline = simulate_cards(
        [(options, stage.search.pool) for options, stage in zip(chosen, stages, strict=True)]
    )
    seconds = timeline.seconds
    slowest = max((stage.plan.time for stage in stages), key=lambda time: time.middle_s)
    time = pass_time(model, machine, seconds, slowest.bound)
    plans = tuple(stage.plan for stage in stages)
    interval = max(slowest.middle_s, *_shared_s(stages))
    return CardsResult(CardsPlan(plans, time, interval, handed_over), timeline)


def _shared_s(stages: Sequence[PlanResult]) -> tuple[float, float]:
    """Seconds of the CPU and of Python in a pass, which all cards share."""
    options = [option for stage in stages for option in stage.search.chosen]
    return sum(option.cpu_s for option in options), sum(option.launch_s for option in options)
