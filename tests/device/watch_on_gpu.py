"""The watch on a real NVIDIA card: its figures against nvidia-smi's, energy, cost, saturation of known loads.

Run by run_watch_fit.sh from the repository's root. Prints a JSON line for each bar and figure, and
writes them with every report into OUT.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from board import Board

HERE = Path(__file__).parent
OUT = Path(os.environ.get("OUT", "reports/probes"))
TICKS = os.sysconf("SC_CLK_TCK")
EACH_S, ENERGY_S = float(os.environ.get("EACH_S", "7")), float(os.environ.get("ENERGY_S", "20"))
KINDS = os.environ.get("KINDS", "product spin copy upload download").split()
PARTS = os.environ.get("PARTS", "costs against_smi energy_and_cost saturation allocator").split()
EDGE_S = 1.0  # of a load, at both ends, that isn't judged
# gauge -> nvidia-smi's name, the factor to its unit, its resolution in that unit
SMI = {
    "vram_bytes": ("memory.used", 2**-20, 1.0),
    "edge_celsius": ("temperature.gpu", 1.0, 1.0),
    "memory_celsius": ("temperature.memory", 1.0, 1.0),
    "core_mhz": ("clocks.sm", 1.0, 1.0),
    "memory_mhz": ("clocks.mem", 1.0, 1.0),
    "power_w": ("power.draw.instant", 1.0, 0.01),
    "busy_percent": ("utilization.gpu", 1.0, 1.0),
    "memory_busy_percent": ("utilization.memory", 1.0, 1.0),
}
BOARD = Board("watch-gpu", command="tests/device/run_watch_fit.sh", results=OUT)


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def watch(kind: str, seconds: float, *, name: str = "", hook: bool = False) -> dict[str, Any]:
    """Watch a load; its report, its samples, what the load said, and the watch's processor time."""
    stem = OUT / f"watch-{name or kind}"
    words = ["--report", f"{stem}.json", "--jsonl", f"{stem}.jsonl", *(["--torch-allocator"] if hook else [])]
    load = [sys.executable, str(HERE / "watch_loads.py"), kind, str(seconds)]
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "probes", "watch", *words, "--", *load],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    before_s, before = time.monotonic(), cpu_s(process.pid)
    time.sleep(max(seconds - 2, 1))
    share = (cpu_s(process.pid) - before) / (time.monotonic() - before_s)
    out, err = process.communicate(timeout=120)
    lines = [json.loads(line) for line in Path(f"{stem}.jsonl").read_text().splitlines()[1:]]
    said = json.loads(out.strip().splitlines()[-1]) if out.strip() else {}
    return {
        "report": json.loads(Path(f"{stem}.json").read_text()),
        "samples": lines,
        "load": said,
        "cpu": share,
        "begun": begun,
        "err": err[-1500:],
        "code": process.returncode,
    }


def means(found: Mapping[str, Any]) -> dict[str, float]:
    """Each gauge's mean over the middle of the load, by the samples that had it."""
    end = found["samples"][-1]["at_s"] - EDGE_S  # the interpreter takes about as long to exit
    seconds = found["load"]["ended_s"] - found["load"]["begun_s"]
    middle = [s for s in found["samples"] if end - seconds + EDGE_S <= s["at_s"] <= end]
    gauges: dict[str, list[float]] = {}
    for one in middle:
        for name, value in one["cards"][0]["look"].items():
            gauges.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in gauges.items()}


