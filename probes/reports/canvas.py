"""A figure in the page's style, and its SVG text.

This package alone knows matplotlib.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from probes.core.unknown import Unknown
from probes.reports.document import Plot
from probes.reports.figures import size
from probes.reports.palette import light
from probes.reports.svg import embed

C = TypeVar("C")
P = TypeVar("P")

DOTTED = (0, (1, 2))
DASHED = (0, (4, 3))


@dataclass(frozen=True)
class Sheet:
    """The device on which a plot is read.

    Inches are those of the drawing: the page scales it to its column.
    """

    name: str
    width_in: float
    panels: int  # side by side


DESK = Sheet("desk", 10.4, 2)
PHONE = Sheet("phone", 4.5, 1)

_SVG_DPI = 72  # an SVG's unit is the point
_GAP_IN = 0.13  # between a legend and the next panel's title

_STYLE = {
    "text.parse_math": False,  # a dollar sign in a name is one
    "svg.fonttype": "none",  # text stays text, so it can be searched, copied and read aloud
    "svg.hashsalt": "weir",  # the same report gives the same page
    "font.family": "DejaVu Sans",  # comes with matplotlib; the page sets narrower fonts into its places
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 10,
    "axes.labelcolor": light("ink"),
    "axes.titlecolor": light("ink"),
    "axes.edgecolor": light("muted"),
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": light("grid"),
    "grid.linewidth": 0.8,
    "xtick.color": light("muted"),
    "ytick.color": light("muted"),
    "xtick.labelcolor": light("ink"),
    "ytick.labelcolor": light("ink"),
    "text.color": light("ink"),
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 1.6,
    "legend.borderaxespad": 0.0,
    "figure.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "errorbar.capsize": 2.5,
}


def svg_of(paint: Callable[[Figure], None], sheet: Sheet, height_in: float) -> str:
    """The SVG text of what `paint` puts on an empty figure."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(sheet.width_in, height_in), dpi=_SVG_DPI)
        canvas = FigureCanvasSVG(figure)
        paint(figure)
        ConstrainedLayoutEngine(h_pad=_GAP_IN).execute(figure)  # `savefig` would draw everything twice for it
        text = io.StringIO()
        canvas.print_svg(text, metadata={"Date": None})
        return text.getvalue()


def panels_of(panels: Sequence[P], sheet: Sheet, paint: Callable[[Axes, P], None], each_in: float) -> str:
    """The SVG text of panels, side by side where the sheet has room; each is so many inches high."""
    columns = min(len(panels), sheet.panels)
    rows = math.ceil(len(panels) / columns)

    def paint_all(figure: Figure) -> None:
        for at, panel in enumerate(panels, 1):
            paint(figure.add_subplot(rows, columns, at), panel)

    return svg_of(paint_all, sheet, rows * each_in)


def plot_of(
    head: tuple[str, str],
    chart: C | Unknown,
    *,
    paint: Callable[[C, Sheet], str],
    words: Callable[[C], tuple[str, str]],
) -> Plot:
    """A chart drawn for a desk and for a phone, ready for the page; or the reason why it is missing.

    `head` is its name and its title; `words` are its caption and what it shows, for those who can't see it.
    """
    name, title = head
    if isinstance(chart, Unknown):
        return Plot(name, title, missing=chart.reason)
    caption, description = words(chart)
    drawn = tuple(
        (
            sheet.name,
            embed(paint(chart, sheet), name=f"{name}-{sheet.name}", title=title, description=description),
        )
        for sheet in (DESK, PHONE)
    )
    return Plot(name, title, caption, drawn)


def bytes_axis(axes: Axes, label: str) -> None:
    """A logarithmic axis of sizes with ticks at powers of sixteen: 4 KiB, 64 KiB, 1 MiB, ..."""
    _binary_axis(axes, label, LogLocator(base=16, numticks=12), lambda n_bytes: size(round(n_bytes)))


def counts_axis(axes: Axes, label: str) -> None:
    """A logarithmic axis of counts with ticks at powers of two."""
    _binary_axis(axes, label, LogLocator(base=2, numticks=14), lambda n: f"{n:g}" if n >= 1 else "")


def _binary_axis(axes: Axes, label: str, ticks: LogLocator, tick: Callable[[float], str]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _at: tick(value)))
    axes.set_xlabel(label)


def plain_log_y(axes: Axes, label: str) -> None:
    """A logarithmic axis that says 0.1, 1, 10, 100 instead of powers; its limits are set before."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    within = (1, 1.5, 2, 3, 4, 6, 8) if high < 10 * low else (1, 2, 5)  # a decade: an axis needs ticks
    axes.yaxis.set_major_locator(LogLocator(subs=within if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(label)


def legend_below(axes: Axes, *, columns: int, drop: float = 0.2) -> None:
    """The legend under the axis' label, from the left."""
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -drop), ncols=columns, columnspacing=1.4)
