"""A plan as text: the answer in a few sentences, then tables by tier and by memory. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from probes.core.quoting import html, terminal
from probes.core.units import binary_bytes, counted, duration
from probes.placement.planner.multi_gpu import STAGE_MARK
from probes.placement.planner.simulation import Lane, Span, Timeline
from probes.placement.types import TIERS, BlockPlan, CardsPlan, Plan, Tier
from probes.reports.text import table

BOUND_WORDS: Final = {
    "vram": "reading weights in VRAM",
    "link": "the link between host and GPU",
    "compute": "arithmetic on the GPU",
    "launch": "Python, which launches the kernels",
    "host": "the CPU or the disk",
}
TIER_WORDS: Final[dict[Tier, str]] = {
    "resident": "in VRAM as they are",
    "packed": "in VRAM, packed without loss",
    "streamed_packed": "in host memory, packed; copied and unpacked in each pass",
    "streamed": "in host memory; copied in each pass",
    "in_place": "in host memory; the GPU reads them there",
    "cpu": "in host memory; the CPU computes with them",
    "disk": "on disk; read and copied in each pass",
}
TABLE_WORDS: Final = "as a table: packed; lookups and products unpack only what they need"
OBJECTIVE_WORDS: Final = {
    "exact": "outputs have the same bits as those of a model that fits; --objective fast may be quicker",
    "fast": "sums may be rounded in another order than in a model that fits; --objective exact keeps them",
}
MOST_RANGES: Final = 3  # of blocks that a row names
MOST_NAME: Final = 80  # characters of each


def lines(plan: Plan) -> str:
    """The whole plan as text."""
    return "\n\n".join([*_answer(plan), _by_tier(plan), _by_memory(plan), *_notes(plan)])


def cards_lines(plan: CardsPlan) -> str:
    """A plan over several cards as text: the answer, then each card's tables."""
    first, time = plan.cards[0], plan.time
    name = terminal(first.model.partition(STAGE_MARK)[0])
    said = (
        f"{name} on {len(plan.cards)} x {terminal(first.machine)}: runs, and takes "
        f"{duration(time.middle_s)} a pass "
        f"({duration(time.low_s)} to {duration(time.high_s)} in 9 of 10 cases, predicted).\n"
        f"With {len(plan.cards)} passes under way, one ends every {duration(plan.interval_s)}.\n"
        f"Each card hands {binary_bytes(plan.hand_over_bytes)} of activations to the next in a pass.\n"
        f"{_how(first)}"
    )
    parts = [said]
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
        f"{terminal(plan.model)} ({binary_bytes(weights)} of weights) on {terminal(plan.machine)}: runs, "
        f"and {what}.\n"
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
    words = [f"{tier}: {TIER_WORDS[tier]}" for tier in used]
    words += [TABLE_WORDS] if any(block.table for block in plan.blocks) else []
    return "\n".join([table(headers, rows, markdown=False), *words])


def _tier_row(plan: Plan, mine: Sequence[BlockPlan]) -> list[str]:
    """The row of blocks that are kept in one way."""
    sums = (
        sum(b.weight_bytes for b in mine),
        sum(b.vram_bytes for b in mine),
        sum(b.host_bytes for b in mine),
        sum(b.wire_bytes for b in mine),
    )
    one = mine[0]
    as_ = "a table" if one.table else "bfloat16" if one.kept else plan.bfloat16_becomes
    name = f"{one.tier}, as {as_}" if as_ else str(one.tier)
    return [name, str(len(mine)), *map(binary_bytes, sums), _ranges(plan.blocks, mine)]


def _ranges(blocks: Sequence[BlockPlan], mine: Sequence[BlockPlan]) -> str:
    """The blocks of a row, runs of them as first..last."""
    names = {block.name for block in mine}
    runs = []
    for is_mine, run in groupby(blocks, key=lambda block: block.name in names):
        if is_mine:
            found = [_short(block.name) for block in run]
            runs.append(found[0] if len(found) == 1 else f"{found[0]}..{found[-1]}")
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
    return table(["memory", "predicted"], shown, markdown=False)


def _notes(plan: Plan) -> Iterable[str]:
    if plan.notes:
        yield "\n".join(f"note: {terminal(note)}" for note in plan.notes)


