"""The verb `throughput`: how many inputs a second, over batch size, and what limits it."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from probes.cli.arguments import Verbs, add_verb, number
from probes.core import files
from probes.core.errors import Exit, UsageError
from probes.core.invocation import probe_line
from probes.core.output import Parser, echo, error, flag, option, whole
from probes.core.unknown import Unknown
from probes.records.facts import Machine
from probes.records.files import reading
from probes.throughput.ceilings import Ceilings
from probes.throughput.direct.results import BatchRow, Series, Way
from probes.throughput.direct.scan import BACKENDS, DEVICES, INPUTS, MODES, MOST_BATCH, powers

if TYPE_CHECKING:
    from probes.throughput.direct import scan as directscan
    from probes.throughput.report import ThroughputReport
    from probes.throughput.served.results import ServedScan, ServedSettings


FOLDER = Path("reports/throughput")
MODELS = ("particlenet", "mlp", "encoder", "product")
EXITS = (
    "Exit codes: 0 done, 2 usage, 3 torch or every backend is missing, 4 a way broke, "
    "5 unreadable or unwritable report, 130 interrupted (the report has what was measured)."
)
MOST_PAYLOAD_BYTES = 64 << 20
QUICK = (1.0, 4)  # seconds of a window, windows at most
FULL = (3.0, 10)
MOST_CALLERS = 512

_count_or_none = whole(0, 10**6)
_several = whole(1, 10**6)
_callers = whole(1, MOST_CALLERS)
_positive = number(lambda x: 0 < x <= 1e6, "a number above 0, at most 1000000")
_share = number(lambda x: 0 < x < 1, "a number above 0 and below 1: write 0.1 for 10 %")
_count = whole(1, 10**6)
_aim = number(lambda share: 0 <= share < 1, "a share from 0 to 1")
_seconds = number(lambda s: 0 < s <= 1e5, "a number of seconds up to 100000")


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    scan = add_verb(
        verbs,
        "throughput",
        "measure inputs per second over batch size: where it saturates, and which resource limits it",
        exits=EXITS,
    )
    _add_model_arguments(scan)
    option(scan, "--batches", "N,N", "batch sizes (default: powers of two)", _batches)
    option(scan, "--max-batch", "N", "largest power of two to try", _count, default=MOST_BATCH)
    option(scan, "--trials", "N", "trials of each batch size", _count, default=100)
    option(
        scan,
        "--aim",
        "SHARE",
        "run more trials, up to 4 to 20 times as many, until the error of the throughput is below this; "
        "0 runs no more",
        _aim,
        default=0.02,
    )
    option(
        scan,
        "--longest",
        "SECONDS",
        "stop before a batch size whose trials would take longer than this",
        _seconds,
        default=60.0,
    )
    for name, choices, what in (
        ("--device", DEVICES, "device to measure (default: the CPU, and the GPU if torch can use one)"),
        ("--backend", BACKENDS, "runtime to measure (default: both)"),
        ("--precision", MODES, "number format (default: all on a GPU, fp32 and bf16 on a CPU)"),
        ("--inputs", INPUTS, "where a GPU's inputs are (default: copied, which is part of the time)"),
    ):
        scan.add_argument(name, action="append", choices=choices, default=[], help=f"{what}; may be repeated")
    option(scan, "--threads", "N", "CPU threads (default: what the runtime chooses)", _count)
    option(scan, "--seed", "N", "seed for weights and inputs", _count, default=1)
    option(scan, "--out", "DIR", "folder for the report", Path, default=FOLDER)
    _add_served_arguments(scan)
    scan.set_defaults(do=_throughput)
    if isinstance(scan, Parser):
        scan.meant = _meant


def _meant(given: Sequence[str], unknown: Sequence[str]) -> Sequence[str]:
    """The server's URL, and a model, are options' values."""
    stray = next((word for word in unknown if not word.startswith("-")), "")
    name = "--url" if "://" in stray else "--model" if stray in MODELS or Path(stray).is_file() else ""
    return [*(word for word in given if word != stray), name, stray] if name else ()


def _add_model_arguments(scan: argparse.ArgumentParser) -> None:
    option(
        scan,
        "--model",
        "MODEL",
        f"{', '.join(MODELS)}, with random weights, or a TorchScript file",
        default="particlenet",
    )
    scan.add_argument(
        "--shape",
        action="append",
        type=_shape,
        default=[],
        metavar="NxM",
        help="shape of one input of a TorchScript file, without the batch; repeat it for each input",
    )


def _add_served_arguments(scan: argparse.ArgumentParser) -> None:
    """Add the arguments about a server."""
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
        _count_or_none,
        default=16,
    )
    served.add_argument(
        "--tensor",
        type=_served_shape,
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


def _batches(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split("x"))


def _served_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, sizes = text.rpartition(":")
    if not colon or not name:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not NAME:D1,D2")
    return name, tuple(_several(size) for size in sizes.split(",") if size)


def _throughput(args: argparse.Namespace) -> Exit:
    if args.url:
        return _served(args, args.out)
    from probes.reports.scan import scan_document
    from probes.reports.text import render_text
    from probes.throughput.direct import scan as directscan

    request = _request(args)
    listener = _progress()
    report = directscan.begin(request.settings, listener)
    try:
        report, path = directscan.direct(report, request, args.out, listener)
    except KeyboardInterrupt:
        if listener.path is None:
            raise
        error(f"interrupted; {listener.path} holds what was measured")
        return Exit.INTERRUPTED
    echo(f"\n{render_text(scan_document(report))}")
    echo(f"\nreport: {path}")
    echo(f"tables: {probe_line('show', path)}")
    return directscan.exit_code(report)


def _request(args: argparse.Namespace) -> "directscan.ScanRequest":
    from probes.throughput.direct import scan as directscan
    from probes.throughput.report import ScanSettings

    if args.model not in MODELS and not Path(args.model).is_file():
        raise UsageError(
            f"{args.model} is neither a model nor a file",
            f"choose from: {', '.join(MODELS)}, or a TorchScript file",
        )
    if (args.model not in MODELS) != bool(args.shape):
        raise UsageError(
            "--shape is for a TorchScript file, which needs one for each input",
            "for example: --model net.pt --shape 2x100 --shape 7x100",
        )
    settings = ScanSettings(
        model=args.model,
        batches=args.batches or powers(args.max_batch),
        trials=args.trials,
        inputs=tuple(args.inputs),
        backends=tuple(args.backend),
        precisions=tuple(args.precision),
        devices=tuple(args.device),
        seed=args.seed,
        threads=args.threads or 0,
        aim=args.aim,
    )
    return directscan.ScanRequest(settings, tuple(args.shape), args.longest)


def _progress() -> "directscan.Listener":
    from probes.hardware.snapshot import machine_lines
    from probes.reports.scan import ceiling_tables, rate
    from probes.reports.text import render_table
    from probes.throughput.direct import scan as directscan

    class Progress(directscan.Listener):
        """Prints what is measured, as it comes."""

        def machine(self, found: Machine) -> None:
            """The machine, one line per fact."""
            echo("\n".join(machine_lines(found)))

        def kept(self, path: Path) -> None:
            """Where the report is: a scan may be interrupted."""
            super().kept(path)
            echo(f"report: {path}, written after every row")

        def ceilings(self, found: Ceilings | Unknown) -> None:
            """Print the measured ceilings."""
            tables = [render_table(one) for one in ceiling_tables(found)]
            echo("\n\n".join(tables) or f"ceilings: {found}")

        def started(self, way: Way) -> None:
            """Print the name of the runtime that is measured."""
            echo(f"{way.label} ...")

        def row(self, row: BatchRow) -> None:
            """Print the row of a batch size."""
            echo(f"  batch {row.batch}: {rate(row)} inputs/s, {len(row.wall_s)} trials so far")

        def ended(self, series: Series) -> None:
            """Print how the runtime's scan ended."""
            echo(f"  {series.end}" + (f": {series.reason}" if series.reason not in ("", series.end) else ""))

    return Progress()


