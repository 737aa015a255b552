"""The verb `run`: runs the probes and prints progress, the answer, and where the report is."""

import argparse
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from probes.cli.arguments import EXITS, Verbs, add_verb, number, seed, size
from probes.core.errors import Exit, UsageError
from probes.core.invocation import probe_line
from probes.core.output import echo, error, flag, option
from probes.core.quoting import command
from probes.hardware.snapshot import machine_lines
from probes.measure import catalog, session
from probes.measure.probe_worker import ProbeMessage, SideMessage
from probes.measure.schedule import BEGINNING, PlannedCase, progress, sentence
from probes.measure.stacks import DTYPES, MODELS
from probes.records.facts import Machine
from probes.records.rows import Case
from probes.records.schema import ProbeReport, ProbeRun, Settings
from probes.reports.run import ended_line, record_line
from probes.reports.run_headline import headline

REPORTS = Path("reports/probes")
PRINT_EVERY_S = 5.0  # the remaining time of a run


class ProgressPrinter(session.Listener):
    """Prints a run's progress in plain lines, and at intervals the remaining time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._plan: tuple[PlannedCase, ...] = ()
        self._done: set[tuple[str, int, str]] = set()
        self._ended: set[tuple[str, int]] = set()
        self._probe, self._round = "", 0
        self.path: Path | None = None  # of the report, once there is one
        self._began_s = self._planned_s = self._printed_s = now()

    def planned(self, plan: tuple[PlannedCase, ...]) -> None:
        """How long the run takes, by the plan."""
        self._plan = plan
        self._planned_s = self._now()
        self._print_left()

    def _print_left(self) -> None:
        self._printed_s = self._now()
        if self._plan:
            at = progress(self._plan, self._done, self._ended, elapsed_s=self._printed_s - self._planned_s)
            echo(f"-- {sentence(at, so_far_s=self._printed_s - self._began_s)}")

    def machine(self, machine: Machine) -> None:
        """The machine, one line per fact."""
        for text in machine_lines(machine):
            echo(text)

    def unfinished(self, report: Path) -> None:
        """How to resume an earlier run."""
        echo(f"an earlier run was cut short; to resume it: {probe_line('run', '--resume', report)}")

    def kept(self, path: Path) -> None:
        """Where the report is: a run may be interrupted."""
        self.path = path

    def started(self, probe: catalog.Probe, turn: int) -> None:
        """The probe's name, before it can hang."""
        self._probe, self._round = probe.name, turn
        again = f"round {turn + 1}, in a fresh process" if turn else probe.summary
        echo(f"{probe.name}: {again}")

    def record(self, record: ProbeMessage) -> None:
        """A line for each record that has one."""
        text = "" if isinstance(record, SideMessage) else record_line(record)
        if text:
            echo(f"  {text}")
        self._done.add((self._probe, self._round, BEGINNING))
        if isinstance(record, Case):
            self._done.add((self._probe, self._round, record.case))
        if self._now() - self._printed_s >= PRINT_EVERY_S:
            self._print_left()

    def ended(self, run: ProbeRun) -> None:
        """Print how the probe ended."""
        self._ended.add((run.probe, run.round))
        echo(f"{run.probe}: {ended_line(run)}")


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    run = add_verb(verbs, "run", "measure: run all probes, or those named", exits=EXITS)
    run.add_argument(
        "names", nargs="*", metavar="NAME", help="probe to run (default: all; `list` shows them)"
    )
    flag(run, "--quick", "take fewer samples and sizes, which takes about a minute")
    option(run, "--out", "DIR", "folder for the report", Path, default=REPORTS)
    option(
        run,
        "--vram",
        "SIZE",
        "VRAM that the probes may use, e.g. 4GiB, as if the card had no more (default: all)",
        size,
    )
    run.add_argument(
        "--model",
        action="append",
        choices=MODELS,
        help="model for `scenarios`; may be repeated (default: mlp with --quick, else several)",
    )
    run.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="number format for `scenarios`; may be repeated (default: float16)",
    )
    run.add_argument(
        "--numa",
        choices=("as_found", "gpu"),
        default="as_found",
        help="gpu: use only processors and host memory of the GPU's NUMA node (default: %(default)s)",
    )
    run.add_argument("--require", choices=("gpu",), help="exit with 1 if there is no usable GPU")
    option(run, "--resume", "FILE", "resume a run that was cut short", Path)
    option(
        run,
        "--against",
        "PYTHON",
        "measure another Python's torch as well, in turns with this one's: two reports for compare, which "
        "then finds smaller differences (default: this Python alone)",
        Path,
    )
    option(
        run,
        "--longest",
        "SECONDS",
        "measure rows that scatter again in further processes, as long as the run takes less than this "
        "(default: 42 with --quick, else 540)",
        number(lambda s: 0 <= s <= 1e5, "a number of seconds up to 100000"),
    )
    option(
        run,
        "--seed",
        "N",
        "seed for buffer contents and the order of cases, below 2^63 (default: random, and recorded)",
        seed,
    )
    run.set_defaults(do=_run)


