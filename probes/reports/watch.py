"""The report of a watch as text: a sentence for each card, then every figure. Pure."""

from collections.abc import Sequence

from probes.core.units import binary_bytes, counted, duration
from probes.core.unknown import Unknown
from probes.records.watch import (
    GAUGES,
    Allocator,
    CardWatch,
    Ended,
    Energy,
    Saturation,
    Slowdowns,
    Track,
    WatchReport,
)
from probes.reports.document import Document, PageSection
from probes.reports.run import moment
from probes.watch.screen import gauge_text, subject_lines

MOST_PROCESSES = 8
_HOUR_J = 3600.0


def summary(report: WatchReport) -> list[str]:
    """What the run came to, in a sentence, and one for each card: what is asked for first."""
    took, ended = duration(report.duration_s), report.ended
    first = (
        f"Watched for {took}."
        if isinstance(ended, Unknown)
        else f"The command took {took} and ended with exit code {ended.exit_code}."
    )
    cards = zip(report.subject.cards, report.cards, strict=True)
    return [first, *(f"{subject.name}: {_card_summary(card)}." for subject, card in cards)]


def _card_summary(card: CardWatch) -> str:
    busy, vram = (
        next((track for track in card.tracks if track.gauge == gauge), None)
        for gauge in ("busy_percent", "vram_bytes")
    )
    parts = []
    if busy and not isinstance(busy.mean, Unknown):
        parts.append(f"busy for {busy.mean:.0f}% of the time")
    if vram and not isinstance(vram.most, Unknown):
        parts.append(f"{binary_bytes(vram.most)} of VRAM at most")
    if not isinstance(card.energy, Unknown):
        parts.append(_joules(card.energy))
    if not isinstance(card.slowdowns, Unknown):
        parts.append(f"slowed down: {slow_text(card.slowdowns)}")
    return ", ".join(parts) or "no gauge was ever known"


def report_lines(report: WatchReport) -> list[str]:
    """The whole report as text."""
    return [*summary(report), "", *figure_lines(report)]


def watch_document(report: WatchReport) -> Document:
    """What a watch came to, and every figure; the text has a layout of its own."""
    subject = report.subject
    title = f"{subject.host}, watched for {duration(report.duration_s)}"
    command = (f"during {' '.join(subject.command)}",) if subject.command else ()
    return Document(
        kicker="Watched",
        title=title,
        subject=title,
        details=(moment(subject.started), *command, f"Weir {report.tool_version}"),
        headline=tuple(summary(report)),
        page_sections=(PageSection("figures", "Every figure", layout="\n".join(figure_lines(report))),),
        layout="\n".join(report_lines(report)),
    )


def figure_lines(report: WatchReport) -> list[str]:
    """Every figure, and why others are unknown."""
    lines = [*subject_lines(report.subject)[1:], f"duration {duration(report.duration_s)}, {_pace(report)}"]
    if not isinstance(report.ended, Unknown):
        lines.append(_ended(report.ended))
    lines.append("the host")
    lines += [f"  {text}" for text in _tracks(report.machine)]
    for at, card in enumerate(report.cards):
        lines += ["", f"card [{at}]", *(f"  {text}" for text in _card_lines(card))]
    if isinstance(report.allocator, tuple):
        lines += ["", *map(_allocator, report.allocator)]
    return lines


def _pace(report: WatchReport) -> str:
    pace = report.pace
    parts = [counted(pace.samples, "sample")]
    if pace.skipped:
        parts.append(f"{pace.skipped} skipped")
    if not isinstance(pace.error_p99_s, Unknown):
        parts.append(f"interval error p99 {duration(pace.error_p99_s)}")
    if not isinstance(pace.own_cpu_share, Unknown):
        parts.append(f"the watch itself took {pace.own_cpu_share:.2%} of a core")
    return ", ".join(parts)


