"""What watching costs and how exact it is: processor time, intervals, a vanishing card, energy.

    make bench-watch

The watch runs as its own process, as a user starts it, over this machine's /proc and a constructed card
(amdgpu's files in a temporary folder). Its processor time is read from /proc by this program, its
intervals from the samples' file. On a GPU, tests/device/run_watch_fit.sh measures the rest.
"""

import bisect
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "tests/unit/probes"), str(ROOT / "tests/unit/probes/watch")]

from board import Board, tell  # noqa: E402
from watch_samples import amd_tree  # noqa: E402

from probes.core.unknown import Unknown  # noqa: E402
from probes.records.watch import Energy  # noqa: E402
from probes.watch.recording import named_watch  # noqa: E402
from probes.watch.totals import EnergyTotal  # noqa: E402

INTERVAL_S, LONG_S, SETTLED_S = 0.25, 24.0, 4.0
TRACES, TRACE_S, REFERENCE_HZ = 300, 60.0, 50
TICKS = os.sysconf("SC_CLK_TCK")
WATCH = """
import sys, time
from pathlib import Path
from probes.watch.watcher import WatchOptions, Watch
from probes.records.watch import write_watch
tree, folder, seconds = sys.argv[1:]
asked = WatchOptions(0.25, float(seconds), (), Path(folder, "a.jsonl"), None, None, True, False)
watch = Watch(asked, Path(tree))
Path(folder, "begun").write_text(str(time.monotonic()))
write_watch(watch.run(), Path(folder, "a.json"))
"""


@dataclass
class Run:
    """One watch of a constructed machine."""

    times_s: list[float]
    cpu_share: float
    power: list[float | None]
    energy: Energy | Unknown
    code: int


