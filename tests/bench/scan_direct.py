"""The direct half of a throughput scan: against a bare loop, its errors, knees that were planted."""

import math
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from board import Board, tell

sys.path.append(str(Path(__file__).parents[1] / "unit" / "probes" / "throughput"))

from scan_fakes import FakeDevice

from buildtool.core.files import write_text
from probes.core.unknown import Unknown
from probes.measure import supervisor
from probes.measure.device import TorchWorkbench
from probes.records.stats import error_of_median, median
from probes.reports.scan import scan_findings
from probes.throughput import measure_ceilings
from probes.throughput.ceilings import Ceilings
from probes.throughput.direct import worker
from probes.throughput.direct.knee import Growing, Knee, Point, find, saturation
from probes.throughput.direct.models import SPECS
from probes.throughput.direct.results import BatchRow, Throughput, Way, latest, throughput
from probes.throughput.direct.scan import powers
from probes.throughput.direct.torch_runner import TorchRunner, settle_allocator
from probes.throughput.direct.trials import Repeats, SeriesEnd, rows
from probes.throughput.report import named_scan

ROOT = Path(__file__).parents[2]
CPU = Way("cpu", "pytorch", "fp32", "resident")
TRIALS = 100
PAIRS, LEAST, MOST = 100, 400, 2000  # with a bare loop: in the same memory, at least, at most
ENOUGH = 0.004  # the error to come to
AIM, LONGEST_S = 0.02, 60.0  # as without options
LOOPS = (("particlenet", 1), ("particlenet", 2), ("mlp", 1), ("mlp", 16))
SCANS = (
    ("particlenet", CPU, powers(4)),
    ("particlenet", replace(CPU, backend="onnxruntime"), powers(4)),
    ("mlp", CPU, powers(16)),
    ("mlp", replace(CPU, precision="bf16"), powers(16)),
)
PLANTED = 50
WHY = "needs a GPU: tests/device/run_scan.sh"
ON_A_GPU = (
    "full-size product: share of compute",
    "a spinning kernel: largest share",
    "a copy loop: share of the link",
)


class Between:
    """A way whose every trial has one of a bare loop beside it, before or after it by turns (A B B A).

    Both meet the machine's slow spells alike, and neither always finds the caches as the other left them.
    """

    def __init__(self, runner: TorchRunner, bare: "BareLoop") -> None:
        self._runner, self._bare = runner, bare
        self._pairs: list[tuple[float, float]] = []  # seconds of the way's trial, of the bare loop's

    @contextmanager
    def at(self, batch: int) -> Iterator["Between"]:
        """As the way's own."""
        with self._runner.at(batch) as self._prepared:
            yield self

    def fresh(self) -> None:
        """Nothing yet: both draw their inputs right before their passes."""

    def trial_s(self) -> float:
        """Seconds of the way's trial, which is what the scan records."""
        first = self._bare.trial_s() if len(self._pairs) % 2 else None
        self._prepared.fresh()
        ours = self._prepared.trial_s()
        self._pairs.append((ours, self._bare.trial_s() if first is None else first))
        return ours

    def ratios(self, recorded: Sequence[float]) -> list[float]:
        """Logarithms of the way's seconds over the bare loop's, for the trials that the scan recorded."""
        pairs = iter(self._pairs)
        return [
            next(math.log(ours / bare) for ours, bare in pairs if ours == seconds) for seconds in recorded
        ]

    def __getattr__(self, name: str) -> object:
        return getattr(self._prepared, name)


class BareLoop:
    """Trials as one would write them by hand, by code that knows nothing of ours.

    The weights are the scan's: a copy of them lies in other pages, which alone makes it faster or slower by
    one percent or more for the process's life.
    """

    def __init__(self, module: torch.nn.Module, shapes: tuple[tuple[int, ...], ...], batch: int) -> None:
        self._module = module
        self._inputs = [torch.empty(batch, *shape) for shape in shapes]

    def trial_s(self) -> float:
        """Fresh inputs, then the seconds of the pass between two readings of the clock."""
        with torch.inference_mode():
            for one in self._inputs:
                one.normal_()
            began = perf_counter()
            self._module(*self._inputs)
            return perf_counter() - began


def against_a_bare_loop(board: Board) -> None:
    """The scan's seconds over those of a bare loop, pair by pair in one process: the median pair's.

    Whether it is within the bar can only be said where the median's own error is well below it, so that
    there are more pairs until it is, and a bar on the error.
    """
    settle_allocator()
    bench, errors = TorchWorkbench(has_gpu=False), []
    for name, batch in LOOPS:
        spec = SPECS[name]
        runner = TorchRunner(spec, CPU, seed=1, bench=bench)
        ratios: list[float] = []
        while len(ratios) < LEAST or (len(ratios) < MOST and (error_of_median(ratios) or math.inf) > ENOUGH):
            between = Between(runner, BareLoop(runner.module, spec.inputs, batch))
            (row,) = measured(rows(between, [batch], Repeats(PAIRS, 1e9), FakeDevice()))
            ratios += between.ratios(row.wall_s)
        errors.append(error_of_median(ratios) or math.inf)
        ratio = math.exp(median(ratios))
        more = {"ratio": ratio, "error": errors[-1], "pairs": len(ratios), "ms": 1e3 * median(row.wall_s)}
        board.bar(
            f"direct scan over a bare loop, {name}, batch {batch}", abs(ratio - 1), 0.02, "away", **more
        )
    board.bar("standard error of these comparisons, the largest", max(errors), 0.005, "")


