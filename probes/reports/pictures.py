"""Pictures as SVG without matplotlib: how a plan runs a pass, what takes the bytes of a `fit`. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from probes.core.quoting import html
from probes.core.units import binary_bytes, duration
from probes.fit.report import FitReport
from probes.placement.planner.simulation import Lane, Span, Timeline
from probes.placement.types import TIER_FACTS, TIERS, Plan, Tier
from probes.reports.document import Plot
from probes.reports.fit import PARTS, described, shares
from probes.reports.palette import GREY, PALETTE, light

WIDTH: Final = 1100


def _bar(x: float, y: float, *, width: float, height: int, fill: str, words: str, css_class: str = "") -> str:
    """A bar that shows its words where a pointer rests on it."""
    named = f'class="{css_class}" ' if css_class else ""
    return (
        f'<rect {named}x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{height}" '
        f'fill="{fill}"><title>{html(words)}</title></rect>'
    )


def _key(x: int, y: int, *, fill: str, words: str) -> Iterator[str]:
    """A colour of the legend and what it stands for."""
    yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{fill}"/>'
    yield f'<text x="{x + 17}" y="{y + 11}">{html(words)}</text>'


PLAN_LEFT, PLAN_RIGHT = 96, 16  # margins
LANE, GAP, PLAN_TOP = 26, 8, 84
LANE_WORDS: Final[dict[Lane, str]] = {  # from above
    "disk": "disk",
    "copy": "link",
    "unpack": "unpack",
    "compute": "GPU",
    "cpu": "CPU",
}
(INK, DARK_INK), (PAPER, DARK_PAPER) = PALETTE["ink"], PALETTE["paper"]
PLAN_STYLE: Final = (
    f"svg{{background:{PAPER};color:{INK};font:13px system-ui,sans-serif}}text{{fill:currentColor}}"
    f".rule{{stroke:currentColor;stroke-opacity:.25}}rect.mark{{stroke:{PAPER};stroke-width:.4}}"
    f"@media(prefers-color-scheme:dark){{svg{{background:{DARK_PAPER};color:{DARK_INK}}}"
    f"rect.mark{{stroke:{DARK_PAPER};filter:brightness(1.6)}}}}"
)


def draw_plan(plan: Plan, timeline: Timeline) -> str:
    """The SVG document: the blocks by bytes, then what each resource does over the time of one pass."""
    lanes = [lane for lane in LANE_WORDS if any(span.lane == lane for span in timeline.spans)]
    height = PLAN_TOP + (len(lanes) + 1) * (LANE + GAP) + 64
    title = f"{plan.model} on {plan.machine}: {duration(timeline.seconds)} a pass, predicted"
    counts = [f"{sum(b.tier == tier for b in plan.blocks)} {tier}" for tier in _tiers(plan)]
    description = f"blocks: {', '.join(counts)}; from {plan.constants}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="title what"><title id="title">{html(title)}</title>',
        f'<desc id="what">{html(description)}</desc><style>{PLAN_STYLE}</style>',
        f'<text x="{PLAN_LEFT}" y="24" font-size="16">{html(title)}</text>',
        *_plan_legend(plan),
        *_blocks(plan),
        *_lanes(plan, timeline, lanes),
        *_time_axis(timeline, height),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _tiers(plan: Plan) -> list[Tier]:
    return [tier for tier in TIERS if any(block.tier == tier for block in plan.blocks)]


def _plan_legend(plan: Plan) -> Iterator[str]:
    x = PLAN_LEFT
    for tier in _tiers(plan):
        n_bytes = sum(block.weight_bytes for block in plan.blocks if block.tier == tier)
        words = f"{tier} {binary_bytes(n_bytes)}"
        yield from _key(x, 40, fill=light(TIER_FACTS[tier].colour), words=words)
        x += 34 + 8 * len(words)


def _blocks(plan: Plan) -> Iterator[str]:
    """All blocks in call order, as wide as their share of the weights."""
    yield f'<text x="8" y="{PLAN_TOP + 17}">blocks</text>'
    total = sum(block.weight_bytes for block in plan.blocks) or 1
    x = float(PLAN_LEFT)
    for block in plan.blocks:
        width = (WIDTH - PLAN_LEFT - PLAN_RIGHT) * block.weight_bytes / total
        words = f"{block.name}: {block.tier}, {binary_bytes(block.weight_bytes)}"
        yield _mark(x, PLAN_TOP, width=width, tier=block.tier, words=words)
        x += width


def _lanes(plan: Plan, timeline: Timeline, lanes: Sequence[Lane]) -> Iterator[str]:
    for row, lane in enumerate(lanes, start=1):
        top = PLAN_TOP + row * (LANE + GAP)
        yield f'<text x="8" y="{top + 17}">{LANE_WORDS[lane]}</text>'
        for span in timeline.spans:
            if span.lane == lane:
                yield from _span(plan, span, timeline.seconds, top)


def _span(plan: Plan, span: Span, seconds: float, top: float) -> Iterator[str]:
    """A mark; what began during the pass before is drawn at its end, where it is in every pass."""
    block = plan.blocks[span.block]
    words = f"{block.name}: {LANE_WORDS[span.lane]} {duration(span.end_s - span.begin_s)} ({block.tier})"
    pieces = [(max(span.begin_s, 0.0), span.end_s)] if span.end_s > 0 else []
    if span.begin_s < 0:
        pieces.append((max(seconds + span.begin_s, 0.0), seconds + min(span.end_s, 0.0)))
    scale = (WIDTH - PLAN_LEFT - PLAN_RIGHT) / (seconds or 1.0)
    for begin, end in pieces:
        width = (min(end, seconds) - begin) * scale
        yield _mark(PLAN_LEFT + begin * scale, top, width=width, tier=block.tier, words=words)


def _mark(x: float, y: float, *, width: float, tier: Tier, words: str) -> str:
    fill = light(TIER_FACTS[tier].colour)
    return _bar(x, float(y), width=width, height=LANE, fill=fill, words=words, css_class="mark")


def _time_axis(timeline: Timeline, height: int) -> Iterator[str]:
    y = height - 44
    yield f'<line class="rule" x1="{PLAN_LEFT}" x2="{WIDTH - PLAN_RIGHT}" y1="{y}" y2="{y}"/>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = PLAN_LEFT + share * (WIDTH - PLAN_LEFT - PLAN_RIGHT)
        anchor = "start" if not share else "end" if share == 1 else "middle"
        words = duration(share * timeline.seconds) if share else "0"
        yield f'<text x="{x:.0f}" y="{y + 18}" text-anchor="{anchor}">{words}</text>'


FIT_LEFT, FIT_RIGHT = 210, 130  # margins
ROW, FIT_TOP = 30, 120
PART_COLOURS: Final = dict(
    zip(
        PARTS.values(),
        (*map(light, ("blue", "green", "amber", "vermillion", "purple", "muted")), GREY, light("ink")),
        strict=True,
    )
)
FIT_STYLE: Final = (
    f"svg{{background:{PAPER};color:{INK};font:13px system-ui,sans-serif}}"
    f"@media(prefers-color-scheme:dark){{svg{{background:{DARK_PAPER};color:{DARK_INK}}}"
    "rect{filter:brightness(1.6)}}"
)


def draw_fit(report: FitReport) -> str:
    """The SVG document."""
    return _fit_element(report, f"<style>{FIT_STYLE}</style>") + "\n"


def fit_plot(report: FitReport) -> Plot:
    """The picture for a page, in the page's own colours for light and dark."""
    svg = _fit_element(report, "")
    for name, (on_light, _) in PALETTE.items():
        svg = svg.replace(f'fill="{on_light}"', f'fill="var(--{name})"')
    caption = "Predicted. First bar: what takes the bytes as asked; other bars: the total after one change."
    return Plot("picture", "", caption, (("scroll", svg),))


