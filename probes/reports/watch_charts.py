"""The plots of a watch: the gauges of the machine and of each card over time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from probes.core.quoting import terminal
from probes.core.unknown import Unknown
from probes.records.watch import GAUGES, Track, WatchReport
from probes.reports.canvas import legend_below, panels_of, plot_of
from probes.reports.document import Plot
from probes.reports.palette import light

PANEL_IN = 2.9  # height
NAN = float("nan")
_COLOURS = ("blue", "vermillion", "green", "purple", "amber", "ink")
_DASHES: tuple[object, ...] = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 2, 2)), (0, (1, 1)))
SCALES = {"bytes": ("GiB", 2**-30), "bytes/s": ("GB/s", 1e-9), "C": ("°C", 1.0)}
_PANELS = {
    "%": "share, %",
    "bytes": "memory, GiB",
    "W": "power, W",
    "C": "temperature, °C",
    "MHz": "clock, MHz",
    "bytes/s": "traffic, GB/s",
}


@dataclass(frozen=True)
class _Panel:
    title: str
    label: str
    unit: str
    tracks: tuple[Track, ...]


def draw_watch(report: WatchReport) -> tuple[Plot, ...]:
    """A plot for the machine and one for each card, for a desk and for a phone."""
    places = [("machine", "The machine", report.machine)]
    for at, card in enumerate(report.cards):
        places.append((f"card-{at}", f"Card {at}: {report.subject.cards[at].name}", card.tracks))
    return tuple(_plot(name, title, tracks, report.step_s) for name, title, tracks in places)


def _plot(name: str, title: str, tracks: Sequence[Track], step_s: float) -> Plot:
    panels = [panel for panel in _panels(tracks) if panel.tracks]
    over_time = any(len(known_steps(track)) > 1 for panel in panels for track in panel.tracks)
    missing = (
        "only one step was measured: the figures below are all of it"
        if panels
        else "no gauge of it was ever known"
    )
    shown = ", ".join(GAUGES[track.gauge].words for panel in panels for track in panel.tracks)
    caption = (
        f"Means over steps of {step_s:g} s. A gap is time in which a gauge wasn't known; a dot is one step."
    )
    return plot_of(
        (name, title),
        panels if over_time else Unknown(missing),
        paint=lambda panels, sheet: panels_of(panels, sheet, partial(_curves, step_s=step_s), PANEL_IN),
        words=lambda _panels: (caption, shown),
    )


def _panels(tracks: Sequence[Track]) -> list[_Panel]:
    return [
        _Panel(
            label.split(",")[0].capitalize(),
            label,
            unit,
            tuple(one for one in tracks if GAUGES[one.gauge].unit == unit and known_steps(one)),
        )
        for unit, label in _PANELS.items()
    ]


def known_steps(track: Track) -> list[int]:
    """The steps of its curve in which it was known."""
    return [step for step, value in enumerate(track.curve) if value is not None]


def alone(values: Sequence[float]) -> list[bool]:
    """Which values have no known one before or after them: no line shows those."""
    known = [False, *(not math.isnan(value) for value in values), False]
    return [known[at] and not (known[at - 1] or known[at + 1]) for at in range(1, len(known) - 1)]


def _curves(axes: Axes, panel: _Panel, step_s: float) -> None:
    _, factor = SCALES.get(panel.unit, (panel.unit, 1.0))
    for at, track in enumerate(panel.tracks):
        times = [(step + 0.5) * step_s for step in range(len(track.curve))]
        values = [NAN if value is None else value * factor for value in track.curve]
        axes.plot(
            times,
            values,
            color=light(_COLOURS[at % len(_COLOURS)]),
            linestyle=_DASHES[at % len(_DASHES)],
            marker="o" if any(alone(values)) else None,
            markevery=alone(values),
            label=terminal(GAUGES[track.gauge].words),
        )
    axes.set_xlim(0, step_s * max(len(track.curve) for track in panel.tracks))
    axes.set_title(panel.title)
    axes.set_xlabel("seconds since the watch began")
    axes.set_ylabel(panel.label)
    axes.set_ylim(bottom=0)
    legend_below(axes, columns=2, drop=0.26)
