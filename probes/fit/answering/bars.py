"""What takes the bytes as a picture: one bar of parts against the budget, and one for each change. Pure."""

from collections.abc import Iterator
from typing import Final

from probes.fit.answering.saying import PARTS, described, shares
from probes.fit.question import FitReport
from probes.shared.quoting import html
from probes.shared.units import binary_bytes

WIDTH, LEFT, RIGHT = 1100, 210, 130  # of the drawing and its margins
ROW, TOP = 30, 120
# Hues after M. Okabe and K. Ito, "Color Universal Design" (2008), as the report page has; words say the same.
COLOURS: Final = dict(
    zip(
        PARTS.values(),
        ("#0069a8", "#007a58", "#8f6400", "#c14a00", "#a8487f", "#5a6675", "#8b97a5", "#1b2330"),
        strict=True,
    )
)
STYLE: Final = (
    "svg{background:#fefefe;color:#1b2330;font:13px system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{background:#12171f;color:#e6eaf0}rect{filter:brightness(1.6)}}"
)


def draw(report: FitReport) -> str:
    """The SVG document."""
    return drawn(report, f"<style>{STYLE}</style>") + "\n"


def drawn(report: FitReport, style: str) -> str:
    """The SVG element. A page has a style of its own."""
    height = TOP + (len(report.knobs) + 1) * ROW + 24
    title = f"{report.question.model}, {described(report)}: what takes the bytes, predicted"
    words = "; ".join(f"{name} {binary_bytes(n)}" for name, n in shares(report.predicted))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="fit-title fit-words" fill="currentColor" font-size="13">'
        f'<title id="fit-title">{html(title)}</title>',
        f'<desc id="fit-words">{html(words)}</desc>{style}',
        f'<text x="16" y="26" font-size="16">{html(title)}</text>',
        *_legend(report),
        *_peak(report),
        *_changes(report),
        *_budget(report, height),
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(report: FitReport) -> float:
    whole = report.budget_bytes + report.predicted.context
    most = max(whole, report.predicted.total, *(knob.total for knob in report.knobs), 1)
    return (WIDTH - LEFT - RIGHT) / most


def _legend(report: FitReport) -> Iterator[str]:
    x, y = 16, 44
    for name, n_bytes in shares(report.predicted):
        said = f"{name} {binary_bytes(n_bytes)}"
        if x + 40 + 7 * len(said) > WIDTH:
            x, y = 16, y + 20
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[name]}"/>'
        yield f'<text x="{x + 17}" y="{y + 11}">{html(said)}</text>'
        x += 36 + 7 * len(said)


def _peak(report: FitReport) -> Iterator[str]:
    at, scale = float(LEFT), _scale(report)
    yield f'<text x="16" y="{TOP + 17}">as asked</text>'
    for name, n_bytes in shares(report.predicted):
        said = f"{name}: {binary_bytes(n_bytes)}"
        yield _mark(at, TOP, n_bytes * scale, COLOURS[name], said)
        at += n_bytes * scale
    yield _total(report.predicted.total, scale, TOP)


def _changes(report: FitReport) -> Iterator[str]:
    scale = _scale(report)
    for row, knob in enumerate(report.knobs, start=1):
        y = TOP + row * ROW
        said = f"{knob.name}: {binary_bytes(knob.total)}; {knob.cost}"
        yield f'<text x="16" y="{y + 17}">{html(knob.name)}</text>'
        yield _mark(LEFT, y, knob.total * scale, "#8b97a5", said)
        yield _total(knob.total, scale, y)


def _total(n_bytes: int, scale: float, y: int) -> str:
    return f'<text x="{LEFT + n_bytes * scale + 6:.1f}" y="{y + 17}">{binary_bytes(n_bytes)}</text>'


def _budget(report: FitReport, height: int) -> Iterator[str]:
    whole = report.budget_bytes + report.predicted.context
    x = LEFT + whole * _scale(report)
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 18}"'
    yield f'<line stroke="currentColor" stroke-dasharray="4 3" {ends}/>'
    words = f"budget and context {binary_bytes(whole)}"
    yield f'<text x="{x:.1f}" y="{height - 5}" text-anchor="middle">{words}</text>'


def _mark(x: float, y: float, width: float, colour: str, said: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{ROW - 8}" fill="{colour}">'
        f"<title>{html(said)}</title></rect>"
    )
