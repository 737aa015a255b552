"""The verb `throughput`: how many inputs a second, over batch size, and what limits it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from probes.arguments import Verbs, add_verb, number, whole
from probes.errors import Exit, UsageError
from probes.records.schema import Machine
from probes.serving import add_served_arguments, served
from probes.shared.invocation import probe_line
from probes.shared.output import complain, option, tell
from probes.shared.unknown import Unknown
from probes.throughput.ceilings.ceiling import Ceilings
from probes.throughput.direct.combinations import BACKENDS, DEVICES, INPUTS, MODES, MOST_BATCH, powers
from probes.throughput.direct.scanned import BatchRow, Series, Way

if TYPE_CHECKING:
    from probes.throughput import directscan

FOLDER = Path("reports/throughput")
MODELS = ("particlenet", "mlp", "encoder", "product")
EXITS = (
    "Exit codes: 0 done, 2 usage, 3 torch or every backend is missing, 4 a way broke, "
    "5 unreadable or unwritable report, 130 interrupted (the report has what was measured)."
)

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
    add_served_arguments(scan)
    scan.set_defaults(do=_throughput)


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


def _batches(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split("x"))


def _throughput(args: argparse.Namespace) -> Exit:
    if args.url:
        return served(args, args.out)
    from probes.throughput import directscan
    from probes.throughput.showing.scantext import render_scan

    asked = _asked(args)
    listener = _progress()
    report = directscan.begin(asked.settings, listener)
    try:
        report, path = directscan.direct(report, asked, args.out, listener)
    except KeyboardInterrupt:
        if listener.path is None:
            raise
        complain(f"interrupted; {listener.path} holds what was measured")
        return Exit.INTERRUPTED
    tell(f"\n{render_scan(report)}")
    tell(f"\nreport: {path}")
    tell(f"tables: {probe_line('show', path)}")
    return directscan.exit_code(report)


def _asked(args: argparse.Namespace) -> "directscan.Asked":
    from probes.throughput import directscan
    from probes.throughput.document import ScanSettings

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
    return directscan.Asked(settings, tuple(args.shape), args.longest)


def _progress() -> "directscan.Listener":
    from probes.machine.describe import machine_lines
    from probes.report.render import drawn_table
    from probes.throughput import directscan
    from probes.throughput.showing.directtables import ceiling_tables, rate

    class Progress(directscan.Listener):
        """Prints what is measured, as it comes."""

        def machine(self, found: Machine) -> None:
            """The machine, one line per fact."""
            tell("\n".join(machine_lines(found)))

        def kept(self, path: Path) -> None:
            """Where the report is: a scan may be interrupted."""
            super().kept(path)
            tell(f"report: {path}, written after every row")

        def ceilings(self, found: Ceilings | Unknown) -> None:
            """The ceilings."""
            tables = [drawn_table(one, markdown=False) for one in ceiling_tables(found)]
            tell("\n\n".join(tables) or f"ceilings: {found}")

        def started(self, way: Way) -> None:
            """The way's name."""
            tell(f"{way.label} ...")

        def row(self, row: BatchRow) -> None:
            """A batch size."""
            tell(f"  batch {row.batch}: {rate(row)} inputs/s, {len(row.wall_s)} trials so far")

        def ended(self, series: Series) -> None:
            """How it ended."""
            tell(f"  {series.end}" + (f": {series.reason}" if series.reason not in ("", series.end) else ""))

    return Progress()
