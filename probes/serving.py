"""The served half of the verb `throughput`: its arguments, and a scan that is kept after each level."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from probes.arguments import number, whole
from probes.errors import Exit
from probes.records.reportfiles import reading
from probes.shared import files
from probes.shared.output import complain, flag, option, tell

if TYPE_CHECKING:
    from probes.throughput.document import ThroughputReport
    from probes.throughput.served.servedscan import ServedScan, ServedSettings

MOST_PAYLOAD_BYTES = 64 << 20
QUICK = (1.0, 4)  # seconds of a window, windows at most
FULL = (3.0, 10)
MOST_CALLERS = 512

_count = whole(0, 10**6)
_several = whole(1, 10**6)
_callers = whole(1, MOST_CALLERS)
_positive = number(lambda x: 0 < x <= 1e6, "a number above 0, at most 1000000")
_share = number(lambda x: 0 < x < 1, "a number above 0 and below 1: write 0.1 for 10 %")


def add_served_arguments(scan: argparse.ArgumentParser) -> None:
    """What the served half is asked for."""
    served = scan.add_argument_group("a server under load (Open Inference Protocol over HTTP)")
    option(
        served,
        "--url",
        "URL",
        "the server, such as http://127.0.0.1:8000, or a model's http://host:8000/v2/models/NAME/infer",
    )
    option(served, "--served-model", "NAME", "model to ask, if the server has several")
    option(served, "--rows", "N", "inputs in each request", _several, default=1)
    option(
        served,
        "--dim",
        "N",
        "size of the other dimensions that the model leaves open, such as tokens",
        _count,
        default=16,
    )
    served.add_argument(
        "--tensor",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME:D1,D2",
        help="dimensions of one input, without the batch; may be repeated",
    )
    served.add_argument(
        "--send", action="append", default=[], metavar="NAME", help="send only this input; may be repeated"
    )
    option(served, "--payload", "FILE", "JSON body to send unchanged", Path)
    flag(served, "--json", "send JSON instead of binary tensors")
    _add_load(served)
    option(
        served,
        "--into",
        "FILE",
        "report of a scan without --url, to which the server's figures are added",
        Path,
    )


def _add_load(served: argparse._ArgumentGroup) -> None:
    """Add how the server is loaded."""
    option(served, "--slo-ms", "MS", "latency target: goodput counts the answers within it", _positive)
    served.add_argument(
        "--rate", type=_positive, action="append", default=[], metavar="N",
        help="requests a second in the open loop; may be repeated (default: shares of the best throughput)",
    )  # fmt: skip
    option(served, "--most-callers", "N", "most callers at once in the closed loop", _callers, default=256)
    option(
        served,
        "--connections",
        "N",
        "most connections in the open loop; a request that waits for one counts that time as latency",
        _callers,
        default=MOST_CALLERS,
    )
    flag(served, "--new-connections", "open a new connection for each request")
    option(
        served,
        "--tolerance",
        "SHARE",
        "how closely three windows must agree before a level counts as settled",
        _share,
        default=0.1,
    )
    option(served, "--timeout-s", "S", "seconds to wait for an answer", _positive, default=30.0)
    flag(served, "--quick-load", "measure in fewer and shorter windows")


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, sizes = text.rpartition(":")
    if not colon or not name:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not NAME:D1,D2")
    return name, tuple(_several(size) for size in sizes.split(",") if size)


def _settings(args: argparse.Namespace) -> "ServedSettings":
    from probes.throughput.served.servedscan import ServedSettings

    window_s, most_windows = QUICK if args.quick_load else FULL
    return ServedSettings(
        rows=args.rows,
        slo_s=args.slo_ms / 1e3 if args.slo_ms else None,
        window_s=window_s,
        windows=3,
        most_windows=most_windows,
        tolerance=args.tolerance,
        limit_s=args.timeout_s,
        most_callers=args.most_callers,
        most_connections=args.connections,
        keep_alive=not args.new_connections,
        rates_per_s=tuple(args.rate),
        seed=args.seed,
    )


def served(args: argparse.Namespace, folder: Path) -> Exit:
    """Measure the server of `--url`; the report goes into `folder`, or into that of `--into`."""
    from probes.throughput.document import named_scan, write_new_scan, write_scan
    from probes.throughput.served.client.address import parse_url
    from probes.throughput.served.serverscan import Asking, scan
    from probes.throughput.showing.servedtables import level_line, served_answer

    target = parse_url(args.url, model=args.served_model or "")
    asking = Asking(tuple(args.send), args.dim, tuple(args.tensor), _payload(args.payload), args.json)
    report = named_scan(args.into)[0] if args.into else _new(args.seed)
    path = args.into or write_new_scan(report, folder, "served")
    seen = 0

    def keep(found: "ServedScan") -> None:
        nonlocal seen
        write_scan(replace(report, served=found), path)  # before a level is shown: what was seen is kept
        finished, seen = found.levels[seen:], len(found.levels)
        for level in finished:
            tell(level_line(level))

    try:
        found = scan(target, asking, _settings(args), keep)
    except KeyboardInterrupt:
        complain(f"interrupted; {path} holds what was measured, levels: {seen}")
        return Exit.INTERRUPTED
    tell("")
    for said in served_answer(found):
        tell(f"- {said}")
    tell(f"report: {path}")
    return Exit.OK if found.complete else Exit.BROKEN


def _payload(path: Path | None) -> bytes | None:
    if path is None:
        return None
    with reading(path, "name a file with a request's body, JSON in UTF-8: --payload FILE"):
        return files.read_text(path, most_bytes=MOST_PAYLOAD_BYTES).encode()


def _new(seed: int) -> "ThroughputReport":
    from probes.run import thismachine
    from probes.shared.unknown import Unknown
    from probes.throughput.document import ScanSettings, begun

    settings = ScanSettings("", (), 0, (), (), (), (), seed, 0)
    return begun(settings, thismachine.look(), Unknown("only a server was asked"))
