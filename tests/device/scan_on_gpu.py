"""The saturation bars on a GPU: loads whose share of a ceiling is known are scanned as models are.

A full-size matrix product, a kernel that only waits, and copies over the link. The ceilings are measured in
the same process. Prints a JSON line a bar; run by tests/device/run_scan.sh.
"""

import argparse
import sys
from pathlib import Path

import torch
from board import Board, tell

from probes.core.unknown import Unknown
from probes.hardware import snapshot
from probes.hardware.energy import AmdGauges, NvidiaGauges
from probes.hardware.torch_build import describe
from probes.measure.device import TorchWorkbench
from probes.records.stats import median
from probes.throughput import measure_ceilings
from probes.throughput.ceilings import Ceiling, Ceilings
from probes.throughput.direct.knee import Saturation, saturation
from probes.throughput.direct.models import SPECS, Spec
from probes.throughput.direct.results import BatchRow, Inputs, Mode, Way
from probes.throughput.direct.torch_runner import TorchRunner
from probes.throughput.direct.trials import Repeats, SeriesEnd, rows

TRIALS, LONGEST_S = 100, 20.0
SPIN_S = 5e-3
COPIED_WORDS, COPIES = 2**22, 16  # 256 MiB of float32 in each trial


class Spin(torch.nn.Module):
    """A kernel that waits: a driver's utilisation says 100 %."""

    def __init__(self, ticks: int) -> None:
        super().__init__()
        self.ticks = ticks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cuda":
            torch.cuda._sleep(self.ticks)
        return x


class Bars:
    """Scans a load and says what share of which ceiling it reached."""

    def __init__(self, board: Board) -> None:
        self.board, self.bench = board, TorchWorkbench(has_gpu=True)
        facts = describe()
        pci_id = snapshot.pci_id_of_first_gpu(facts, snapshot.read_cards(Path("/")), Path("/"))
        self.gauges = AmdGauges(Path("/"), pci_id) if facts.api == "hip" else NvidiaGauges(pci_id)
        self.ceilings: Ceilings = measure_ceilings.measure(self.bench, ["gpu"])
        (self.gpu,) = self.ceilings.devices
        board.figure("card", self.gpu.name, "")

    def show_ceilings(self) -> None:
        named = [(f"{one.precision} products", one.rate) for one in self.gpu.flop]
        named += [("memory", self.gpu.memory), ("link to", self.gpu.to_device)]
        named += [("link from", self.gpu.from_device), ("launches", self.gpu.launches)]
        for name, found in named:
            if isinstance(found, Ceiling):
                more = {"error": found.error, "n": found.n, "of": found.of}
                self.board.figure(f"ceiling: {name}", found.median, "1/s", **more)
            else:
                self.board.waive(f"ceiling: {name}", found.reason)

    def scan(self, spec: Spec, batch: int, precision: Mode, inputs: Inputs) -> tuple[BatchRow, Saturation]:
        way = Way("gpu", "pytorch", precision, inputs)
        runner = TorchRunner(spec, way, seed=1, bench=self.bench)
        *rows_so_far, end = rows(runner, [batch], Repeats(TRIALS, LONGEST_S), self.gauges)
        row = rows_so_far[-1]
        assert isinstance(row, BatchRow), row
        assert isinstance(end, SeriesEnd)
        return row, saturation(row, way, self.ceilings)

    def products(self) -> None:
        for precision in ("fp32", "tf32", "fp16", "bf16"):
            if isinstance(self.gpu.flops(precision), Unknown):
                self.board.waive(f"full-size product, {precision}: share of compute", "no ceiling")
                continue
            row, found = self.scan(SPECS["product"], 8192, precision, "resident")
            self.board.bar(
                f"full-size product, {precision}: share of compute",
                found.compute,
                0.9,
                "of the ceiling",
                at_least=True,
                binds=found.binds,
                busy_percent=shown(row.busy_percent),
                device_over_wall=row.pass_s / median(row.wall_s),
            )

    def spinning(self) -> None:
        spec = Spec("spin", ((256,),), lambda: Spin(int(SPIN_S * self.bench.ticks_per_s)))
        row, found = self.scan(spec, 1, "fp32", "resident")
        largest = max(found.compute, found.memory, found.link)
        more = {"binds": found.binds, "busy_percent": shown(row.busy_percent), "host": found.host}
        self.board.bar(
            "a spinning kernel, whose work is counted as 0: largest share",
            largest,
            0.05,
            "of a ceiling",
            **more,
        )

    def copying(self) -> None:
        spec = Spec("copy", ((COPIED_WORDS,),), torch.nn.Identity)
        row, found = self.scan(spec, COPIES, "fp32", "pinned")
        more = {"binds": found.binds, "busy_percent": shown(row.busy_percent)}
        self.board.bar(
            "a copy loop: share of the link", found.link, 0.9, "of the ceiling", at_least=True, **more
        )


def shown(value: float | Unknown) -> float | str:
    return value.reason if isinstance(value, Unknown) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    board = Board("scan-gpu", command="tests/device/run_scan.sh", results=args.out)
    bars = Bars(board)
    for part in (bars.show_ceilings, bars.products, bars.spinning, bars.copying):
        tell(part.__name__)
        part()
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
