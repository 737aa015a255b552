"""The verb `watch`: what the cards and the machine do, four times a second, alone or beside a command."""

import argparse
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

from probes.cli.arguments import Verbs, add_verb, number
from probes.core.errors import Exit, ReportError, UsageError
from probes.core.output import echo, error, flag, option
from probes.core.unknown import Unknown
from probes.records.files import reserving

if TYPE_CHECKING:
    from probes.records.watch import WatchReport
    from probes.watch.watcher import CardCeilings


SHORTEST_S, LONGEST_S = 0.02, 24 * 3600.0

_seconds = number(
    lambda s: SHORTEST_S <= s <= LONGEST_S, f"a number of seconds from {SHORTEST_S} to {LONGEST_S:g}"
)


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    watch = add_verb(
        verbs,
        "watch",
        "watch GPU load, memory, power and temperature, until Ctrl-C or while a COMMAND runs",
        exits="With a COMMAND, the exit code is the command's. Files are written only if you name them; "
        "`show` and `html` read the report and the JSON lines.",
    )
    option(watch, "--interval", "S", "seconds between two samples", _seconds, default=0.25)
    watch.add_argument(
        "--for", type=_seconds, dest="longest", metavar="S", help="end after this many seconds"
    )
    option(watch, "--report", "FILE", "write a summary of the run, as JSON", Path)
    option(
        watch,
        "--jsonl",
        "FILE",
        "write every sample as it is taken, as JSON lines, after those that are there",
        Path,
    )
    option(watch, "--csv", "FILE", "write every sample as a row of CSV, after those that are there", Path)
    option(watch, "--listen", "HOST:PORT", "serve the latest sample to Prometheus at /metrics", _address)
    flag(watch, "--plain", "print lines instead of a table")
    flag(
        watch, "--torch-allocator", "also report what torch's allocator holds; COMMAND must begin with python"
    )
    option(
        watch,
        "--ceilings",
        "FILE",
        "throughput report of this machine, to show memory and link rates as shares of its ceilings",
        Path,
    )
    watch.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, after --")
    watch.set_defaults(do=_watch)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 <= int(port[:6]) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not an address such as 127.0.0.1:9400")
    return host.strip("[]") or "127.0.0.1", int(port)


def _watch(args: argparse.Namespace) -> int:
    from probes.reports.watch import report_lines
    from probes.watch.watcher import Watch, WatchOptions, require_distinct

    words = tuple(args.command[1:] if args.command[:1] == ["--"] else args.command)
    if args.torch_allocator and not words:
        raise UsageError("--torch-allocator needs a command", "watch --torch-allocator -- python script.py")
    if args.longest and words:
        raise UsageError("--for ends a watch without a command", "leave it out: the command ends the watch")
    if args.listen and not _is_loopback(args.listen[0]):
        error(f"note: everyone who reaches {args.listen[0]} can read the metrics")
    require_distinct(
        {"--ceilings": args.ceilings, "--report": args.report, "--jsonl": args.jsonl, "--csv": args.csv}
    )
    options = WatchOptions(
        interval_s=args.interval,
        longest_s=args.longest,
        command=words,
        jsonl=args.jsonl,
        csv=args.csv,
        listen=args.listen,
        plain=args.plain,
        torch_allocator=args.torch_allocator,
    )
    ceilings = _ceilings(args.ceilings) if args.ceilings else ()
    with reserving(args.report, "choose a place that can be written: --report FILE") as place:
        watch = Watch(options)
        report = watch.run(ceilings)
        lacks = [*watch.lacks, *_written(report, place, args.report)]
    summary_to = error if words else echo  # standard output is the command's
    summary_to("\n".join(report_lines(report)))
    for text in lacks:
        error(f"error: {text}")
    return int(Exit.DATA) if lacks and not words else _exit_code(report)


def _written(report: "WatchReport", place: Path | None, name: Path) -> list[str]:
    """Write the report; why it can't be written, if so: a command's exit code must not be lost over that."""
    from probes.records.watch import write_watch

    try:
        if place:
            write_watch(report, place, name=name)
    except ReportError as error:
        return [str(error)]
    return []


def _ceilings(path: Path) -> "tuple[CardCeilings, ...]":
    """The ceilings of the first card, which is the one that scans measure. Raises ReportError."""
    from probes.throughput.report import named_scan
    from probes.watch.watcher import CardCeilings

    ceilings = named_scan(path)[0].ceilings
    device = ceilings if isinstance(ceilings, Unknown) else ceilings.on("gpu")
    if isinstance(device, Unknown):
        return (CardCeilings(device, device, device),)
    memory, to_card, from_card = (
        rate if isinstance(rate, Unknown) else rate.median
        for rate in (device.memory, device.to_device, device.from_device)
    )
    return (CardCeilings(memory, to_card, from_card),)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _exit_code(report: "WatchReport") -> int:
    from probes.records.watch import Ended

    return report.ended.exit_code if isinstance(report.ended, Ended) else 0