def constructed(folder: Path) -> Path:
    """A card's files beside this machine's own /proc."""
    tree = amd_tree(folder / "tree")
    shutil.rmtree(tree / "proc/77")
    for name in ("stat", "meminfo", "diskstats"):
        (tree / "proc" / name).unlink(missing_ok=True)
        (tree / "proc" / name).symlink_to(f"/proc/{name}")
    return tree


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in the kernel's ticks of 10 ms."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def watched(folder: Path, tree: Path, seconds: float, *, meanwhile: threading.Thread | None = None) -> Run:
    """Watch a tree for some seconds in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(tree), str(folder), str(seconds)],
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    time.sleep(SETTLED_S)
    before_s, before = time.monotonic(), cpu_s(process.pid)
    if meanwhile:
        meanwhile.start()
    time.sleep(seconds - SETTLED_S - 2)
    share = (cpu_s(process.pid) - before) / (time.monotonic() - before_s)
    code = process.wait()
    samples = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()[1:]]
    return Run(
        times_s=[one["at_s"] for one in samples[:-1]],
        cpu_share=share,
        power=[one["cards"][0]["look"].get("power_w") for one in samples],
        energy=named_watch(folder / "a.json")[0].cards[0].energy,
        code=code,
    )


def p99_error_s(times_s: list[float]) -> float:
    """The 99th percentile of what intervals miss, against the nearest number of whole ones."""
    errors = sorted(
        abs(b - a - max(round((b - a) / INTERVAL_S), 1) * INTERVAL_S) for a, b in itertools.pairwise(times_s)
    )
    return errors[math.ceil(0.99 * len(errors)) - 1]


class Powered(threading.Thread):
    """Writes a changing power into the tree 50 times a second and integrates what it wrote."""

    def __init__(self, tree: Path, seconds: float) -> None:
        super().__init__()
        self._file = tree / "sys/class/drm/card0/device/hwmon/hwmon2/power1_average"
        self._seconds = seconds
        self.points: list[tuple[float, float]] = []

    def run(self) -> None:
        rng = random.Random(7)
        begun, until, level = time.monotonic(), 0.0, 60.0
        with self._file.open("r+") as file:
            while (now := time.monotonic() - begun) < self._seconds:
                if now >= until:
                    until, level = now + rng.uniform(0.3, 3.0), rng.uniform(40, 300)
                file.seek(0)
                file.write(f"{round(level * 1e6):012d}")
                file.flush()
                self.points.append((time.monotonic(), level))
                time.sleep(1 / REFERENCE_HZ)


def trace_error(rng: random.Random) -> tuple[float, bool]:
    """A minute of steps as in training: relative error at 4 Hz, and whether it is within three errors."""
    period, high, low, duty = (
        rng.uniform(0.3, 5),
        rng.uniform(150, 700),
        rng.uniform(30, 140),
        rng.uniform(0.2, 0.9),
    )
    jitter, phase = rng.uniform(0.02, 0.2), rng.uniform(0, 5)
    edges, at = [], -phase
    while at < TRACE_S + period:
        edges.append(at)
        at += period * (1 + rng.uniform(-jitter, jitter))

    def power(t: float) -> float:
        begun = edges[bisect.bisect_right(edges, t) - 1]
        return high if t - begun < duty * period else low

    steps = int(TRACE_S * REFERENCE_HZ)
    reference = sum(power((step + 0.5) / REFERENCE_HZ) for step in range(steps)) / REFERENCE_HZ
    area = EnergyTotal()
    for at_sample in range(int(TRACE_S / INTERVAL_S) + 1):
        area.add(at_sample * INTERVAL_S, power(at_sample * INTERVAL_S), Unknown("no counter"))
    energy = area.energy()
    assert isinstance(energy, Energy)
    miss = abs(energy.joules - reference)
    return miss / reference, miss <= 3 * energy.error_j


def cost_and_intervals(board: Board, folder: Path) -> None:
    run = watched(folder, constructed(folder), LONG_S)
    board.bar(
        "watch: processor time at 4 Hz, of one core", run.cpu_share * 100, 1.0, "%", samples=len(run.times_s)
    )
    board.bar(
        "watch: interval error p99", p99_error_s(run.times_s) * 1e3, 10.0, "ms", samples=len(run.times_s)
    )


def vanishing(board: Board, folder: Path) -> None:
    tree = constructed(folder)
    device = tree / "sys/class/drm/card0/device"

    def take_and_give_back() -> None:
        device.rename(folder / "away")
        time.sleep(2)
        (folder / "away").rename(device)

    run = watched(folder, tree, SETTLED_S + 6, meanwhile=threading.Thread(target=take_and_give_back))
    known = [power is not None for power in run.power]
    gone = known.count(False)
    right = run.code == 0 and 6 <= gone <= 10 and known[0] and known[-1]
    expected = round((SETTLED_S + 6) / INTERVAL_S)
    board.bar(
        "a card that vanishes: watches ended or wrong by it", int(not right), 0, "watches", unknown=gone
    )
    board.bar("a card that vanishes: samples lost", max(expected - len(run.power), 0), 2, "samples")


def energy(board: Board, folder: Path) -> None:
    tree = constructed(folder)
    seconds = 30.0
    powered = Powered(tree, seconds)
    powered.start()
    process = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(tree), str(folder), str(seconds - 4)],
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    process.wait()
    report = named_watch(folder / "a.json")[0]
    powered.join()
    found = report.cards[0].energy
    assert isinstance(found, Energy)
    begun = float((folder / "begun").read_text())
    inner = [point for point in powered.points if begun <= point[0] <= begun + found.covers_s]
    area = sum((b[0] - a[0]) * a[1] for a, b in itertools.pairwise(inner))
    reference = area * found.covers_s / (inner[-1][0] - inner[0][0])
    miss = abs(found.joules / reference - 1)
    board.bar("energy: half a minute of random steps, live, against 50 Hz", miss * 100, 3.0, "%")
    rng = random.Random(11)
    misses = [trace_error(rng) for _ in range(TRACES)]
    ordered = sorted(miss for miss, _ in misses)
    p95 = ordered[math.ceil(0.95 * TRACES) - 1]
    board.bar(
        "energy: a minute of training steps, p95 against 50 Hz",
        p95 * 100,
        3.0,
        "%",
        traces=TRACES,
        worst=ordered[-1],
    )
    outside = sum(not within for _, within in misses)
    board.bar("energy: traces outside three of the stated errors", outside, TRACES // 100, "traces")


def main() -> int:
    """Run every part."""
    board = Board()
    for part in (cost_and_intervals, vanishing, energy):
        with tempfile.TemporaryDirectory(prefix="weir-bench-watch-") as folder:
            tell(part.__name__)
            part(board, Path(folder))
    why = "no NVIDIA card here; tests/device/run_watch_fit.sh measures it on one"
    for bar in (
        "NVML figures against nvidia-smi",
        "energy against 50 Hz on a card",
        "saturation of known loads",
    ):
        board.waive(bar, why)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
