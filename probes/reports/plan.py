"""A plan as text: the answer in a few sentences, then tables by tier and by memory. Pure."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from probes.core.quoting import terminal
from probes.core.units import binary_bytes, counted, duration
from probes.placement.planner.multi_gpu import STAGE_MARK
from probes.placement.types import TIER_FACTS, TIERS, BlockPlan, CardsPlan, Plan, Tier
from probes.reports.text import draw_grid

BOUND_WORDS: Final = {
    "vram": "reading weights in VRAM",
    "link": "the link between host and GPU",
    "compute": "arithmetic on the GPU",
    "launch": "Python, which launches the kernels",
    "host": "the CPU or the disk",
}
TABLE_WORDS: Final = "as a table: packed; lookups and products unpack only what they need"
RESTS_ON_WORDS: Final = {
    "measured": "traced: each distinct operation of the pass was run and timed on this GPU",
    "trace": "traced: each operation of the pass was counted",
    "rules": "by rules for its architecture; nothing was traced",
    "guesses": "guessed from its tensors' shapes; nothing was traced, so the time may be several times that",
}
OBJECTIVE_WORDS: Final = {
    "exact": "outputs have the same bits as those of a model that fits; --objective fast may be quicker",
    "fast": "sums may be rounded in another order than in a model that fits; --objective exact keeps them",
}
MOST_RANGES: Final = 3  # of blocks that a row names
MOST_NAME: Final = 80  # characters of each


def lines(plan: Plan) -> str:
    """The whole plan as text."""
    return "\n\n".join([*_answer(plan), _by_tier(plan), *_experts(plan), _by_memory(plan), *_notes(plan)])


def cards_lines(plan: CardsPlan) -> str:
    """A plan over several cards as text: the answer, then each card's tables."""
    first, time = plan.cards[0], plan.time
    name = terminal(first.model.partition(STAGE_MARK)[0])
    answer = (
        f"{name} on {len(plan.cards)} x {terminal(first.machine)}: can be placed, and takes "
        f"{duration(time.middle_s)} a pass "
        f"({duration(time.low_s)} to {duration(time.high_s)} in 9 of 10 cases, predicted).\n"
        f"With {len(plan.cards)} passes under way, one ends every {duration(plan.interval_s)}.\n"
        f"Each card hands {binary_bytes(plan.hand_over_bytes)} of activations to the next in a pass.\n"
        f"{_how(first)}"
    )
    parts = [answer]
    for number, card in enumerate(plan.cards, start=1):
        parts += [f"card {number}: {duration(card.time.middle_s)} a pass", _by_tier(card), _by_memory(card)]
    notes = dict.fromkeys(note for card in plan.cards for note in card.notes)
    return "\n\n".join([*parts, *("note: " + terminal(note) for note in notes)])


def _answer(plan: Plan) -> Iterable[str]:
    work, time = plan.workload, plan.time
    weights = sum(block.weight_bytes for block in plan.blocks)
    rate = f"{work.batch / time.middle_s:.3g} tokens/s" if time.middle_s else "in no time"
    what = (
        f"generates a token every {duration(time.middle_s)}"
        f" ({rate}{_batch(work.batch)}, "
        f"{work.context_tokens} tokens of context)"
        if work.context_tokens
        else f"takes {duration(time.middle_s)} a pass "
        f"(batch {work.batch}, {counted(work.tokens, 'token')} each)"
    )
    interval = f"{duration(time.low_s)} to {duration(time.high_s)}"
    yield (
        f"{terminal(plan.model)} ({binary_bytes(weights)} of weights) on {terminal(plan.machine)}: can be "
        f"placed, and {what}.\n"
        f"predicted: {interval} in 9 of 10 cases; most of that is {BOUND_WORDS[time.bound]}.\n"
        f"{_how(plan)}"
    )


def _how(plan: Plan) -> str:
    """Where the speeds are from, how passes are run, and what that means for the outputs."""
    kind, _, origin = plan.constants.partition(": ")
    speeds = f"measured in {origin}" if kind == "measured" else f"those of the {origin}, not measured here"
    passes = "replayed as CUDA graphs" if plan.captured else "eager"
    return (
        f"speeds: {terminal(speeds)}; passes: {passes}\n"
        f"the model's work: {RESTS_ON_WORDS[plan.rests_on]}\n"
        f"objective {plan.objective}: {OBJECTIVE_WORDS[plan.objective]}"
    )


def _batch(batch: int) -> str:
    return "" if batch == 1 else f" in {batch} sequences"