def smi() -> dict[str, float | None]:
    names = [name for name, _, _ in SMI.values()]
    text = subprocess.run(
        ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    cells = [cell.strip() for cell in text.splitlines()[0].split(",")]
    return {g: float(c) if c.replace(".", "").isdigit() else None for g, c in zip(SMI, cells, strict=True)}


def against_smi() -> None:
    """nvidia-smi's figure must be among our readings at that time, give or take its resolution."""
    from probes.hardware.nvml import Nvml, open_nvml
    from probes.watch.gpu_readers import NvidiaReader

    nvml = open_nvml()
    assert isinstance(nvml, Nvml)
    reader = NvidiaReader(Path("/"), nvml, nvml.cards()[0])
    for state in ("idle", "under a matrix product"):
        load = None
        if state != "idle":
            load = subprocess.Popen(
                [sys.executable, str(HERE / "watch_loads.py"), "product", "14"], stdout=-3
            )
            time.sleep(7)
        wrong: dict[str, list[object]] = {}
        compared = 0
        for turn in range(6):
            seen = [reader.sample(time.monotonic()).look.values]
            stop = threading.Event()

            def look(seen: list[Any] = seen, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    seen.append(reader.sample(time.monotonic()).look.values)
                    time.sleep(0.005)

            thread = threading.Thread(target=look)
            thread.start()
            theirs = smi()
            stop.set()
            thread.join()
            for gauge, (_, factor, resolution) in SMI.items():
                ours = [one[gauge] * factor for one in seen if gauge in one]
                their = theirs[gauge]
                if their is None and not ours:
                    continue
                compared += 1
                if their is None or not ours or not min(ours) - resolution <= their <= max(ours) + resolution:
                    wrong.setdefault(gauge, []).append(
                        [turn, their, min(ours, default=None), max(ours, default=None)]
                    )
        misses = sum(map(len, wrong.values()))
        BOARD.bar(
            f"NVML figures unequal to nvidia-smi's, {state}",
            misses,
            0,
            "figures",
            compared=compared,
            wrong=wrong,
        )
        if load:
            load.wait()


class Reference(threading.Thread):
    """Power 50 times a second, by a reader of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.points: list[tuple[float, float]] = []
        self.on = True

    def run(self) -> None:
        from probes.hardware import nvml as nvmlcard
        from probes.hardware.nvml import Nvml, open_nvml

        nvml = open_nvml()
        assert isinstance(nvml, Nvml)
        card = nvmlcard.NvmlCard(nvml, nvml.cards()[0].pci_id)
        due = time.monotonic()
        while self.on:
            power = card.fields((nvmlcard.POWER_MW,))[nvmlcard.POWER_MW]
            if isinstance(power, float):
                self.points.append((time.monotonic(), power / 1000))
            due += 0.02
            time.sleep(max(due - time.monotonic(), 0))

    def joules(self, begin: float, end: float) -> float:
        inner = [p for p in self.points if begin <= p[0] <= end]
        pairs = itertools.pairwise(inner)
        area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs)
        return area * (end - begin) / (inner[-1][0] - inner[0][0])


def energy_and_cost() -> None:
    """A real training step: the counter's energy against 50 Hz over the same time, what the watch took."""
    reference = Reference()
    reference.start()
    found = watch("train", ENERGY_S, name="energy")
    reference.on = False
    reference.join()
    powers = [(s["at_s"], s["cards"][0]["look"].get("power_w")) for s in found["samples"]]
    known = [(at_s, power) for at_s, power in powers if power is not None]
    start = _aligned(known, reference.points, found["begun"])
    energy = found["report"]["cards"][0]["energy"]
    by_reference = reference.joules(start, start + energy["covers_s"])
    miss = abs(energy["joules"] / by_reference - 1) * 100
    BOARD.bar("energy by the card's counter against 50 Hz", miss, 3.0, "%", energy=energy)
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(known))
    by_power = area / reference.joules(start + known[0][0], start + known[-1][0])
    BOARD.line(
        {
            "figure": "energy by power at 4 Hz against 50 Hz",
            "value": round(abs(by_power - 1) * 100, 3),
            "unit": "%",
        }
    )
    BOARD.bar("processor time at 4 Hz, of one core", found["cpu"] * 100, 1.0, "%")
    shown = {name: round(value, 4) for name, value in means(found).items()}
    BOARD.line({"figure": "saturation: train", "load": found["load"], "mean": shown})
    pace = found["report"]["pace"]
    BOARD.bar("interval error p99", pace["error_p99_s"] * 1e3, 10.0, "ms", samples=pace["samples"])
    BOARD.line(
        {
            "figure": "own share by its own count",
            "value": pace["own_cpu_share"],
            "unit": "of a core",
            "energy": found["report"]["cards"][0]["energy"],
            "slow": found["report"]["cards"][0]["slowdowns"],
        }
    )


def _aligned(ours: list[tuple[float, float]], theirs: list[tuple[float, float]], near: float) -> float:
    """When the watch's clock began, by the machine's: where its powers fit the reference best."""
    import bisect

    times = [t for t, _ in theirs]

    def miss(start: float) -> float:
        at = [min(bisect.bisect(times, a + start), len(times) - 1) for a, _ in ours]
        return sum(abs(p - theirs[i][1]) for i, (_, p) in zip(at, ours, strict=True) if p is not None)

    return min((near + step * 0.01 for step in range(300)), key=miss)


def saturation() -> None:
    """Each load's counters against what the load did by its own count."""
    for kind in KINDS:
        found = watch(kind, EACH_S)
        mean = means(found)
        peak = found["report"]["subject"]["cards"][0]["memory_bytes_per_s"]
        load = found["load"]
        shown = {name: round(value, 4) for name, value in mean.items()}
        BOARD.line(
            {
                "figure": f"saturation: {kind}",
                "load": load,
                "mean": shown,
                "memory_bytes_per_s": peak,
                "cpu": round(found["cpu"], 5),
            }
        )
        if kind == "copy":
            moved = mean["dram_percent"] / 100 * peak
            BOARD.bar(
                "memory bytes by counter against a copy's own",
                abs(moved / load["memory_bytes_per_s"] - 1) * 100,
                10,
                "%",
            )
        if kind in ("upload", "download"):
            way = "to_card" if kind == "upload" else "from_card"
            counted = mean[f"{way}_bytes_per_s"]
            ratio = counted / load[f"{way}_bytes_per_s"]
            BOARD.bar(
                f"link bytes {way} by counter against a copy's own",
                abs(ratio - 1) * 100,
                15,
                "%",
                ratio=ratio,
            )
        if kind == "spin":
            BOARD.bar("spinning kernel: busy", mean["busy_percent"], 95, "%", at_least=True)
            BOARD.bar("spinning kernel: multiprocessors", mean["sm_active_percent"], 5, "%")
        if kind == "product":
            BOARD.bar("matrix product: tensor pipes", mean["tensor_percent"], 50, "%", at_least=True)


def allocator() -> None:
    found = watch("fragments", 3, hook=True)
    told = found["report"]["allocator"]
    BOARD.line(
        {
            "figure": "allocator of a half-emptied cache",
            "value": told,
            "code": found["code"],
            "err": found["err"][-300:],
        }
    )


def costs() -> None:
    """What each call takes."""
    from probes.hardware import nvml as nvmlcard
    from probes.hardware.nvml import Nvml, open_nvml
    from probes.watch import gpu_readers
    from probes.watch.readers import MachineReader

    nvml = open_nvml()
    assert isinstance(nvml, Nvml)
    pci_id = nvml.cards()[0].pci_id
    card, performance = nvmlcard.NvmlCard(nvml, pci_id), gpu_readers.Performance(nvml, pci_id)
    machine = MachineReader(Path("/"), cpus=os.cpu_count() or 1)
    calls = {
        "utilization": card.utilization,
        "used_bytes": card.used_bytes,
        "mhz": lambda: card.mhz(1),
        "celsius": card.celsius,
        "fan": card.fan_percent,
        "power_mw": card.power_mw,
        "energy_mj": card.energy_mj,
        "slowdowns": card.slowdowns,
        "processes": card.processes,
        "gpm": lambda: performance.read((2, 3, 5, 10)),
        "machine": lambda: machine.look(time.monotonic()),
        **{f"field {one}": (lambda one=one: card.fields((one,))) for one in (82, 83, 185, 186, 197, 198)},
    }
    for name, call in calls.items():
        call()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(20):
            value = call()
        BOARD.line(
            {
                "cost": name,
                "wall_us": round((time.perf_counter() - wall) / 20 * 1e6),
                "cpu_us": round((time.process_time() - cpu) / 20 * 1e6),
                "value": str(value)[:160],
            }
        )


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    every = (costs, against_smi, energy_and_cost, saturation, allocator)
    for part in (one for one in every if one.__name__ in PARTS):
        try:
            part()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:500]
            BOARD.bar(f"{part.__name__} ended early", 1, 0, "times", why=why)
    return BOARD.finish()


if __name__ == "__main__":
    sys.exit(main())
