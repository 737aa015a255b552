"""`weir clean`: show what Weir keeps on this host, and remove what is named."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from buildtool.build.storage import Group, Places, Stored, no_build_running, remove, survey
from buildtool.core.errors import Exit, ToolError
from buildtool.engine.client import ANSWER_TIMEOUT_S, Engine
from probes.core.codec import to_json
from probes.core.invocation import host_command
from probes.core.output import echo, flag, write
from probes.core.units import decimal_bytes
from probes.core.unknown import Unknown

_MEANING = {
    Group.CACHES: "made or fetched again when they are needed",
    Group.REPORTS: "results and pinned inputs: gone for good",
    Group.IMAGES: "images with their names, and containers of killed runs",
}


@dataclass(frozen=True)
class CleanReport:
    """What `weir clean --json` prints; sizes are in bytes."""

    schema_version: int
    stored: tuple[Stored, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    flag(parser, "--caches", "remove what builds and placements make or fetch again when they need it")
    flag(parser, "--images", "remove the images that builds made, and containers of killed runs")
    flag(parser, "--reports", "remove reports, and the file that pins the inputs of builds")
    flag(parser, "--all", "remove all three")
    flag(parser, "--dry-run", "remove nothing (default: with none of the options above, nothing is removed)")
    flag(parser, "--json", "print JSON instead of text; sizes are in bytes")


def run(args: argparse.Namespace) -> int:
    """Show what is kept and remove what is named; 1 when some of that couldn't be removed."""
    groups = frozenset(group for group in Group if args.all or getattr(args, group.value))
    places = Places.here()
    engine = _engine()
    removing = bool(groups) and not args.dry_run
    with no_build_running(places) if removing else nullcontext():
        rows = survey(places, engine)
        if removing:
            rows = remove(rows, groups, engine)
    left = [row for row in rows if removing and row.group in groups and not row.removed]
    if args.json:
        write(to_json(CleanReport(1, tuple(rows))))
    else:
        echo("\n".join(_lines(rows, groups, removing=removing)))
    return int(Exit.FINDINGS if left else Exit.OK)


def _engine() -> Engine | ToolError:
    try:
        return Engine(timeout_s=ANSWER_TIMEOUT_S)
    except ToolError as error:
        return error


def _lines(rows: Sequence[Stored], groups: frozenset[Group], *, removing: bool) -> list[str]:
    lines = []
    for group in Group:
        of_group = [row for row in rows if row.group is group]
        if of_group:
            lines.append(f"{group.value}: {_total(of_group)}; {_MEANING[group]}")
            lines += [_line(row) for row in of_group]
    if others := [row for row in rows if row.group is None]:
        lines += ["not removed by weir:", *map(_line, others)]
    known = [group for group in Group if any(row.group is group and not row.removed for row in rows)]
    if not any(row.group for row in rows):
        return ["weir keeps nothing on this host", *lines]
    return lines if removing else [*lines, *_commands(known, groups)]


def _commands(known: Sequence[Group], groups: frozenset[Group]) -> list[str]:
    """What to type to remove what was shown: the groups that were named, else each that has something."""
    chosen = [group for group in known if not groups or group in groups]
    if not chosen:
        return ["nothing of what was named is there"]
    if groups:
        return [f"to remove it: {host_command()} clean {' '.join(f'--{group.value}' for group in chosen)}"]
    rows = [f"  {host_command()} clean --{group.value}" for group in chosen]
    return ["nothing was removed; to remove:", *rows, f"  {host_command()} clean --all"]


def _line(row: Stored) -> str:
    size = "unknown" if isinstance(row.bytes, Unknown) else decimal_bytes(row.bytes)
    why = row.bytes.reason if isinstance(row.bytes, Unknown) else ""
    parts = [row.what, row.place, why, row.note, "removed" if row.removed else ""]
    return f"  {size:>10}  {'; '.join(part for part in parts if part)}"


def _total(rows: Sequence[Stored]) -> str:
    """The sum of the known sizes; images may have layers in common, so theirs is a bound."""
    sizes = [row.bytes for row in rows if isinstance(row.bytes, int)]
    bound = "at most " if rows[0].group is Group.IMAGES else ""
    unknown = len(rows) - len(sizes)
    return f"{bound}{decimal_bytes(sum(sizes))}{f' and {unknown} of unknown size' if unknown else ''}"
