"""What a user can audit: an image in the engine, an archive, a directory or a saved report."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from buildtool.audit.audit import Wish, audit_image, audit_path, now_and_then, progress_lines
from buildtool.audit.budget import judge
from buildtool.audit.report import AuditReport, read_report
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.files import PathKind, kind_of_path, looks_like_file, reading
from buildtool.core.model import Budget
from buildtool.core.progress import ProgressLog
from buildtool.engine.reference import parse_pullable
from buildtool.image.archive import Tick
from buildtool.image.documents import Platform
from probes.core.output import can_redraw, progress, redraw
from probes.core.quoting import command
from probes.core.units import decimal_bytes

if TYPE_CHECKING:
    from buildtool.engine.client import Engine


_REDRAW_S = 0.2


def report_of(source: str, wish: Wish, *, pull: bool) -> AuditReport:
    """The audit of an image, archive or directory, or a saved one; an image that the engine lacks is pulled.

    Raises as the audit's functions do, and as `registry.pull` does. Without `pull` a missing image is a
    DataError.
    """
    path = Path(source)
    there = kind_of_path(path)
    if source.endswith(".json") and there is not PathKind.DIRECTORY:
        return _saved_again(path, wish)
    on_terminal = can_redraw()
    tick = _redrawn(source) if on_terminal else progress_lines(progress, source)
    try:
        if there is not PathKind.NOTHING or looks_like_file(source):
            return audit_path(path, wish=wish, tick=tick)
        if wish.image:
            raise ConfigError(
                f"--image chooses an image in an archive, but {source} is an image", "leave --image out"
            )
        from buildtool.engine.client import Engine  # its client takes 0.1 s to import

        engine = Engine()
        _bring(source, engine, wish.platform, pull=pull)
        return audit_image(source, engine=engine, wish=wish, tick=tick)
    finally:
        if on_terminal:
            redraw("")


def require_source(source: str) -> None:
    """Refuse what is certainly nothing to audit, before minutes go into something else.

    Raises ConfigError for what no image can be called, DataError for a file that isn't there.
    """
    if kind_of_path(Path(source)) is not PathKind.NOTHING:
        return
    if looks_like_file(source) or source.endswith(".json"):
        with reading(source):
            Path(source).stat()
    parse_pullable(source)


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


def _bring(ref: str, engine: "Engine", platform: Platform | None, *, pull: bool) -> None:
    """Pull an image that isn't in the engine, and say so first.

    Raises ConfigError for what no image can be called, DataError for an image that can't be pulled.
    """
    if engine.inspect(ref) is not None:
        return
    name = parse_pullable(ref)
    if name is None:
        raise DataError(
            f"the engine has no image with the id {ref}, and an id can't be pulled",
            "list the engine's images: docker images",
        )
    if not pull:
        raise DataError(
            f"the engine has no image {ref}",
            f"leave --no-pull out, or pull it first: {command('docker', 'pull', ref)}",
        )
    from buildtool.engine import registry

    progress(f"the engine doesn't have {ref}; pulling it")
    with ProgressLog() as log:
        registry.pull(name, progress=log.line, platform=str(platform) if platform else None)


def _redrawn(label: str) -> Tick:
    """Progress for terminals: one line, which is drawn again in place."""
    begun = time.monotonic()

    def draw(total: int) -> None:
        rate = decimal_bytes(total / (time.monotonic() - begun))
        redraw(f"reading {label}: {decimal_bytes(total)}, {rate}/s")

    return now_and_then(draw, every_s=_REDRAW_S)
