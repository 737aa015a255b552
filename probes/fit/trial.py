"""One size tried for real in this process, under a cap, or traced by torch without its bytes.

The trial says what became of the size and what it took at its peak; the trace says what took the bytes.
"""

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from probes.core.errors import DeviceUnusable, ModelUnknown, ProbeError, UsageError
from probes.core.unknown import Unknown
from probes.fit import limits, step
from probes.fit.forecast import libraries
from probes.fit.limits import Group
from probes.fit.report import Axis, Built, Parts, Phase, Question, Taken, Trial, Verdict
from probes.hardware.host import cpu_name
from probes.hardware.nvml import open_nvml

ALIGNMENT: Final = {"cuda": 512, "cpu": 64}  # bytes that torch's allocators round to


class Counter(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of storages from their making until nothing refers to them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._align = ALIGNMENT[device.partition(":")[0]]
        self._seen: Any = weakref.WeakKeyDictionary()
        self.alive = self.highest = 0
        self.at_highest: Callable[[], None] = lambda: None

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count what it made."""
        made = function(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        n_bytes = -(-storage.nbytes() // self._align) * self._align
        self._seen[storage] = n_bytes
        weakref.finalize(storage, self._free, n_bytes).atexit = False
        self.alive += n_bytes
        if self.alive > self.highest:
            self.highest = self.alive
            self.at_highest()

    def _free(self, n_bytes: int) -> None:
        self.alive -= n_bytes

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages of tensors, each once."""
        storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
        return sum(self._seen.get(storage, 0) for storage in storages.values())


def trace(config: Mapping[str, Any], question: Question, device: str) -> Taken:
    """The bytes at the peak of a question's steps, by a trace. Raises what `step.prepare` raises."""
    made = step.make(config, question, "meta")
    with _no_packed_sequences(), FakeTensorMode(), Counter(device) as counter:
        _fill(made.module, device)
        ready = step.ready(made, question, device)
        taken = [_divided(counter, ready)]

        def note() -> None:
            taken[0] = _divided(counter, ready)

        counter.at_highest = note
        step.run(ready, question, lambda _: None)
        return taken[0]


@contextmanager
def _no_packed_sequences() -> Iterator[None]:
    """Tell transformers that a batch has whole sequences: it looks at values for that, and a trace has none.

    Otherwise it makes a mask, and repeats keys and values, that a real step does without.
    """
    masks = sys.modules.get("transformers.masking_utils")
    before = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or before is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = before  # type: ignore[attr-defined]


def _fill(module: torch.nn.Module, device: str) -> None:
    """Replace every parameter and buffer by one of the same size on a device; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}

    def like(old: torch.Tensor) -> torch.Tensor:
        if id(old) not in made:
            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
            made[id(old)] = (
                torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
            )
        return made[id(old)]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: like(old) for name, old in held.items() if old is not None})


def _divided(counter: Counter, ready: step.Prepared) -> Taken:
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
    weights = step.built(step.Made(ready.module, ready.takes)).weights
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
    built, image = step.built(made), made.takes.image
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
