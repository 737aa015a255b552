"""An epochs report as a document: time per epoch, scaling, what the time went into, what bounds it. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from probes.core.units import counted
from probes.core.unknown import Unknown
from probes.records.watch import GAUGES
from probes.reports.document import Document, Section, Table
from probes.reports.figures import size, span, with_error
from probes.training import figures
from probes.training.figures import Case, Cost, Mean
from probes.training.report import EpochsReport

# The user's own table of an MI50 cluster, in seconds; its model, data and batch aren't said there.
DOCUMENT: Final = (
    ("1", "1 NVIDIA L40 (48G)", 333.0, "-"),
    ("1", "1 MI50 (32G)", 1037.0, "-"),
    ("2", "1 MI50 (32G) each", 515.0, f"{1037 / (2 * 515):.2f}"),
    ("3", "1 MI50 (32G) each", 323.0, f"{1037 / (3 * 323):.2f}"),
)
REMEDIES: Final = {
    "data": "give the loader processes: --workers",
    "exchange": "fewer exchanges help: a larger --batch, or --accumulate",
    "uneven": "batches of equal lengths help",
    "checkpoint": "write them less often",
}


def minutes(seconds: float) -> str:
    """A time per epoch as people write it from a minute on: 5 min 33 s."""
    return span(seconds, bare=True) if seconds < 60 else f"{int(seconds) // 60} min {seconds % 60:.0f} s"


def mean(value: Mean | Unknown, *, is_time: bool = False) -> str:
    """A mean with its standard error, or why there is none."""
    if isinstance(value, Unknown):
        return "-"
    if is_time:
        return minutes(value.value) if value.error is None else span(value.value, value.error)
    return f"{value.value:.4g}" if value.error is None else with_error(value.value, value.error)


def named(case: Case) -> str:
    """A case in a few words."""
    settings = case.settings
    processes = f"{case.world} process{'es' if case.world > 1 else ''}"
    words = [processes, f"batch {settings.batch}", settings.precision]
    if case.nodes > 1:
        words.insert(0, f"{case.nodes} nodes")
    if settings.accumulate > 1:
        words.append(f"{settings.accumulate} accumulated")
    if case.world > 1:
        words += [settings.strategy, settings.scaling]
    return ", ".join(words)


def cost_text(cost: Cost) -> str:
    """What costs time, in a few words."""
    if cost.cause == "straggler":
        what = "loads its data" if cost.of == "data" else "computes"
        return f"rank {cost.rank}, which {what} longer than the others"
    return {
        "compute": "compute",
        "data": "data loading",
        "exchange": "the exchange of gradients",
        "checkpoint": "writing checkpoints",
        "uneven": "ranks that wait for each other in turns",
    }[cost.cause]


def epochs_document(report: EpochsReport) -> Document:
    """Everything that the runs came to."""
    cases = figures.cases_of(report)
    first = report.runs[0].ranks[0]
    title = f"{first.settings.model}: time per epoch"
    return Document(
        kicker="Training",
        title=title,
        subject=title,
        details=(f"torch {first.torch}", first.device_name, f"Weir {report.tool_version}"),
        headline=tuple(_headline(report, cases)),
        sections=tuple(_sections(report, cases)),
    )


def _headline(report: EpochsReport, cases: Sequence[Case]) -> Iterator[str]:
    best = max(cases, key=lambda case: _value(figures.rate(case)), default=None)
    if best is not None and not isinstance(figures.epoch_s(best), Unknown):
        time, rate = mean(figures.epoch_s(best), is_time=True), mean(figures.rate(best))
        yield f"Quickest: {named(best)}: {time} an epoch, {rate} samples/s."
        bound = figures.bound_of(best)
        if isinstance(bound, Cost):
            remedy = REMEDIES.get(bound.cause, "")
            also = [
                f"{cost_text(cost)} {cost.share:.0%}"
                for cost in figures.costs(best)[1:]
                if cost.share >= figures.SMALL
            ]
            yield (
                f"It is bound by {cost_text(bound)}: {bound.share:.0%} of an epoch"
                f"{'; also ' + ', '.join(also) if also else ''}."
                f"{f' To change that, {remedy}.' if remedy else ''}"
            )
    scaled = [(case, figures.efficiency(case, cases)) for case in cases if case.world > 1]
    for case, efficiency in scaled[-2:]:
        if not isinstance(efficiency, Unknown):
            yield f"Scaling efficiency of {named(case)}: {mean(efficiency)}."
    failed = [run for run in report.runs if run.state != "done"]
    if failed:
        yield f"{len(failed)} of {len(report.runs)} runs are not done: {figures.cause_of(failed[0])}."


def _value(figure: Mean | Unknown) -> float:
    return 0.0 if isinstance(figure, Unknown) else figure.value


def _sections(report: EpochsReport, cases: Sequence[Case]) -> Iterator[Section]:
    if cases:
        yield Section("Time per epoch", tables=(_times(cases),), notes=tuple(_unknowns(cases)))
        yield Section("What an epoch's time went into", tables=(_parts(cases),))
        yield Section("Memory and cards", tables=(_cards(cases),), notes=tuple(_not_watched(cases)))
        yield Section("From the document", tables=(_document(),))
    failed = [run for run in report.runs if run.state != "done"]
    rows = tuple((run.name, figures.cause_of(run)) for run in failed)
    if rows:
        table = Table("", (), ("run", "why it isn't done"), rows, frozenset({"run", "why it isn't done"}))
        yield Section("Runs that are not done", tables=(table,))


def _times(cases: Sequence[Case]) -> Table:
    headers = ("nodes", "processes", "what", "time per epoch", "first epoch", "samples/s", "efficiency", "n")
    rows = tuple(
        (
            str(case.nodes),
            str(case.world),
            named(case),
            mean(figures.epoch_s(case), is_time=True),
            mean(figures.first_s(case), is_time=True),
            mean(figures.rate(case)),
            mean(figures.efficiency(case, cases)),
            str(len(case.runs)),
        )
        for case in cases
    )
    notes = (
        "mean ± SEM over n repetitions, measured here; epochs after the first, and the first apart",
        "efficiency: T1 / (N x TN), times for equally many samples; strong: all ranks share an epoch's "
        "samples; weak: each rank has as many",
    )
    return Table("", notes, headers, rows, frozenset({"what"}))


def _unknowns(cases: Sequence[Case]) -> Iterator[str]:
    for case in cases:
        efficiency = figures.efficiency(case, cases)
        if case.world > 1 and isinstance(efficiency, Unknown):
            yield f"efficiency of {named(case)}: {efficiency}"
    if (fewest := min(len(case.runs) for case in cases)) < figures.REPETITIONS:
        yield f"{counted(fewest, 'repetition')}: an error takes {figures.REPETITIONS} to mean much"


def _parts(cases: Sequence[Case]) -> Table:
    headers = ("what", "data", "compute", "exchange", "waiting", "checkpoints", "sum / wall", "bound by")
    rows = []
    for case in cases:
        parts = figures.parts(case)
        if isinstance(parts, Unknown):
            continue
        bound = figures.bound_of(case)
        rows.append(
            (
                named(case),
                *(
                    "-" if isinstance(part, Unknown) else f"{part / parts.wall:.1%}"
                    for part in (parts.data, parts.compute, parts.exchange, parts.waiting, parts.checkpoint)
                ),
                f"{parts.total / parts.wall:.3f}",
                str(bound) if isinstance(bound, Unknown) else f"{cost_text(bound)}, {bound.share:.0%}",
            )
        )
    notes = (
        "means over ranks; exchange: of gradients, where nothing hides it; waiting: for the rank whose "
        "gradients are ready last",
        *(("FSDP's exchange is in compute",) if any(c.settings.strategy == "fsdp" for c in cases) else ()),
    )
    return Table("", notes, headers, tuple(rows), frozenset({"what", "bound by"}))


def _cards(cases: Sequence[Case]) -> Table:
    headers = (
        "what",
        "loss, first to last",
        "peak",
        "reserved",
        "unused of it",
        "J per epoch",
        "cards",
    )
    rows = []
    for case in cases:
        rank = case.rank
        peak, reserved = rank.peak_bytes, rank.reserved_bytes
        unused = "-"
        if not isinstance(peak, Unknown) and not isinstance(reserved, Unknown) and reserved:
            unused = f"{1 - peak / reserved:.0%}"
        energy = figures.energy_j(case)
        rows.append(
            (
                named(case),
                f"{rank.losses[0]:.4g} to {rank.losses[-1]:.4g}",
                "-" if isinstance(peak, Unknown) else size(peak),
                "-" if isinstance(reserved, Unknown) else size(reserved),
                unused,
                mean(energy),
                _watched(case),
            )
        )
    notes = (
        "rank 0 of the first run: peak of what torch handed out on a GPU, of what is resident on a CPU; "
        "reserved: what torch's allocator took from the driver",
        "energy: of all cards of the nodes, idle ones too",
    )
    return Table("", notes, headers, tuple(rows), frozenset({"what", "cards"}))


def _watched(case: Case) -> str:
    """The hottest and the most that a card took, of the first run."""
    watched = case.runs[0].watched
    if isinstance(watched, Unknown):
        return "-"
    words = []
    for card in watched:
        for track in card.tracks:
            if track.gauge in ("power_w", "edge_celsius") and not isinstance(track.most, Unknown):
                gauge = GAUGES[track.gauge]
                words.append(f"{gauge.words} {track.most:.0f} {gauge.unit} at most")
    return ", ".join(words) or "-"


def _not_watched(cases: Sequence[Case]) -> Iterator[str]:
    reasons = {str(energy) for energy in map(figures.energy_j, cases) if isinstance(energy, Unknown)}
    yield from (f"energy: {reason}" for reason in sorted(reasons))


def _document() -> Table:
    rows = tuple((nodes, cards, minutes(s), efficiency) for nodes, cards, s, efficiency in DOCUMENT)
    notes = (
        "these figures are from the document on the MI50 cluster, not measured here; it doesn't say model, "
        "data and batch, so they can't be compared with the times above",
        "efficiency by its times, strong: above 1 something else changed with the number of nodes",
    )
    return Table("", notes, ("nodes", "GPUs", "time per epoch", "efficiency"), rows, frozenset({"GPUs"}))