def errors(board: Board) -> None:
    """How many rows of real scans on this CPU have an error of at most 2 %; a missing row has none."""
    found: list[tuple[str, Throughput]] = []
    for model, way, batches in SCANS:
        tell(f"{model}, {way.label}")
        ended = supervisor.run_job(
            job(model, way, batches),
            worker.parse,
            limit_s=LONGEST_S * len(batches),
            on_record=lambda _: None,
            command=supervisor.module_command(worker.__name__),
        )
        name = f"{model} {way.backend} {way.precision}"
        found += [(f"{name} {row.batch}", throughput(row)) for row in measured(ended.records)]
        end = ended.records[-1] if ended.records else ended.outcome
        if end != SeriesEnd("finished"):
            tell(f"it ended so: {end}")
    wanted = sum(len(batches) for *_, batches in SCANS)
    shares = sorted(one.share for _, one in found if one.share is not None)
    good = sum(share <= AIM for share in shares)
    board.bar(
        "rows with a standard error of at most 2 %", good / wanted, 0.9, "of rows", at_least=True,
        rows=wanted, median=shares[len(shares) // 2], largest=shares[-1],
        each=[[name, one.n, round(one.share or 0, 4), round(one.lag1 or 0, 2)] for name, one in found],
    )  # fmt: skip


def this_cpu(board: Board) -> None:
    """A scan as a user types it; where the whole bench runs its report and page are kept with the results."""
    words = "throughput --device cpu --precision fp32 --max-batch 16 --out"
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "probes", *words.split(), folder], cwd=ROOT, stdout=sys.stderr, check=False
        )
        files = list(Path(folder).glob("*.json"))
        board.bar("exit code of a scan of this CPU in both backends", done.returncode, 0, "")
        if len(files) == 1:
            report, text = named_scan(files[0])
            board.figure("the answer of a scan of this CPU", scan_findings(report)[0], "")
            if board.whole and done.returncode == 0:
                kept = board.results / "scan-cpu.json"
                write_text(kept, text)
                # pages need matplotlib, which the environment with torch lacks
                page = [ROOT / ".venv/bin/python", "-m", "probes", "html", kept]
                subprocess.run(page, cwd=ROOT, check=True)


def job(model: str, way: Way, batches: tuple[int, ...]) -> worker.ScanJob:
    """A worker's job on the CPU."""
    return worker.ScanJob(
        way=way,
        devices=("cpu",),
        model=model,
        shapes=(),
        batches=batches,
        trials=TRIALS,
        longest_s=LONGEST_S,
        aim=AIM,
        seed=1,
        threads=0,
        pci_id=Unknown("no GPU"),
        amd=False,
        cpu_name="CPU",
    )


def knees(board: Board) -> None:
    """Knees planted in a device with a simulated clock, whose trials are noisy and correlate."""
    steps, missed = [], []
    for seed in range(PLANTED):
        true = 2 ** random.Random(seed).uniform(1.0, 9.5)
        device = FakeDevice(knee=true, pass_s=1e-3, noise=0.03, correlated=0.4, seed=seed)
        found = find(
            [point(row) for row in measured(rows(device, powers(2048), Repeats(TRIALS, 1e9), device))]
        )
        away = abs(math.log2(found.batch / true)) if isinstance(found, Knee) else math.inf
        steps.append(away)
        if away > 1:
            missed.append([seed, true, str(found)])
    name = f"planted knees found within one step, of {PLANTED}"
    within = sum(away <= 1 for away in steps)
    board.bar(name, within, PLANTED, "knees", at_least=True, worst=max(steps), missed=missed)
    growing = sum(still_grows(seed) for seed in range(PLANTED))
    board.bar(f"devices without a knee called unsaturated, of {PLANTED}", growing, PLANTED, "", at_least=True)


def still_grows(seed: int) -> bool:
    """Whether a device that never saturates is called so."""
    device = FakeDevice(knee=1e9, pass_s=1e-3, noise=0.03, correlated=0.4, seed=seed)
    found = measured(rows(device, powers(2048), Repeats(TRIALS, 1e9), device))
    return isinstance(find([point(row) for row in found]), Growing)


def measured(found: Iterable[object]) -> tuple[BatchRow, ...]:
    """The rows with all of their trials, without the way's end."""
    return latest(one for one in found if isinstance(one, BatchRow))


def point(row: BatchRow) -> Point:
    """A row as the knee's search takes it."""
    found = throughput(row)
    return Point(row.batch, found.mean, found.error or 0.0)


def saturated(board: Board) -> None:
    """What needs a GPU is waived; a full-size product on this CPU is shown without a bar."""
    for name in ON_A_GPU:
        board.waive(name, WHY)
    bench = TorchWorkbench(has_gpu=False)
    ceilings: Ceilings = measure_ceilings.measure(bench, ["cpu"])
    runner = TorchRunner(SPECS["mlp"], CPU, seed=1, bench=bench)
    (row,) = measured(rows(runner, [256], Repeats(20, 1e9), FakeDevice()))
    found = saturation(row, CPU, ceilings)
    if not isinstance(found.compute, Unknown):
        board.figure("products of 256 x 2048 x 2048 on this CPU: share of compute", found.compute, "")
