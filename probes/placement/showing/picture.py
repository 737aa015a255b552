"""A plan as a picture: blocks coloured by tier, and one pass on its lanes. One SVG, loads nothing. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from probes.placement.planner.searching.timeline import Lane, Span, Timeline
from probes.placement.values import TIERS, Plan, Tier
from probes.shared.quoting import html
from probes.shared.units import binary_bytes, duration

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