def _ended(ended: Ended) -> str:
    parts = [f"exit code {ended.exit_code}"]
    if not isinstance(ended.cpu_s, Unknown):
        parts.append(f"CPU time {duration(ended.cpu_s)}")
    if not isinstance(ended.largest_process_bytes, Unknown):
        parts.append(f"largest process {binary_bytes(ended.largest_process_bytes)} resident")
    return f"the command: {', '.join(parts)}"


def _tracks(tracks: Sequence[Track]) -> list[str]:
    known = [track for track in tracks if not isinstance(track.most, Unknown)]
    lines = [
        f"{GAUGES[t.gauge].words:<24} mean {gauge_text(t.mean, GAUGES[t.gauge].unit)}, "
        f"most {gauge_text(t.most, GAUGES[t.gauge].unit)}"
        for t in known
    ]
    reasons: dict[str, list[str]] = {}
    for track in tracks:
        if isinstance(track.most, Unknown):
            reasons.setdefault(track.most.reason, []).append(GAUGES[track.gauge].words)
    return [*lines, *(f"unknown: {', '.join(names)} ({reason})" for reason, names in reasons.items())]


def _card_lines(card: CardWatch) -> list[str]:
    return [
        f"energy: {energy_text(card.energy)}",
        f"slowed: {slow_text(card.slowdowns)}",
        *_tracks(card.tracks),
        *map(saturation_text, card.saturation),
        *_processes(card),
    ]


def energy_text(energy: Energy | Unknown) -> str:
    """Energy with its error and source."""
    if isinstance(energy, Unknown):
        return str(energy)
    hours = energy.joules / _HOUR_J
    return f"{_joules(energy)} ({hours:.3g} Wh) over {duration(energy.covers_s)}, by {energy.source}"


def _joules(energy: Energy) -> str:
    digits = f"{energy.joules:,.0f}" if energy.joules >= 1e4 else f"{energy.joules:.4g}"
    return f"{digits} J ± {energy.error_j:.2g} J"


def slow_text(slow: Slowdowns | Unknown) -> str:
    """The share of time for each reason."""
    if isinstance(slow, Unknown):
        return str(slow)
    if not slow.reasons:
        return "never"
    each = ", ".join(f"{one.reason} {one.share:.1%}" for one in slow.reasons)
    return f"{slow.any_share:.1%} of the time: {each}"


def saturation_text(saturation: Saturation) -> str:
    """Achieved, ceiling and their ratio."""
    achieved, ceiling = saturation.achieved, saturation.ceiling
    if isinstance(achieved, Unknown):
        return f"saturation of {saturation.of}: {achieved}"
    text = f"saturation of {saturation.of}: {gauge_text(achieved, saturation.unit)}"
    if isinstance(ceiling, Unknown):
        return f"{text}, share unknown ({ceiling.reason})"
    share = f", {achieved / ceiling:.1%}" if ceiling > 0 else ""
    return f"{text} of {gauge_text(ceiling, saturation.unit)} measured{share}"


def _processes(card: CardWatch) -> list[str]:
    if isinstance(card.processes, Unknown):
        return [f"processes: {card.processes}"]
    return [
        f"process {use.pid}{f' {use.name}' if use.name else ''}: VRAM {gauge_text(use.vram_bytes, 'bytes')}, "
        f"GTT {gauge_text(use.gtt_bytes, 'bytes')}, evicted {gauge_text(use.evicted_bytes, 'bytes')} at most"
        for use in card.processes[:MOST_PROCESSES]
    ]


def _allocator(gpu: Allocator) -> str:
    free = gpu.largest_free_bytes
    largest = "" if isinstance(free, Unknown) else f", largest free block {binary_bytes(free)}"
    return (
        f"torch on GPU {gpu.device}: {binary_bytes(gpu.most_allocated_bytes)} allocated and "
        f"{binary_bytes(gpu.most_reserved_bytes)} reserved at most; when most was reserved, "
        f"{gpu.unused_share:.1%} of it was unused, {gpu.split_share:.1%} in pieces that can't be given back"
        f"{largest}; {gpu.retries} retries, {gpu.out_of_memory} out of memory"
    )
