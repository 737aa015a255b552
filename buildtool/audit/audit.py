"""The audit from end to end, for commands and the builder: open, read, count, judge, write."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from buildtool.audit.counts import gather_facts
from buildtool.audit.formats import render
from buildtool.audit.options import DEFAULT_OPTIONS, AuditOptions
from buildtool.audit.report import AuditReport, judge, make_report, read_report
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.files import PathKind, kind_of_path, looks_like_file, reading, write_text
from buildtool.core.model import Budget
from buildtool.core.progress import Progress, ProgressLog
from buildtool.engine.reference import alike, parse_pullable
from buildtool.image.archive import MISSING, StreamArchive, Tick, open_archive
from buildtool.image.documents import Platform
from buildtool.image.layer import Inspect
from buildtool.image.reader import ImageContents, read_image
from probes.core.invocation import tool_version
from probes.core.output import can_redraw, progress, redraw
from probes.core.quoting import command
from probes.core.units import decimal_bytes

if TYPE_CHECKING:
    from buildtool.engine.client import Engine

PROGRESS_EVERY_S = 5.0
_REDRAW_EVERY_S = 0.2
_WRITTEN = {"json": "json", "markdown": "md", "html": "html"}  # formats by `write_reports` -> file endings


class Saver(Protocol):
    """What the audit needs from an engine."""

    def save(self, ref: str) -> Iterator[bytes]:
        """An image as `docker save` writes it, in chunks."""


def audit_source(source: str, options: AuditOptions, *, pull: bool) -> AuditReport:
    """The audit of an image, archive or directory, or a saved one; an image that the engine lacks is pulled.

    Raises as the audit's functions do, and as `registry.pull` does. Without `pull` a missing image is a
    DataError.
    """
    path = Path(source)
    if source.endswith(".json") and kind_of_path(path) is not PathKind.DIRECTORY:
        return _saved_report(path, options)
    return _audited(read_source(source, options, pull=pull), options)


def read_source(
    source: str, options: AuditOptions, *, pull: bool, inspect: Inspect | None = None
) -> ImageContents:
    """The image that a name, archive or directory means, read once; raises as `audit_source` does."""
    path = Path(source)
    place = kind_of_path(path)
    with reading_shown(source) as tick_of:
        if place is not PathKind.NOTHING or looks_like_file(source):
            return _read_path(path, options, tick_of(file_bytes(path, place)), inspect)
        if options.image:
            raise ConfigError(
                f"--image chooses an image in an archive, but {source} is an image", "leave --image out"
            )
        from buildtool.engine.client import Engine  # its client takes 0.1 s to import

        engine = Engine()
        _pull_if_missing(source, engine, options.platform, pull=pull)
        total = _engine_bytes(engine, source) if can_redraw() else None
        return read_engine(source, engine, options, tick=tick_of(total), inspect=inspect)


@contextmanager
def reading_shown(source: str, verb: str = "audit") -> Iterator[Callable[[int | None], Tick]]:
    """A function that makes, from the bytes to read or None, what shows progress while they are read.

    On a terminal that is one line, removed at the end of the block; elsewhere a line every few seconds.
    """
    on_terminal = can_redraw()

    def tick_of(total: int | None) -> Tick:
        return _progress_in_place(source, total) if on_terminal else progress_lines(progress, source, verb)

    try:
        yield tick_of
    finally:
        if on_terminal:
            redraw("")


def audit_image(
    ref: str,
    *,
    engine: Saver,
    options: AuditOptions = DEFAULT_OPTIONS,
    tick: Tick = lambda _n_bytes: None,
    digest: str | None = None,
) -> AuditReport:
    """Audit an image that the engine holds, without extracting it.

    With `digest`, exactly that image is read, and `ref` is only its name: tags move.
    Raises EngineUnavailable, DataError for an unknown image, and ImageError for one that can't be trusted.
    """
    return _audited(read_engine(ref, engine, options, tick=tick, digest=digest), options)


def read_engine(
    ref: str,
    engine: Saver,
    options: AuditOptions = DEFAULT_OPTIONS,
    *,
    tick: Tick = lambda _n_bytes: None,
    digest: str | None = None,
    inspect: Inspect | None = None,
) -> ImageContents:
    """An image that the engine holds, read as it streams by; arguments and errors as of `audit_image`."""
    archive = StreamArchive(
        engine.save(digest or ref), label=ref, limits=options.limits, tick=tick, inspect=inspect
    )
    return read_image(
        archive, label=ref, ref=ref, from_engine=True, platform=options.platform, limits=options.limits
    )


def audit_path(path: Path, *, options: AuditOptions, tick: Tick) -> AuditReport:
    """Audit an archive file or an OCI layout directory. Raises DataError, ConfigError, ImageError."""
    return _audited(_read_path(path, options, tick, None), options)


def _read_path(path: Path, options: AuditOptions, tick: Tick, inspect: Inspect | None) -> ImageContents:
    archive = open_archive(path, limits=options.limits, tick=tick, inspect=inspect)
    return read_image(
        archive, label=str(path), ref=options.image, platform=options.platform, limits=options.limits
    )


def _audited(contents: ImageContents, options: AuditOptions) -> AuditReport:
    facts = replace(
        gather_facts(contents, targets=options.targets, top=options.top, keep=options.keep),
        all_needed=options.all_needed,
        host_cards=options.host_cards,
    )
    return make_report(contents, facts, options.budget, tool_version())


def write_reports(report: AuditReport, directory: Path, stem: str) -> tuple[Path, ...]:
    """Write `stem.json`, `.md` and `.html`; returns these paths. Raises as `files.write_text` does."""
    texts = {directory / f"{stem}.{ending}": render(report, name) for name, ending in _WRITTEN.items()}
    for path, text in texts.items():
        write_text(path, text)
    return tuple(texts)


def require_source(source: str) -> None:
    """Refuse what is certainly nothing to audit, before minutes go into something else.

    Raises ConfigError for what no image can be called, DataError for a file that isn't there.
    """
    if kind_of_path(Path(source)) is not PathKind.NOTHING:
        return
    if looks_like_file(source) or source.endswith(".json"):
        with reading(source, MISSING):
            Path(source).stat()
    parse_pullable(source)


def _saved_report(path: Path, options: AuditOptions) -> AuditReport:
    """A saved report, judged by the budget of this command line if it sets one."""
    if options.targets or options.image or options.platform or options.keep:
        raise ConfigError(
            f"{path} is a saved report: --targets, --image, --platform and --keep can't change it",
            "audit the image itself",
        )
    report = read_report(path)
    if options.budget == Budget():
        return report
    totals = report.totals
    result = judge(options.budget, unpacked_bytes=totals.unpacked_bytes, stored_bytes=totals.stored_bytes)
    return replace(report, budget=result)


def _pull_if_missing(ref: str, engine: "Engine", platform: Platform | None, *, pull: bool) -> None:
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
    near = alike(ref, engine.tags())
    if not pull:
        meant = f"the engine has {', '.join(near)}; " if near else ""
        raise DataError(
            f"the engine has no image {ref}",
            f"{meant}leave --no-pull out, or pull it first: {command('docker', 'pull', ref)}",
        )
    from buildtool.engine import registry

    progress(f"the engine doesn't have {ref}; pulling it")
    if near:
        progress(f"names alike that it has: {', '.join(near)}")
    with ProgressLog() as log:
        registry.pull(name, progress=log.line, platform=str(platform) if platform else None)


def progress_lines(progress: Progress, label: str, verb: str = "audit") -> Tick:
    """Progress for logs: a line every PROGRESS_EVERY_S seconds with the bytes read so far."""
    return throttled(
        lambda total: progress(f"{verb} {label}: {decimal_bytes(total)} read"), every_s=PROGRESS_EVERY_S
    )


def _progress_in_place(label: str, total: int | None) -> Tick:
    """Progress for terminals: one line, redrawn, with a percentage where the bytes to read are known."""
    begun = time.monotonic()

    def draw(done: int) -> None:
        rate = decimal_bytes(done / (time.monotonic() - begun))
        redraw(f"reading {label}: {_part_read(done, total)}, {rate}/s")

    return throttled(draw, every_s=_REDRAW_EVERY_S)


def _part_read(done: int, total: int | None) -> str:
    """What was read; more than the total means that the total is wrong."""
    if not total or done > total:
        return decimal_bytes(done)
    return f"{100 * done // total} %, {decimal_bytes(done)} of {decimal_bytes(total)}"


def file_bytes(path: Path, kind: PathKind) -> int | None:
    """The size of an archive, which is read whole except for other images in it; None for a directory."""
    try:
        return path.stat().st_size if kind is PathKind.FILE else None
    except OSError:  # the audit itself says why
        return None


def _engine_bytes(engine: "Engine", ref: str) -> int | None:
    """About the length of the engine's archive: compressed layers, or plain ones in the classic store."""
    size = (engine.inspect(ref) or {}).get("Size")
    return size if isinstance(size, int) else None


def throttled(show: Callable[[int], None], *, every_s: float) -> Tick:
    """A function that counts bytes, and calls `show` with their sum at most every `every_s` seconds."""
    total, last_s = 0, time.monotonic()

    def tick(n_bytes: int) -> None:
        nonlocal total, last_s
        total += n_bytes
        now = time.monotonic()
        if now - last_s >= every_s:
            last_s = now
            show(total)

    return tick