def _by_tier(plan: Plan) -> str:
    ways: dict[tuple[Tier, bool, bool], list[BlockPlan]] = {}
    for block in plan.blocks:
        ways.setdefault((block.tier, block.kept, block.table), []).append(block)
    ordered = sorted(ways, key=lambda way: (TIERS.index(way[0]), way[1:]))
    rows = [_tier_row(plan, ways[way]) for way in ordered]
    headers = ["tier", "blocks", "weights", "VRAM", "host memory", "over the link, each pass", "which blocks"]
    used = dict.fromkeys(tier for tier, *_ in ordered)
    words = [f"{tier}: {TIER_FACTS[tier].description}" for tier in used]
    words += [TABLE_WORDS] if any(block.table for block in plan.blocks) else []
    return "\n".join([draw_grid(headers, rows), *words])


HIT_RATES: Final = (0.0, 0.5, 0.75, 0.9, 1.0)  # that a plan's time is shown for


def _experts(plan: Plan) -> Iterable[str]:
    """How many experts VRAM has room for, and what a pass takes by how many it finds there."""
    experts = plan.experts
    if experts is None:
        return
    times = ", ".join(f"{rate:.0%}: {duration(experts.seconds(rate))}" for rate in HIT_RATES)
    yield (
        f"experts: VRAM has room for {experts.cached:,} of {experts.count:,}; "
        f"a pass reads {experts.chosen:,.0f}.\n"
        f"predicted for a pass, by the share of those that it finds there: {times}.\n"
        f"{experts.assumed_hit_rate:.0%} are assumed, as if all were chosen alike; "
        "report() has the measured share"
    )


def _tier_row(plan: Plan, blocks: Sequence[BlockPlan]) -> list[str]:
    """The row of blocks that are kept in one way."""
    sums = (
        sum(b.weight_bytes for b in blocks),
        sum(b.vram_bytes for b in blocks),
        sum(b.host_bytes for b in blocks),
        sum(b.wire_bytes for b in blocks),
    )
    first = blocks[0]
    as_ = "a table" if first.table else "bfloat16" if first.kept else plan.bfloat16_becomes
    name = f"{first.tier}, as {as_}" if as_ else str(first.tier)
    return [name, str(len(blocks)), *map(binary_bytes, sums), _ranges(plan.blocks, blocks)]


def _ranges(blocks: Sequence[BlockPlan], members: Sequence[BlockPlan]) -> str:
    """The blocks of a row, runs of them as first..last."""
    names = {block.name for block in members}
    runs = []
    for is_mine, run in groupby(blocks, key=lambda block: block.name in names):
        if is_mine:
            run_names = [_short(block.name) for block in run]
            runs.append(run_names[0] if len(run_names) == 1 else f"{run_names[0]}..{run_names[-1]}")
    shown = ", ".join(runs[:MOST_RANGES])
    return shown if len(runs) <= MOST_RANGES else f"{shown} and {len(runs) - MOST_RANGES} more"


def _short(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 3]}..."


def _by_memory(plan: Plan) -> str:
    use, host, rings = plan.vram, plan.host, plan.rings
    moving = "blocks" if rings.pieces < 2 else "pieces of blocks"
    rows = [
        ["weights", binary_bytes(use.weights)],
        [f"{counted(rings.slots, 'buffer')} for {moving} on their way", binary_bytes(use.slots)],
        [f"{counted(rings.scratches, 'buffer')} for unpacked blocks", binary_bytes(use.scratch)],
        ["activations", binary_bytes(use.activations)],
        ["keys and values", binary_bytes(use.kv_cache)],
        ["workspace of libraries", binary_bytes(use.workspace)],
        ["rounding of torch's allocator", binary_bytes(use.rounding)],
        [
            "torch's allocator in all",
            f"{binary_bytes(use.total - use.context)} of {binary_bytes(plan.vram_budget)}",
        ],
        ["the driver's context", binary_bytes(use.context)],
        ["host memory, pinned", binary_bytes(host.pinned)],
        ["host memory, pageable", binary_bytes(host.pageable)],
        ["host memory, besides, while it is loaded", binary_bytes(host.loading)],
        ["read from disk in each pass", binary_bytes(host.disk)],
    ]
    shown = [row for row in rows if row[1] != "0 B"]
    return draw_grid(["memory", "predicted"], shown)


def _notes(plan: Plan) -> Iterable[str]:
    if plan.notes:
        yield "\n".join(f"note: {terminal(note)}" for note in plan.notes)
