"""Samples as they come: a table that is redrawn by rich where that is installed, plain lines elsewhere."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from probes.core.output import can_redraw, echo
from probes.core.quoting import terminal
from probes.core.units import binary_bytes, decimal_bytes, duration
from probes.core.unknown import Unknown
from probes.records.watch import CARD_GAUGES, GAUGES, MACHINE_GAUGES, CardSample, Sample, Subject

if TYPE_CHECKING:
    from rich.table import Table


EVERY_S = 1.0  # between two pictures: drawing one costs more than a sample
SHOWN = (
    "busy_percent",
    "memory_busy_percent",
    "vram_bytes",
    "gtt_bytes",
    "power_w",
    "edge_celsius",
    "core_mhz",
)


def gauge_text(value: float | Unknown, unit: str) -> str:
    """A gauge's value with its unit; `-` where it isn't known."""
    if isinstance(value, Unknown):
        return "-"
    if unit == "bytes":
        return binary_bytes(value)
    if unit == "bytes/s":
        return f"{decimal_bytes(value)}/s"
    return f"{value:.0f} {unit}" if unit != "%" else f"{value:.0f}%"


def sample_line(sample: Sample) -> str:
    """One sample in one line: the host, then each card."""
    host = sample.machine
    parts = [
        f"{sample.at_s:8.2f} s",
        f"CPU {gauge_text(host.get('cpu_percent'), '%')}",
        f"RAM {gauge_text(host.get('ram_bytes'), 'bytes')}",
    ]
    return "  ".join([*parts, *(_card_part(at, card) for at, card in enumerate(sample.cards))])


def _card_part(at: int, card: CardSample) -> str:
    shown = (f"{GAUGES[name].words} {gauge_text(card.look.get(name), GAUGES[name].unit)}" for name in SHOWN)
    known = [text for text in shown if not text.endswith(" -")]
    slow = "" if isinstance(card.slowdowns, Unknown) or not card.slowdowns else "; ".join(card.slowdowns)
    text = ", ".join(known) or next(iter(card.look.missing.values()), "nothing is known")
    return f"[{at}] {text}{f', slowed: {slow}' if slow else ''}"


def subject_lines(subject: Subject) -> list[str]:
    """What is watched."""
    lines = [f"watching {subject.host} every {duration(subject.interval_s)}"]
    for at, card in enumerate(subject.cards):
        vram = card.vram_total_bytes
        total = "" if isinstance(vram, Unknown) else f", VRAM {binary_bytes(vram)}"
        lines.append(f"[{at}] {card.name}, {card.pci_id}, {card.driver}{total}")
    if not subject.cards:
        lines.append("no card that amdgpu or NVML shows here; the host alone is watched")
    return lines


class View(Protocol):
    """Something that shows samples."""

    def show(self, sample: Sample) -> None:
        """Show one, or leave it out because the last one was shown just now."""

    def close(self) -> None:
        """Give the terminal back."""


class NoView:
    """Shows nothing: the terminal is the command's."""

    def show(self, sample: Sample) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing: there is no table to remove."""


class PlainLines:
    """A line at most every second."""

    def __init__(self, subject: Subject, write_line: Callable[[str], None] = echo) -> None:
        self._write_line, self._shown_s = write_line, -EVERY_S
        for line in subject_lines(subject):
            write_line(line)

    def show(self, sample: Sample) -> None:
        """Print a line."""
        if sample.at_s - self._shown_s >= EVERY_S * 0.99:
            self._shown_s = sample.at_s
            self._write_line(sample_line(sample))

    def close(self) -> None:
        """Do nothing: there is no table to remove."""


class LiveTable:
    """A table that is drawn again in place, with a column for the host and one for each card."""

    def __init__(self, subject: Subject) -> None:
        from rich.live import Live

        self._subject, self._shown_s = subject, -EVERY_S
        self._live: Live = Live(auto_refresh=False, transient=True)
        self._live.start()

    def show(self, sample: Sample) -> None:
        """Draw the table."""
        if sample.at_s - self._shown_s >= EVERY_S * 0.99:
            self._shown_s = sample.at_s
            self._live.update(self._table(sample), refresh=True)

    def _table(self, sample: Sample) -> "Table":
        from rich.table import Table
        from rich.text import Text

        def cell(text: str) -> Text:
            return Text(terminal(text))

        table = Table(title=Text(terminal(f"{self._subject.host}  {sample.at_s:.0f} s  (Ctrl-C ends)")))
        for name in ("", *(f"[{at}] {card.name}" for at, card in enumerate(self._subject.cards))):
            table.add_column(cell(name), justify="right")
        if not self._subject.cards:
            table.add_column("")
        for gauge in MACHINE_GAUGES:
            shown = gauge_text(sample.machine.get(gauge.name), gauge.unit)
            if shown != "-":
                table.add_row(cell(gauge.words), cell(shown))
        for gauge in CARD_GAUGES:
            row = [gauge_text(card.look.get(gauge.name), gauge.unit) for card in sample.cards]
            if set(row) - {"-"} and gauge.name != "energy_j":
                table.add_row(cell(gauge.words), *map(cell, row))
        slow = [_slow(card.slowdowns) for card in sample.cards]
        if slow:
            table.add_row("slowed", *map(cell, slow))
        return table

    def close(self) -> None:
        """Remove the table."""
        self._live.stop()


def _slow(reasons: tuple[str, ...] | Unknown) -> str:
    return "-" if isinstance(reasons, Unknown) else "; ".join(reasons) or "no"


def view_for(subject: Subject, *, plain: bool) -> View:
    """What suits standard output: plain lines for files, pipes, NO_COLOR, dumb terminals and without rich."""
    if plain or os.environ.get("NO_COLOR") or not can_redraw(output=True):
        return PlainLines(subject)
    try:
        return LiveTable(subject)
    except ImportError:
        return PlainLines(subject)
