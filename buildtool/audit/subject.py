"""What a user can audit: an image in the engine, an archive, a directory or a saved report."""

import time
from dataclasses import replace
from pathlib import Path

from buildtool.audit.audit import Wish, audit_engine, audit_path, progress_lines
from buildtool.audit.judge.budget import judge
from buildtool.audit.read.archive import Tick
from buildtool.audit.report.saved import read_report
from buildtool.audit.report.schema import AuditReport
from buildtool.errors import ConfigError
from buildtool.model import Budget
from buildtool.places import Place, place_at
from probes.shared.output import can_redraw, redraw, say
from probes.shared.units import decimal_bytes

_REDRAW_S = 0.2


def report_of(source: str, wish: Wish) -> AuditReport:
    """The audit of an image, archive or directory, or a saved one. Raises as the audit's functions do."""
    path = Path(source)
    there = place_at(path)
    if source.endswith(".json") and there is not Place.DIRECTORY:
        return _saved_again(path, wish)
    progress = _Progress(source)
    try:
        if there is not Place.NOTHING or _means_file(source):
            return audit_path(path, wish=wish, tick=progress.tick)
        if wish.image:
            raise ConfigError(
                f"--image chooses an image in an archive, but {source} is an image", "leave --image out"
            )
        from buildtool.engine.client import Engine  # its client takes 0.1 s to import

        return audit_engine(source, Engine(), wish=wish, tick=progress.tick)
    finally:
        progress.end()


def _saved_again(path: Path, wish: Wish) -> AuditReport:
    """A saved report, judged by the budget of this command line if it sets one."""
    if wish.targets or wish.image or wish.platform:
        raise ConfigError(
            f"{path} is a saved report: --targets, --image and --platform can't change it",
            "audit the image itself",
        )
    report = read_report(path)
    if wish.budget == Budget():
        return report
    totals = report.totals
    judged = judge(wish.budget, unpacked_bytes=totals.unpacked_bytes, stored_bytes=totals.stored_bytes)
    return replace(report, budget=judged)


def _means_file(source: str) -> bool:
    """Is this certainly not an image's name? Then a missing file is reported as such."""
    return source.startswith((".", "/", "~")) or source.endswith((".tar", ".tar.gz", ".tgz", ".tar.zst"))


class _Progress:
    """Bytes read, on standard error: a line that is redrawn on a terminal, else one every few seconds."""

    def __init__(self, label: str) -> None:
        self._terminal = can_redraw()
        self._lines: Tick = progress_lines(say, label)
        self._label = label
        self._total, self._drawn, self._begun = 0, 0.0, time.monotonic()

    def tick(self, n_bytes: int) -> None:
        """Count, and report progress now and then."""
        if not self._terminal:
            self._lines(n_bytes)
            return
        self._total += n_bytes
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            rate = decimal_bytes(self._total / (now - self._begun))
            redraw(f"reading {self._label}: {decimal_bytes(self._total)}, {rate}/s")

    def end(self) -> None:
        """Remove the line."""
        if self._terminal:
            redraw("")