def _fit_element(report: FitReport, style: str) -> str:
    """The SVG element. A page has a style of its own."""
    height = FIT_TOP + (len(report.knobs) + 1) * ROW + 24
    title = f"{report.question.model}, {described(report)}: what takes the bytes, predicted"
    description = "; ".join(f"{name} {binary_bytes(n)}" for name, n in shares(report.predicted))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="fit-title fit-words" fill="currentColor" font-size="13">'
        f'<title id="fit-title">{html(title)}</title>',
        f'<desc id="fit-words">{html(description)}</desc>{style}',
        f'<text x="16" y="26" font-size="16">{html(title)}</text>',
        *_fit_legend(report),
        *_peak(report),
        *_changes(report),
        *_budget(report, height),
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(report: FitReport) -> float:
    """Pixels of a byte."""
    whole = report.budget_bytes + report.predicted.context
    most = max(whole, report.predicted.total, *(knob.total for knob in report.knobs), 1)
    return (WIDTH - FIT_LEFT - FIT_RIGHT) / most


def _fit_legend(report: FitReport) -> Iterator[str]:
    x, y = 16, 44
    for name, n_bytes in shares(report.predicted):
        words = f"{name} {binary_bytes(n_bytes)}"
        if x + 40 + 7 * len(words) > WIDTH:
            x, y = 16, y + 20
        yield from _key(x, y, fill=PART_COLOURS[name], words=words)
        x += 36 + 7 * len(words)


def _peak(report: FitReport) -> Iterator[str]:
    """The bar of what was asked, part by part."""
    x, scale = float(FIT_LEFT), _scale(report)
    yield f'<text x="16" y="{FIT_TOP + 17}">as asked</text>'
    for name, n_bytes in shares(report.predicted):
        words, width = f"{name}: {binary_bytes(n_bytes)}", n_bytes * scale
        yield _bar(x, FIT_TOP, width=width, height=ROW - 8, fill=PART_COLOURS[name], words=words)
        x += width
    yield _total(report.predicted.total, scale, FIT_TOP)


def _changes(report: FitReport) -> Iterator[str]:
    """A bar for the total after each change."""
    scale = _scale(report)
    for row, knob in enumerate(report.knobs, start=1):
        y = FIT_TOP + row * ROW
        words = f"{knob.name}: {binary_bytes(knob.total)}; {knob.cost}"
        yield f'<text x="16" y="{y + 17}">{html(knob.name)}</text>'
        yield _bar(FIT_LEFT, y, width=knob.total * scale, height=ROW - 8, fill=GREY, words=words)
        yield _total(knob.total, scale, y)


def _total(n_bytes: int, scale: float, y: int) -> str:
    return f'<text x="{FIT_LEFT + n_bytes * scale + 6:.1f}" y="{y + 17}">{binary_bytes(n_bytes)}</text>'


def _budget(report: FitReport, height: int) -> Iterator[str]:
    whole = report.budget_bytes + report.predicted.context
    x = FIT_LEFT + whole * _scale(report)
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{FIT_TOP - 8}" y2="{height - 18}"'
    yield f'<line stroke="currentColor" stroke-dasharray="4 3" {ends}/>'
    words = f"budget and context {binary_bytes(whole)}"
    yield f'<text x="{x:.1f}" y="{height - 5}" text-anchor="middle">{words}</text>'
