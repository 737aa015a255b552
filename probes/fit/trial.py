"""One size tried for real in this process, under a cap, or traced by torch without its bytes.

The trial says what became of the size and what it took at its peak; the trace says what took the bytes.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from probes.core.errors import DeviceUnusable, ModelUnknown, ProbeError, UsageError
from probes.core.unknown import Unknown
from probes.fit import limits, step
from probes.fit.forecast import libraries
from probes.fit.limits import Group
from probes.fit.report import Axis, Built, Parts, Phase, Question, Taken, Trial, Verdict
from probes.hardware.host import cpu_name
from probes.hardware.nvml import open_nvml
from probes.placement.trace import AliveBytes, fill, no_packed_sequences


def trace(config: Mapping[str, Any], question: Question, device: str) -> Taken:
    """The bytes at the peak of a question's steps, by a trace. Raises what `step.prepare` raises."""
    made = step.make(config, question, "meta")
    with no_packed_sequences(), FakeTensorMode(), AliveBytes(device) as counter:
        fill(made.module, device)
        ready = step.ready(made, question, device)
        taken = [_divided(counter, ready)]

        def note() -> None:
            taken[0] = _divided(counter, ready)

        counter.at_highest = note
        step.run(ready, question, lambda _: None)
        return taken[0]


def _divided(counter: AliveBytes, ready: step.Prepared) -> Taken:
    """The bytes that are alive now, by what they are."""
    weights = counter.bytes_of(ready.module.parameters())
    gradients = counter.bytes_of(p.grad for p in ready.module.parameters() if p.grad is not None)
    state = ready.optimizer.state.values() if ready.optimizer else ()
    kept = counter.bytes_of(
        value for each in state for value in each.values() if isinstance(value, torch.Tensor)
    )
    rest = counter.alive - weights - gradients - kept
    return Taken(weights=weights, gradients=gradients, optimizer=kept, activations=max(rest, 0))


Device = Literal["cpu", "gpu"]
TORCH_NAMES: Final[Mapping[Device, str]] = {"cpu": "cpu", "gpu": "cuda"}
NOT_A_GPU: Final = Unknown("the CPU has no such memory")
MOST_WORDS: Final = 300  # characters of an error
_FITS: Final[Verdict] = "fits"


def run(
    config: Mapping[str, Any],
    question: Question,
    device: Device,
    *,
    budget: int,
    size: int,
    group: Group | None = None,
) -> Trial:
    """Build the model and do its steps under the cap. Raises what `step.prepare` raises.

    `group` is a cgroup with the budget as its limit; without one, this process's own limit is the cap.
    """
    began = time.monotonic()
    torch.manual_seed(0)
    gauge = _on_cpu(budget, group) if device == "cpu" else _on_gpu(budget)
    message, verdict, ready = "", _FITS, None  # until an error says otherwise
    phases = Phases(gauge.peak)
    try:
        ready = step.prepare(config, question, TORCH_NAMES[device])
        step.run(ready, question, phases.begin)
    except ProbeError:
        raise
    except Exception as error:  # transformers' and torch's own, of any kind
        gauge.lift()  # there may be no memory left to say so
        message = str(error)[:MOST_WORDS]
        verdict = limits.verdict_of(type(error).__name__, str(error))
    phases.begin("")
    highest = max(phase.peak_bytes for phase in phases.ended)
    trial = Trial(size, verdict, time.monotonic() - began, highest, *gauge.held(), message)
    return replace(trial, parts=_parts(ready, phases.ended)) if ready and verdict == _FITS else trial


class Phases:
    """The phases of a step that have ended, each with its peak; one that comes again keeps its highest."""

    def __init__(self, peak: Callable[[], int]) -> None:
        self._peak, self._now = peak, "building the model"
        self._highest: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """End the phase that lasts, and begin the next."""
        self._highest[self._now] = max(self._highest.get(self._now, 0), self._peak())
        self._now = name

    @property
    def ended(self) -> tuple[Phase, ...]:
        """Return the trials in the order in which they ended."""
        return tuple(Phase(name, peak) for name, peak in self._highest.items())


def _parts(ready: step.Prepared, phases: tuple[Phase, ...]) -> Parts:
    """The highest peak divided into what is known exactly and the rest."""
    weights = step.built(ready.module).weights
    state = ready.optimizer.state.values() if ready.optimizer else ()
    kept = sum(v.nbytes for each in state for v in each.values() if isinstance(v, torch.Tensor))
    peak = max(phase.peak_bytes for phase in phases)
    return Parts(weights, kept, max(peak - weights - kept, 0), phases)


