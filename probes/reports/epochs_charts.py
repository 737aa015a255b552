"""The plots of an epochs report: what epochs' time went into, losses, and what cards did meanwhile."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.core.quoting import terminal
from probes.core.unknown import Unknown
from probes.records.watch import GAUGES, Track
from probes.reports.canvas import PHONE, Sheet, legend_below, panels_of, plot_of, svg_of
from probes.reports.document import Plot
from probes.reports.epochs import named
from probes.reports.palette import light
from probes.reports.watch_charts import SCALES
from probes.training import figures
from probes.training.figures import Case
from probes.training.report import EpochsReport

MOST_CASES = 16  # that are drawn; the tables have all
MOST_LINES = 6
PARTS = (
    ("data", "amber"),
    ("compute", "blue"),
    ("exchange", "vermillion"),
    ("waiting", "purple"),
    ("checkpoint", "green"),
)
COLOURS = ("blue", "vermillion", "green", "purple", "amber", "ink")


def draw_epochs(report: EpochsReport) -> tuple[Plot, ...]:
    """A plot of each kind, for a desk and for a phone."""
    cases = figures.cases_of(report)[:MOST_CASES]
    divided = [case for case in cases if not isinstance(figures.parts(case), Unknown)]
    none = Unknown("no run has an epoch after its first")
    return (
        plot_of(
            ("parts", "What an epoch's time went into"),
            divided or none,
            paint=lambda cases, sheet: svg_of(
                lambda figure: _bars(figure, cases, sheet), sheet, 1.5 + 0.5 * len(cases)
            ),
            words=lambda cases: ("Means over ranks and repetitions.", ", ".join(map(named, cases))),
        ),
        plot_of(
            ("loss", "Loss"),
            [case for case in cases if case.rank.losses][:MOST_LINES] or Unknown("no run is done"),
            paint=lambda cases, sheet: svg_of(lambda figure: _losses(figure, cases), sheet, 3.6),
            words=lambda _: ("Of rank 0's batches, in the first run of each.", "loss over steps"),
        ),
        plot_of(
            ("cards", "The cards meanwhile"),
            _tracks(cases),
            paint=_gauges,
            words=lambda tracks: ("Of the last case's first run.", ", ".join(name for name, _, _ in tracks)),
        ),
    )


def _bars(figure: Figure, cases: Sequence[Case], sheet: Sheet) -> None:
    axes = figure.add_subplot()
    for at, case in enumerate(cases):
        parts, left = figures.parts(case), 0.0
        assert not isinstance(parts, Unknown), "chosen so"
        for name, colour in PARTS:
            value = getattr(parts, name)
            if not isinstance(value, Unknown):
                axes.barh(at, value, 0.4, left, color=light(colour), label=name if at == 0 else None)
                left += value
        axes.text(0, at - 0.25, terminal(named(case)), va="bottom")  # above: a phone has no room beside it
    axes.set_yticks([])
    axes.set_ylim(len(cases) - 0.6, -0.8)
    axes.set_xlabel("seconds per epoch")
    legend_below(axes, columns=3 if sheet is PHONE else len(PARTS), drop=0.9 / (1 + 0.5 * len(cases)))


def _losses(figure: Figure, cases: Sequence[Case]) -> None:
    axes = figure.add_subplot()
    for case, colour in zip(cases, COLOURS, strict=False):
        axes.plot(case.rank.losses, color=light(colour), label=terminal(named(case)))
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    legend_below(axes, columns=1)


def _tracks(cases: Sequence[Case]) -> list[tuple[str, Track, float]] | Unknown:
    watched = cases[-1].runs[0].watched if cases else Unknown("no run is done")
    if isinstance(watched, Unknown):
        return watched
    found = [
        (f"{card.host} {at}: {GAUGES[track.gauge].words}", track, card.step_s)
        for at, card in enumerate(watched)
        for track in card.tracks
        if not isinstance(track.most, Unknown)
    ]
    return found or Unknown("no gauge of a card was known")


def _gauges(tracks: list[tuple[str, Track, float]], sheet: Sheet) -> str:
    kinds = list(dict.fromkeys(track.gauge for _, track, _ in tracks))

    def paint(axes: Axes, gauge: str) -> None:
        unit, factor = SCALES.get(GAUGES[gauge].unit, (GAUGES[gauge].unit, 1.0))
        for (name, track, step_s), colour in zip(
            [entry for entry in tracks if entry[1].gauge == gauge], COLOURS, strict=False
        ):
            values = [float("nan") if value is None else value * factor for value in track.curve]
            times = [at * step_s for at in range(len(values))]
            axes.plot(times, values, color=light(colour), label=terminal(name))
        axes.set_title(GAUGES[gauge].words)
        axes.set_ylabel(unit)
        axes.set_xlabel("seconds since the watch began")
        axes.set_ylim(bottom=0)
        legend_below(axes, columns=1, drop=0.26)

    return panels_of(kinds, sheet, paint, 2.9)