def _run(args: argparse.Namespace) -> Exit:
    listener = ProgressPrinter()
    if args.against and not args.resume:
        try:
            return _run_in_turns(args, listener)
        except KeyboardInterrupt:
            if listener.path is None:
                raise
            error(f"interrupted; the two reports in {listener.path.parent} hold the pairs that were measured")
            return Exit.INTERRUPTED
    try:
        report, path = _resumed(args, listener) if args.resume else _measured(args, listener)
    except KeyboardInterrupt:
        if listener.path is None:
            raise
        go_on = probe_line("run", "--resume", listener.path)
        error(f"interrupted; what was measured is kept, to go on: {go_on}")
        return Exit.INTERRUPTED
    return _print_answer(args, report, path)


def _measured(args: argparse.Namespace, listener: session.Listener) -> tuple[ProbeReport, Path]:
    probes = catalog.select(tuple(args.names))
    return session.measure(
        probes, _settings(args), folder=args.out, listener=listener, longest_s=args.longest
    )


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        quick=args.quick,
        seed=secrets.randbelow(2**31) if args.seed is None else args.seed,
        vram_cap_bytes=args.vram,
        models=tuple(args.model or ()),
        dtypes=tuple(args.dtype or ()),
        numa=args.numa,
    )


def _run_in_turns(args: argparse.Namespace, listener: session.Listener) -> Exit:
    """Measure with this Python and with --against's; both reports, and what compares them."""
    if shutil.which(args.against) is None:
        raise UsageError(
            f"there is no Python to run: {args.against}", "name one: --against /path/to/bin/python3"
        )
    probes = catalog.select(tuple(args.names))
    (a, path_a), (b, path_b) = session.measure_in_turns(
        probes, _settings(args), args.against, folder=args.out, listener=listener, longest_s=args.longest
    )
    echo(f"\nthis Python's report: {path_a}\nthe other's: {path_b}")
    echo(f"how they differ: {probe_line('compare', path_a, path_b)}")
    needs_gpu = args.require == "gpu"
    return max(session.exit_code(a, require_gpu=needs_gpu), session.exit_code(b, require_gpu=needs_gpu))


def _resumed(args: argparse.Namespace, listener: session.Listener) -> tuple[ProbeReport, Path]:
    given = (args.names, args.quick, args.vram, args.model, args.dtype, args.seed is not None, args.against)
    if any(given) or args.numa != "as_found" or args.out != REPORTS:
        raise UsageError("--resume uses the run's own settings", "give it alone: run --resume FILE")
    return session.resume(args.resume, listener=listener)


def _print_answer(args: argparse.Namespace, report: ProbeReport, path: Path) -> Exit:
    echo("\nThe answer")
    for text in headline(report):
        echo(f"- {text}")
    echo(f"\nreport: {path}")
    echo(f"tables: {probe_line('show', path)}")
    echo(_page_line(path, in_container=report.machine.container is True))
    return session.exit_code(report, require_gpu=args.require == "gpu")


def _page_line(path: Path, *, in_container: bool) -> str:
    """How to make the page, on the host: which of its folders is this container's, only the user knows."""
    if in_container:
        words = command("weir", "probe", "html", path.name)
        return f"page with plots, on the host, in the folder that is {path.parent.absolute()} here: {words}"
    return f"page with plots, on the host: {command('weir', 'probe', 'html', str(path))}"
