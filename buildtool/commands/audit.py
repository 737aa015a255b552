"""`python -m buildtool audit IMAGE|ARCHIVE|DIRECTORY`: where an image's bytes are, what to do about it."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from buildtool.audit.archive import Tick
from buildtool.audit.audit import Wish, audit_engine, audit_path, told_ticks
from buildtool.audit.budget import Verdict
from buildtool.audit.documents import Platform
from buildtool.audit.limits import LIMITS
from buildtool.audit.render import render_markdown, render_table
from buildtool.audit.report import AuditReport, to_json
from buildtool.engine import Engine
from buildtool.errors import ConfigError, Exit
from buildtool.files import write_text
from buildtool.model import Budget, parse_size
from probes.units import decimal_bytes

_REDRAW_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("source", metavar="IMAGE|ARCHIVE|LAYOUT-DIR", help="image of the engine, or a path")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the report as Markdown")
    parser.add_argument(
        "--format", choices=("table", "json", "markdown"), default="table", help="of standard output"
    )
    parser.add_argument("--budget-unpacked", metavar="SIZE", help="fail above this, e.g. '1.0 GB'")
    parser.add_argument("--budget-stored", metavar="SIZE", help="fail above this (compressed layers)")
    parser.add_argument(
        "--targets", metavar="GFX", nargs="+", default=[], help="the GPUs that the image is for"
    )
    parser.add_argument("--top", metavar="N", type=int, default=10, help="rows of each list (default 10)")
    parser.add_argument("--image", metavar="REF", help="which of several images in an archive")
    parser.add_argument(
        "--platform", metavar="OS/ARCH", help="which of several platforms (default: this host's)"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="for the index of entries (default 200 MiB, some 600,000 entries)"
    )


def run(args: argparse.Namespace) -> int:
    """Audit one image; exit 1 when it is over its budget."""
    wish = _wish(args)
    progress = _Progress(args.source)
    path = Path(args.source)
    try:
        if path.exists() or _means_file(args.source):
            report = audit_path(path, wish=wish, tick=progress.tick)
        else:
            report = audit_engine(args.source, Engine(), wish=wish, tick=progress.tick)
    finally:
        progress.end()
    if args.json:
        write_text(args.json, to_json(report))
    if args.markdown:
        write_text(args.markdown, render_markdown(report))
    sys.stdout.write(_rendered(report, args.format, args.top))
    return int(Exit.FINDINGS if report.budget.verdict is Verdict.FAIL else Exit.OK)


def _means_file(source: str) -> bool:
    """Can this be no image's name? Then a missing file is told as such."""
    return source.startswith((".", "/", "~")) or source.endswith((".tar", ".tar.gz", ".tgz", ".tar.zst"))


def _wish(args: argparse.Namespace) -> Wish:
    limits = replace(LIMITS, index_bytes=parse_size(args.memory)) if args.memory else LIMITS
    targets = tuple(name for word in args.targets for name in word.replace(";", ",").split(",") if name)
    if args.top < 0:
        raise ConfigError(f"--top {args.top} is no count", "write 0 or more")
    return Wish(
        budget=Budget(
            parse_size(args.budget_unpacked) if args.budget_unpacked else None,
            parse_size(args.budget_stored) if args.budget_stored else None,
        ),
        targets=targets,
        image=args.image,
        platform=_platform(args.platform) if args.platform else None,
        top=max(args.top, 20),
        limits=limits,
    )


def _platform(text: str) -> Platform:
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise ConfigError(f"{text!r} is no platform", "write one such as linux/amd64 or linux/arm/v7")
    return Platform(*parts)


def _rendered(report: AuditReport, form: str, top: int) -> str:
    match form:
        case "json":
            return to_json(report)
        case "markdown":
            return render_markdown(report, top)
        case _:
            return render_table(report, top)


class _Progress:
    """Bytes read, on standard error: a line that is redrawn on a terminal, else one every few seconds."""

    def __init__(self, label: str) -> None:
        self._terminal = sys.stderr.isatty()
        self._lines: Tick = told_ticks(lambda line: print(line, file=sys.stderr), label)
        self._label = label
        self._total, self._drawn, self._begun = 0, 0.0, time.monotonic()

    def tick(self, n_bytes: int) -> None:
        """Count, and say so now and then."""
        if not self._terminal:
            self._lines(n_bytes)
            return
        self._total += n_bytes
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            rate = decimal_bytes(self._total / (now - self._begun))
            sys.stderr.write(f"\r\x1b[Kreading {self._label}: {decimal_bytes(self._total)}, {rate}/s")
            sys.stderr.flush()

    def end(self) -> None:
        """Take the line away."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