def warm(
    config: Mapping[str, Any], question: Question, axis: Axis = "batch"
) -> tuple[Built, tuple[str, ...]]:
    """Import what the model and its step need, so that a trial's budget isn't spent on Python's modules.

    Nothing is allocated for the model itself. Returns what its modules say, and what to note.
    Raises what `step.prepare` raises, UsageError for an axis that the model doesn't have.
    """
    try:
        made = step.make(config, question, "meta")
        step.ready(made, question, "meta")
    except ProbeError:
        raise
    except Exception as error:  # transformers' and torch's own, such as for sizes beyond 64 bits
        message = f"can't build this model: {str(error)[:MOST_WORDS]}"
        raise ModelUnknown(message, "give the model's own config.json") from error
    built, image = step.built(made.module), made.takes.image
    del made
    gc.collect()
    gc.freeze()  # a collection in a fork would write to every object's page
    if image is None:
        return built, ()
    takes = f"it takes images of {' x '.join(map(str, image))}"
    if axis == "tokens":
        raise UsageError(f"{takes}, so there are no sequences to make longer", "measure --axis batch")
    return built, (f"{takes}: the number of tokens says nothing about it",)


@dataclass(frozen=True)
class Gauge:
    """How a trial is measured: `peak` since it was asked last, and what the driver and the allocator hold."""

    peak: Callable[[], int]
    held: Callable[[], tuple[int | Unknown, int | Unknown]]
    lift: Callable[[], None] = lambda: None  # the process's own limit


def _on_cpu(budget: int, group: Group | None) -> Gauge:
    torch.set_num_threads(1)
    limits.prepare()
    limits.prefer_to_kill_this()
    gc.collect()
    if group is not None:
        try:
            group.join()
        except OSError as error:  # making one doesn't show that it may be joined
            raise DeviceUnusable(
                f"can't join the memory cgroup {group.path}: {error.strerror}",
                "use the process's own limit: --cap process",
            ) from error
    before = limits.forget_peak()
    lift = limits.limit_data(budget) if group is None else lambda: None

    def peak() -> int:
        highest = limits.peak_bytes()
        limits.forget_peak()
        return max(highest - before, 0)

    return Gauge(peak, lambda: (NOT_A_GPU, NOT_A_GPU), lift)


def _on_gpu(budget: int) -> Gauge:
    if not torch.cuda.is_available():
        raise DeviceUnusable("torch finds no GPU here", "try --measure cpu, or predict: leave --measure out")
    others = _used_by_all()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(budget / total, 1.0))

    reserved = [0]

    def peak() -> int:
        highest: int = torch.cuda.max_memory_allocated()
        reserved[0] = max(reserved[0], torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        return highest

    def held() -> tuple[int | Unknown, int | Unknown]:
        free, total = torch.cuda.mem_get_info()
        context: int | Unknown = Unknown("NVML is missing, so what other processes hold isn't known")
        if isinstance(others, int):
            context = max(total - free - torch.cuda.memory_reserved() - others, 0)
        return reserved[0], context

    return Gauge(peak, held)


def _used_by_all() -> int | Unknown:
    """VRAM in use before this process has a context."""
    nvml = open_nvml()
    if isinstance(nvml, Unknown):
        return nvml
    cards = nvml.cards()
    return cards[0].vram_used_bytes if cards else Unknown("NVML shows no card")


def traced(config: Mapping[str, Any], question: Question, device: Device) -> Taken | Unknown:
    """The peak of a question's steps by a trace; on a CPU with what libraries take besides."""
    try:
        taken = trace(config, question, TORCH_NAMES[device])
        return taken if device == "gpu" else replace(taken, workspace=libraries(question))
    except Exception as error:  # not every operation can be traced
        return Unknown(f"torch can't trace it: {str(error)[:MOST_WORDS]}")


def device_name(device: Device, root: Path = Path("/")) -> str:
    """The name of the device that trials run on."""
    if device == "gpu":
        return str(torch.cuda.get_device_name(0))
    name = cpu_name(root)
    return "the CPU" if isinstance(name, Unknown) else f"the CPU ({name})"
