"""The audit from end to end: open, read, count, judge, write. What the command line and the builder call."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from buildtool.audit.counts import gather
from buildtool.audit.html import HTML_FILES, render_html
from buildtool.audit.report import AuditReport, make_report, to_json
from buildtool.audit.text import render_markdown
from buildtool.core.files import write_text
from buildtool.core.model import Budget
from buildtool.core.progress import Progress
from buildtool.gpucode.target import TargetId
from buildtool.image.archive import ImageContents, StreamArchive, Tick, open_archive
from buildtool.image.documents import Platform
from buildtool.image.faults import LIMITS, Limits
from buildtool.image.image import read_image
from probes.core.invocation import tool_version
from probes.core.units import decimal_bytes

PROGRESS_EVERY_S = 5.0
NO_BUDGET = Budget()


class Saver(Protocol):
    """What the audit needs from an engine."""

    def save(self, ref: str) -> Iterator[bytes]:
        """An image as `docker save` writes it, in chunks."""


@dataclass(frozen=True)
class Wish:
    """What the caller wants to know."""

    budget: Budget = NO_BUDGET
    targets: tuple[str, ...] = ()
    image: str | None = None  # which of several images in an archive
    platform: Platform | None = None
    top: int = HTML_FILES  # of the largest files
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        """Raises BadTarget before any image is read."""
        for target in self.targets:
            TargetId.parse(target)


NO_WISH = Wish()


def audit_image(
    ref: str,
    *,
    engine: Saver,
    wish: Wish = NO_WISH,
    tick: Tick = lambda _n_bytes: None,
    digest: str | None = None,
) -> AuditReport:
    """Audit an image that the engine holds, without extracting it.

    With `digest`, exactly that image is read, and `ref` is only its name: tags move.
    Raises EngineUnavailable, DataError for an unknown image, and ImageFault for one that can't be trusted.
    """
    archive = StreamArchive(engine.save(digest or ref), label=ref, limits=wish.limits, tick=tick)
    contents = read_image(
        archive, label=ref, ref=ref, is_answer=True, platform=wish.platform, limits=wish.limits
    )
    return _audited(contents, wish)


def audit_path(path: Path, *, wish: Wish, tick: Tick) -> AuditReport:
    """Audit an archive file or an OCI layout directory. Raises DataError, ConfigError, ImageFault."""
    archive = open_archive(path, limits=wish.limits, tick=tick)
    contents = read_image(
        archive, label=str(path), ref=wish.image, platform=wish.platform, limits=wish.limits
    )
    return _audited(contents, wish)


def write_reports(report: AuditReport, directory: Path, stem: str) -> tuple[Path, ...]:
    """Write `stem.json`, `.md` and `.html`; returns these paths. Raises as `files.write_text` does."""
    forms = {"json": to_json(report), "md": render_markdown(report), "html": render_html(report)}
    written = {directory / f"{stem}.{ending}": text for ending, text in forms.items()}
    for path, text in written.items():
        write_text(path, text)
    return tuple(written)


def progress_lines(progress: Progress, label: str) -> Tick:
    """Progress for logs: a line every PROGRESS_EVERY_S seconds with the bytes read so far."""
    return now_and_then(
        lambda total: progress(f"audit {label}: {decimal_bytes(total)} read"), every_s=PROGRESS_EVERY_S
    )


def now_and_then(show: Callable[[int], None], *, every_s: float) -> Tick:
    """A function that counts bytes, and hands their sum to `show` every so many seconds."""
    total, last_s = 0, time.monotonic()

    def tick(n_bytes: int) -> None:
        nonlocal total, last_s
        total += n_bytes
        now = time.monotonic()
        if now - last_s >= every_s:
            last_s = now
            show(total)

    return tick


def _audited(contents: ImageContents, wish: Wish) -> AuditReport:
    facts = gather(contents, targets=wish.targets, top=wish.top)
    return make_report(contents, facts, wish.budget, tool_version())