WIDTH, LEFT, RIGHT = 1100, 96, 16  # of the drawing and its margins
LANE, GAP, TOP = 26, 8, 84
LANES: Final[tuple[Lane, ...]] = ("disk", "copy", "unpack", "compute", "cpu")
LANE_WORDS: Final[dict[Lane, str]] = {
    "disk": "disk",
    "copy": "link",
    "unpack": "unpack",
    "compute": "GPU",
    "cpu": "CPU",
}
# Hues after M. Okabe and K. Ito, "Color Universal Design" (2008), as the report page has; words say the same.
COLOURS: Final[dict[Tier, str]] = {
    "resident": "#0069a8",
    "packed": "#007a58",
    "streamed_packed": "#8f6400",
    "streamed": "#c14a00",
    "in_place": "#a8487f",
    "cpu": "#5a6675",
    "disk": "#1b2330",
}
STYLE: Final = (
    "svg{background:#fefefe;color:#1b2330;font:13px system-ui,sans-serif}text{fill:currentColor}"
    ".rule{stroke:currentColor;stroke-opacity:.25}rect.mark{stroke:#fefefe;stroke-width:.4}"
    "@media(prefers-color-scheme:dark){svg{background:#12171f;color:#e6eaf0}"
    "rect.mark{stroke:#12171f;filter:brightness(1.6)}}"
)


def draw(plan: Plan, timeline: Timeline) -> str:
    """The SVG document: the blocks by bytes, then the lanes over the time of one pass."""
    lanes = [lane for lane in LANES if any(span.lane == lane for span in timeline.spans)]
    height = TOP + (len(lanes) + 1) * (LANE + GAP) + 64
    title = f"{plan.model} on {plan.machine}: {duration(timeline.seconds)} a pass, predicted"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="title what"><title id="title">{html(title)}</title>',
        f'<desc id="what">{html(_in_words(plan))}</desc><style>{STYLE}</style>',
        f'<text x="{LEFT}" y="24" font-size="16">{html(title)}</text>',
        *_legend(plan),
        *_blocks(plan),
        *_lanes(plan, timeline, lanes),
        *_axis(timeline, height),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _in_words(plan: Plan) -> str:
    counts = [f"{sum(b.tier == tier for b in plan.blocks)} {tier}" for tier in _tiers(plan)]
    return f"blocks: {', '.join(counts)}; from {plan.constants}"


def _tiers(plan: Plan) -> list[Tier]:
    return [tier for tier in TIERS if any(block.tier == tier for block in plan.blocks)]


def _legend(plan: Plan) -> Iterator[str]:
    at = LEFT
    for tier in _tiers(plan):
        n_bytes = sum(block.weight_bytes for block in plan.blocks if block.tier == tier)
        words = f"{tier} {binary_bytes(n_bytes)}"
        yield f'<rect x="{at}" y="40" width="12" height="12" fill="{COLOURS[tier]}"/>'
        yield f'<text x="{at + 17}" y="51">{html(words)}</text>'
        at += 34 + 8 * len(words)


def _blocks(plan: Plan) -> Iterator[str]:
    """All blocks in call order, as wide as their share of the weights."""
    yield f'<text x="8" y="{TOP + 17}">blocks</text>'
    total = sum(block.weight_bytes for block in plan.blocks) or 1
    at = float(LEFT)
    for block in plan.blocks:
        width = (WIDTH - LEFT - RIGHT) * block.weight_bytes / total
        said = f"{block.name}: {block.tier}, {binary_bytes(block.weight_bytes)}"
        yield _mark(at, TOP, width, block.tier, said)
        at += width


def _lanes(plan: Plan, timeline: Timeline, lanes: Sequence[Lane]) -> Iterator[str]:
    for row, lane in enumerate(lanes, start=1):
        top = TOP + row * (LANE + GAP)
        yield f'<text x="8" y="{top + 17}">{LANE_WORDS[lane]}</text>'
        for span in timeline.spans:
            if span.lane == lane:
                yield from _span(plan, span, timeline.seconds, top)


def _span(plan: Plan, span: Span, seconds: float, top: float) -> Iterator[str]:
    """One mark; what began during the pass before is drawn at its end, where it is in every pass."""
    block = plan.blocks[span.block]
    said = f"{block.name}: {LANE_WORDS[span.lane]} {duration(span.end_s - span.begin_s)} ({block.tier})"
    pieces = [(max(span.begin_s, 0.0), span.end_s)] if span.end_s > 0 else []
    if span.begin_s < 0:
        pieces.append((max(seconds + span.begin_s, 0.0), seconds + min(span.end_s, 0.0)))
    scale = (WIDTH - LEFT - RIGHT) / (seconds or 1.0)
    for begin, end in pieces:
        yield _mark(LEFT + begin * scale, top, (min(end, seconds) - begin) * scale, block.tier, said)


def _mark(x: float, y: float, width: float, tier: Tier, said: str) -> str:
    return (
        f'<rect class="mark" x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.5):.2f}" height="{LANE}" '
        f'fill="{COLOURS[tier]}"><title>{html(said)}</title></rect>'
    )


def _axis(timeline: Timeline, height: int) -> Iterator[str]:
    y = height - 44
    yield f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        anchor = "start" if not share else "end" if share == 1 else "middle"
        words = duration(share * timeline.seconds) if share else "0"
        yield f'<text x="{x:.0f}" y="{y + 18}" text-anchor="{anchor}">{words}</text>'
