"""Pictures as SVG without matplotlib: how a plan runs a pass, what takes the bytes of a `fit`. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    f"rect{{filter:brightness(1.6)}}rect.mark{{stroke:{DARK_PAPER}}}}}"
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


@dataclass(frozen=True)
class Frame:
    """Where the bars of a `fit` are drawn. `above`: names stand above their bars, not left of them."""

    sheet: str
    width: int
    left: int
    right: int  # margin, in which each bar's total stands
    row: int
    above: int = 0  # height of a name above its bar


FIT_DESK: Final = Frame("desk", WIDTH, left=210, right=130, row=30)
FIT_PHONE: Final = Frame("phone", 400, left=1, right=92, row=46, above=18)
MARGIN: Final = 16
BAR: Final = 22  # height
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
    return _fit_element(report, FIT_DESK, f"<style>{FIT_STYLE}</style>", title=True) + "\n"


def fit_plot(report: FitReport) -> Plot:
    """The picture for a page, for a desk and for a phone, in the page's own colours for light and dark."""
    drawn = []
    for frame in (FIT_DESK, FIT_PHONE):
        svg = _fit_element(report, frame, "", title=False)
        for name, (on_light, _) in PALETTE.items():
            svg = svg.replace(f'fill="{on_light}"', f'fill="var(--{name})"')
        drawn.append((frame.sheet, svg))
    caption = (
        "Predicted. First bar: what takes the bytes as asked; other bars: the total after one change. "
        "Dashed line: the budget and the driver's context."
    )
    return Plot("picture", "", caption, tuple(drawn))


def _fit_element(report: FitReport, frame: Frame, style: str, *, title: bool) -> str:
    """The SVG element. A page has a style and a title of its own."""
    named = f"{report.question.model}, {described(report)}: what takes the bytes, predicted"
    description = "; ".join(f"{name} {binary_bytes(n)}" for name, n in shares(report.predicted))
    first = 44 if title else 4
    keys, top = _fit_legend(report, frame, first)
    end = top + (len(report.knobs) + 1) * frame.row
    ids = f"fit-{frame.sheet}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {end + 24}" role="img" '
        f'aria-labelledby="{ids}-title {ids}-words" fill="currentColor" font-size="13">'
        f'<title id="{ids}-title">{html(named)}</title>',
        f'<desc id="{ids}-words">{html(description)}</desc>{style}',
        *([f'<text x="{MARGIN}" y="26" font-size="16">{html(named)}</text>'] if title else []),
        *keys,
        *_peak(report, frame, top),
        *_changes(report, frame, top),
        *_budget(report, frame, top, end),
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(report: FitReport, frame: Frame) -> float:
    """Pixels of a byte."""
    whole = report.budget_bytes + report.predicted.context
    most = max(whole, report.predicted.total, *(knob.total for knob in report.knobs), 1)
    return (frame.width - frame.left - frame.right) / most


def _fit_legend(report: FitReport, frame: Frame, top: int) -> tuple[list[str], int]:
    """The colours with their words, and where the bars begin below them."""
    begin = min(MARGIN, frame.left)
    x, y = begin, top
    keys: list[str] = []
    for name, n_bytes in shares(report.predicted):
        words = f"{name} {binary_bytes(n_bytes)}"
        if x > begin and x + 24 + 8 * len(words) > frame.width:
            x, y = begin, y + 20
        keys += _key(x, y, fill=PART_COLOURS[name], words=words)
        x += 36 + 8 * len(words)
    return keys, y + 36


def _row(frame: Frame, top: int, number: int, name: str) -> tuple[str, int]:
    """The name of a row, and where its bar begins."""
    y = top + number * frame.row
    x = min(MARGIN, frame.left)
    return f'<text x="{x}" y="{y + (13 if frame.above else 16)}">{html(name)}</text>', y + frame.above


def _peak(report: FitReport, frame: Frame, top: int) -> Iterator[str]:
    """The bar of what was asked, part by part."""
    x, scale = float(frame.left), _scale(report, frame)
    name, y = _row(frame, top, 0, "as asked")
    yield name
    for part, n_bytes in shares(report.predicted):
        words, width = f"{part}: {binary_bytes(n_bytes)}", n_bytes * scale
        yield _bar(x, y, width=width, height=BAR, fill=PART_COLOURS[part], words=words)
        x += width
    yield _total(report.predicted.total, frame, y)


def _changes(report: FitReport, frame: Frame, top: int) -> Iterator[str]:
    """A bar for the total after each change."""
    scale = _scale(report, frame)
    for number, knob in enumerate(report.knobs, start=1):
        name, y = _row(frame, top, number, knob.name)
        words = f"{knob.name}: {binary_bytes(knob.total)}; {knob.cost}"
        yield name
        yield _bar(frame.left, y, width=knob.total * scale, height=BAR, fill=GREY, words=words)
        yield _total(knob.total, frame, y)


def _total(n_bytes: int, frame: Frame, y: int) -> str:
    """In a column of its own, where the budget's line doesn't pass."""
    x = frame.width - min(MARGIN, frame.left)
    return f'<text x="{x}" y="{y + 16}" text-anchor="end">{binary_bytes(n_bytes)}</text>'


def _budget(report: FitReport, frame: Frame, top: int, end: int) -> Iterator[str]:
    """A line from the first bar to the last, but not through the names above bars; its words stand below."""
    whole = report.budget_bytes + report.predicted.context
    x = frame.left + whole * _scale(report, frame)
    words = f"budget and context {binary_bytes(whole)}"
    for number in range(len(report.knobs) + 1):
        y = top + number * frame.row + frame.above
        last = number == len(report.knobs)
        y2 = end + 4 if last and not frame.above else y + (BAR if frame.above else frame.row)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y2}"'
        yield f'<line stroke="currentColor" stroke-dasharray="4 3" {ends}/>'
    half = 4 * len(words)
    middle = min(max(x, half), frame.width - half)
    yield f'<text x="{middle:.1f}" y="{end + 17}" text-anchor="middle">{words}</text>'
