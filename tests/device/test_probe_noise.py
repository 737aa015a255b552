"""A hog beside the measurement, of each kind, and none: what the watch flags."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from device_bars import Bar

torch = pytest.importorskip("torch")

from probes.core.unknown import Unknown  # noqa: E402
from probes.hardware.torch_build import describe  # noqa: E402
from probes.measure.background_load import BackgroundLoad  # noqa: E402
from probes.measure.device import TorchWorkbench  # noqa: E402
from probes.measure.probe_worker import with_noise  # noqa: E402
from probes.measure.sampling import Effort, sample  # noqa: E402
from probes.measure.workbench import Pattern  # noqa: E402
from probes.records.rows import Measurement, Noise  # noqa: E402

pytestmark = pytest.mark.usefixtures("gpu")
MIB = 2**20
ROWS = 50
EFFORT = Effort(samples=10, at_least=5, budget_s=0.02)


@contextmanager
def hog(kind: str) -> Iterator[None]:
    args = [sys.executable, str(Path(__file__).with_name("hog.py")), kind]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def rows(bench: TorchWorkbench) -> Iterator[Measurement]:
    with bench.memory("vram", 16 * MIB) as memory, bench.memory("vram", 8) as sums:
        span = memory.span(0, 16 * MIB)
        bench.fill(span, Pattern(1))
        read = bench.operation("read", sums.span(0, 8), span)
        for _ in range(ROWS):
            found = sample(bench, [read], effort=EFFORT, queued=True)
            yield Measurement("vram_read", 1, 1, found.batch, "device", found.device_s, found.wall_s)


def flagged(watch: BackgroundLoad, bench: TorchWorkbench) -> int:
    noises = [row.noise for row in with_noise(rows(bench), watch) if isinstance(row, Measurement)]
    known = [noise for noise in noises if isinstance(noise, Noise)]
    return sum(any(flag.startswith("foreign") for flag in noise.flags) for noise in known)


def test_a_hog_is_flagged_and_its_absence_is_not(bar: Bar) -> None:
    bench = TorchWorkbench(has_gpu=True)
    watch = BackgroundLoad(bench, Path("/"), describe().gpus[0].pci_id)
    hold_bars(bar, watch, bench, how="")
    watch._card = Unknown("taken away by the test")
    hold_bars(bar, watch, bench, how=", by timing alone")


def hold_bars(bar: Bar, watch: BackgroundLoad, bench: TorchWorkbench, *, how: str) -> None:
    bar(f"rows flagged with no hog{how}", flagged(watch, bench), limit=1, unit="rows", rows=ROWS)
    for kind in ("copy", "vram", "compute"):
        with hog(kind):
            found = flagged(watch, bench)
            bar(
                f"rows flagged beside a {kind} hog{how}",
                found,
                limit=49,
                unit="rows",
                at_least=True,
                rows=ROWS,
            )
        time.sleep(1)