def _served(args: argparse.Namespace, folder: Path) -> Exit:
    """Measure the server of `--url`; the report goes into `folder`, or into that of `--into`."""
    from probes.reports.scan_served import level_line, served_findings
    from probes.throughput.report import named_scan, write_new_scan, write_scan
    from probes.throughput.served.plan import announcement
    from probes.throughput.served.protocol import parse_url
    from probes.throughput.served.saturation import judge
    from probes.throughput.served.scan import RequestOptions, scan

    target = parse_url(args.url, model=args.served_model or "")
    options = RequestOptions(
        tuple(args.send), args.dim, tuple(args.tensor), _payload(args.payload), args.json
    )
    report = named_scan(args.into)[0] if args.into else _new(args.seed)
    path = args.into or write_new_scan(report, folder, "served")
    settings, seen = _settings(args), 0
    shorter = None if args.quick_load else replace(settings, window_s=QUICK[0], most_windows=QUICK[1])
    echo(announcement(target.url, settings, ("--quick-load", shorter) if shorter else None))

    def keep(scanned: "ServedScan") -> None:
        nonlocal seen
        write_scan(replace(report, served=scanned), path)  # before a level is shown: what was seen is kept
        finished, seen = scanned.levels[seen:], len(scanned.levels)
        for level in finished:
            echo(level_line(level))

    try:
        scanned = scan(target, options, settings, keep)
    except KeyboardInterrupt:
        error(f"interrupted; {path} holds what was measured, levels: {seen}")
        return Exit.INTERRUPTED
    echo("")
    for sentence in served_findings(scanned)[1:]:  # the first, the answer, is the last line
        echo(f"- {sentence}")
    echo(f"report: {path}")
    echo(judge(scanned).sentence)
    return Exit.OK if scanned.complete else Exit.BROKEN


def _settings(args: argparse.Namespace) -> "ServedSettings":
    from probes.throughput.served.results import ServedSettings

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


def _payload(path: Path | None) -> bytes | None:
    if path is None:
        return None
    with reading(path, "name a file with a request's body, JSON in UTF-8: --payload FILE"):
        return files.read_text(path, most_bytes=MOST_PAYLOAD_BYTES).encode()


def _new(seed: int) -> "ThroughputReport":
    from probes.core.unknown import Unknown
    from probes.measure import this_machine
    from probes.throughput.report import ScanSettings, begun

    settings = ScanSettings("", (), 0, (), (), (), (), seed, 0)
    return begun(settings, this_machine.describe(), Unknown("only a server was asked"))
