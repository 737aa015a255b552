"""One size tried for real in this process, under a cap: what became of it, and what it took at its peak."""

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch

from probes.errors import DeviceUnusable, ProbeError
from probes.fit.measured import caps, faketrace, onestep
from probes.fit.question import Question, Taken, Trial, Verdict
from probes.machine.nvml import open_nvml
from probes.shared.unknown import Unknown

Device = Literal["cpu", "gpu"]
TORCH_NAMES: Final[Mapping[Device, str]] = {"cpu": "cpu", "gpu": "cuda"}
NOT_A_GPU: Final = Unknown("the CPU has no such memory")
MOST_WORDS: Final = 300  # characters of an error
_FITS: Final[Verdict] = "fits"


def run(config: Mapping[str, Any], asked: Question, device: Device, *, budget: int, size: int) -> Trial:
    """Build the model and do its steps under the cap. Raises what `onestep.prepare` raises."""
    began = time.monotonic()
    torch.manual_seed(0)
    peaks = _on_cpu(budget) if device == "cpu" else _on_gpu(budget)
    said, verdict = "", _FITS  # until an error says otherwise
    try:
        ready = onestep.prepare(config, asked, TORCH_NAMES[device])
        for _ in onestep.steps(ready, asked):
            pass
    except ProbeError:
        raise
    except Exception as error:  # transformers' and torch's own, of any kind
        said = str(error)[:MOST_WORDS]
        verdict = caps.verdict_of(type(error).__name__, str(error))
    peak, reserved, context = peaks()
    return Trial(size, verdict, time.monotonic() - began, peak, reserved, context, said)


def warm(config: Mapping[str, Any], asked: Question) -> None:
    """Import what the model and its step need, so that a trial's budget isn't spent on Python's modules.

    Nothing is allocated for the model itself. Raises what `onestep.prepare` raises.
    """
    onestep.ready(onestep.make(config, asked, "meta"), asked, "meta")
    gc.collect()


Peaks = Callable[[], tuple[int | Unknown, int | Unknown, int | Unknown]]


def _on_cpu(budget: int) -> Peaks:
    torch.set_num_threads(1)
    caps.prepare()
    caps.prefer_to_kill_this()
    gc.collect()
    before = caps.forget_peak()
    caps.limit_data(budget)
    return lambda: (max(caps.peak_bytes() - before, 0), NOT_A_GPU, NOT_A_GPU)


def _on_gpu(budget: int) -> Peaks:
    if not torch.cuda.is_available():
        raise DeviceUnusable("torch finds no GPU here", "try --measure cpu, or predict: leave --measure out")
    others = _used_by_all()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(budget / total, 1.0))

    def peaks() -> tuple[int | Unknown, int | Unknown, int | Unknown]:
        free, total = torch.cuda.mem_get_info()
        context: int | Unknown = Unknown("NVML is missing, so what other processes hold isn't known")
        if isinstance(others, int):
            context = max(total - free - torch.cuda.memory_reserved() - others, 0)
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), context

    return peaks


def _used_by_all() -> int | Unknown:
    """VRAM in use before this process has a context."""
    nvml = open_nvml()
    if isinstance(nvml, Unknown):
        return nvml
    cards = nvml.cards()
    return cards[0].vram_used_bytes if cards else Unknown("NVML shows no card")


def traced(config: Mapping[str, Any], asked: Question, device: Device) -> Taken | Unknown:
    """The same, traced without its bytes."""
    try:
        return faketrace.trace(config, asked, TORCH_NAMES[device])
    except Exception as error:  # not every operation can be traced
        return Unknown(f"torch can't trace it: {str(error)[:MOST_WORDS]}")


def device_name(device: Device, root: Path = Path("/")) -> str:
    """What it ran on."""
    if device == "gpu":
        return str(torch.cuda.get_device_name(0))
    for line in (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"the CPU ({line.partition(':')[2].strip()})"
    return "the CPU"
