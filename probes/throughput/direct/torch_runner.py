"""Runs a model in torch, one way: where inputs are, which precision, what is timed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from probes.core.errors import ModelFails, OutOfMemory
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware.host import available_bytes, floor_bytes, process_bytes, spendable_bytes
from probes.hardware.torch_build import first_line, refusals
from probes.measure.device import TorchWorkbench
from probes.placement.runtime.host_memory import zero_copy
from probes.records.stats import median
from probes.throughput.direct.knee import AUTOCAST
from probes.throughput.direct.models import SPECS, Spec, build_model
from probes.throughput.direct.results import Way, Work
from probes.throughput.measure_ceilings import DTYPES, float32_as, torch_device

PICKING = ("gather", "index", "index_select", "embedding", "slice_scatter", "select_scatter")


class _Traffic(TorchDispatchMode):  # type: ignore[misc]
    """Adds up the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0
        self.operations = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        if not _is_view(func):
            written = _sizes(tree_leaves(out))
            read = _sizes(tree_leaves((args, kwargs or {})))
            if func.overloadpacket.__name__ in PICKING:
                read = min(read, 2 * written)  # what is picked, and as many indices
            self.n_bytes += read + written
            self.operations += 1
        return out


def _is_view(func: Any) -> bool:  # noqa: ANN401
    returns = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def _sizes(values: Iterable[object]) -> int:
    """Bytes of the tensors, an expanded dimension counted once."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            strides = zip(value.shape, value.stride(), strict=True)
            total += value.element_size() * _product(size for size, stride in strides if stride)
    return total


def _product(sizes: Iterable[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def work(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], autocast: torch.dtype | None
) -> Work | Unknown:
    """What one pass of the module with these inputs asks for; tensors on torch's meta device cost nothing.

    Autocast does nothing there: with it, give tensors of a device.
    """
    flops, traffic = FlopCounterMode(display=False), _Traffic()
    cast = torch.autocast(inputs[0].device.type, dtype=autocast) if autocast else nullcontext()
    try:
        # not in inference mode, in which operations aren't taken apart into those that run
        with torch.no_grad(), cast, flops, traffic:
            out = module(*inputs)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return Unknown(f"the pass can't be counted: {first_line(error)}")
    weights = _sizes([*module.parameters(), *module.buffers()])
    given = _sizes(inputs)
    return Work(
        flop=float(flops.get_total_flops()),
        op_bytes=float(traffic.n_bytes),
        least_bytes=float(weights + given + _sizes(tree_leaves(out))),
        input_bytes=given,
        operations=traffic.operations,
    )


READINGS = 5  # of the device's clock
LEADS_S = (0.001, 0.01, 0.1)  # waits in front of a pass, until the host is ahead
ROOT = Path("/")
NOT_FINITE = "the model's outputs hold NaN or infinity"
LARGEST_KEPT = 31 << 20  # bytes; with its header below glibc's DEFAULT_MMAP_THRESHOLD_MAX


def settle_allocator() -> None:
    """Bring the C library's allocator to where any process comes that has freed a large tensor once.

    glibc keeps freed memory up to a limit that rises, for the process's life, with the largest block (at most
    32 MiB) that it has freed. Until then every pass gives its memory back and gets new pages, which takes as
    long as computing does: a small batch would come out twice as fast after a large one as before it.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


def dtype_of(way: Way) -> torch.dtype:
    """Of weights and inputs; autocast keeps both in float32."""
    return torch.float32 if way.precision == "autocast" else DTYPES[way.precision]


def autocast_of(way: Way) -> torch.dtype | None:
    """What autocast casts to; None without it."""
    return DTYPES[AUTOCAST[way.device]] if way.precision == "autocast" else None


class TorchRunner:
    """A model on a device. `release` isn't needed: it lives as long as its process."""

    def __init__(self, spec: Spec, way: Way, *, seed: int, bench: TorchWorkbench) -> None:
        self._spec, self._way, self._seed, self._bench = spec, way, seed, bench
        with refusals(f"the weights of {spec.name}"):
            self.module = build_model(spec, seed=seed, dtype=dtype_of(way), device=torch_device(way.device))
        self._drawn = torch.Generator(torch_device(way.device)).manual_seed(seed)
        self._host = HostMemory(ROOT)

    @contextmanager
    def at(self, batch: int) -> Iterator["TorchBatch"]:
        """Memory for a batch size. Raises OutOfMemory, as everything within it may."""
        way = self._way
        with ExitStack() as stack:
            stack.enter_context(_failures(self._spec, batch))
            stack.enter_context(refusals(f"a pass of batch {batch}"))
            stack.enter_context(torch.inference_mode())
            stack.enter_context(float32_as("tf32" if way.precision == "tf32" else "fp32"))
            if way.device == "cpu":
                stack.enter_context(self._host.batch(batch))
            else:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            shapes = tuple((batch, *shape) for shape in self._spec.inputs)
            yield TorchBatch(self, way, shapes, drawn=self._drawn, bench=self._bench, host=self._host)

    def count(self, shapes: tuple[tuple[int, ...], ...]) -> Work | Unknown:
        """What a pass asks for, counted on torch's meta device; on its own where that can't show it."""
        autocast, device, module = autocast_of(self._way), "meta", self.module
        with torch.inference_mode(mode=False):
            if autocast or isinstance(module, torch.jit.ScriptModule):
                device = torch_device(self._way.device)
            else:
                with torch.device("meta"):
                    module = self._spec.build().eval().to(dtype_of(self._way))
            inputs = [torch.zeros(shape, dtype=dtype_of(self._way), device=device) for shape in shapes]
            return work(module, inputs, autocast)


def cause(error: BaseException) -> str:
    """What went wrong in a model: the last line, as TorchScript puts its own trace first."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:300]


@contextmanager
def _failures(spec: Spec, batch: int) -> Iterator[None]:
    """Maps what a model's own pass raises to our error; what torch refuses is an error of ours already."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as error:
        hint = "" if spec.name in SPECS else "each input of the file needs its --shape, without the batch"
        raise ModelFails(f"{spec.name} fails at batch {batch}: {cause(error)}", hint) from error


def not_finite(outputs: object) -> str:
    """What to doubt about a model's outputs; empty where every number is finite."""
    floats = [
        one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]
    return "" if all(bool(one.isfinite().all()) for one in floats) else NOT_FINITE


@dataclass
class HostMemory:
    """The host memory that batches on the CPU take, so that none takes all of it."""

    root: Path
    _before: tuple[int, int] | None = field(default=None)  # the largest batch before, and what it took
    _began: int | None = None

    def peak_bytes(self) -> int | Unknown:
        """The most that this process has taken so far."""
        return process_bytes(self.root, "VmHWM")

    @contextmanager
    def batch(self, batch: int) -> Iterator[None]:
        """Raises OutOfMemory where the batch before predicts more than there is, before Linux kills us."""
        began = self._began if self._began is not None else self.peak_bytes()
        self._began = began if isinstance(began, int) else 0
        if self._before:
            ahead = self._before[1] * batch // self._before[0]
            available = available_bytes(self.root)
            if isinstance(available, int):
                room = spendable_bytes(available, floor_bytes(available))
                if ahead > room:
                    raise OutOfMemory(
                        f"it would take about {binary_bytes(ahead)}, and {binary_bytes(room)} may be taken",
                        "end other programs, or stay below: --max-batch",
                    )
        yield
        peak = self.peak_bytes()
        # the peak is the process's: a smaller batch that is measured again says nothing about a larger one
        if isinstance(peak, int) and batch > (self._before or (0,))[0]:
            self._before = batch, max(peak - self._began, 0)


class TorchBatch:
    """One batch size: what `probes.throughput.direct.trials.Prepared` says."""

    def __init__(
        self,
        runner: TorchRunner,
        way: Way,
        shapes: tuple[tuple[int, ...], ...],
        *,
        drawn: torch.Generator,
        bench: TorchWorkbench,
        host: HostMemory,
    ) -> None:
        self._runner, self._way, self._shapes = runner, way, shapes
        self._drawn, self._bench, self._memory = drawn, bench, host
        self._device = torch_device(way.device)
        # drawn where that is quick, whatever the way; from there they go where the way wants them
        self._scratch = [torch.empty(shape, dtype=dtype_of(way), device=self._device) for shape in shapes]
        self._given = [self._home(one) for one in self._scratch]
        self._call = self._timed()
        self.fresh()

    def _home(self, scratch: torch.Tensor) -> torch.Tensor:
        if self._way.inputs == "resident":
            return scratch
        return torch.empty(
            scratch.shape, dtype=scratch.dtype, pin_memory=self._way.inputs in ("pinned", "in-place")
        )

    def fresh(self) -> None:
        """Normal inputs, drawn again."""
        for scratch, given in zip(self._scratch, self._given, strict=True):
            scratch.normal_(generator=self._drawn)
            if given is not scratch:
                given.copy_(scratch)

    def _forward(self) -> Callable[..., object]:
        module: Callable[..., object] = self._runner.module
        autocast = autocast_of(self._way)
        if autocast is None:
            return module

        def cast(*inputs: torch.Tensor) -> object:
            with torch.autocast(self._device, dtype=autocast):
                return module(*inputs)

        return cast

    def _timed(self) -> Callable[[], object]:
        """The call whose time counts, without its end."""
        forward, given, kind = self._forward(), self._given, self._way.inputs
        if kind == "in-place":
            given = [zero_copy(one) for one in given]
        if kind in ("resident", "in-place"):
            return lambda: forward(*given)
        queued = kind == "pinned"
        return lambda: forward(*[one.to("cuda", non_blocking=queued) for one in given])

    def trial_s(self) -> float:
        """Seconds of one timed pass, finished before and after."""
        call, on_gpu = self._call, self._device == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        began = perf_counter()
        found = call()
        if on_gpu:
            torch.cuda.synchronize()
        took = perf_counter() - began
        del found  # after the clock: freeing is the next trial's or nobody's
        return took

    def pass_s(self) -> float | Unknown:
        """Seconds of the pass without copies, by the device's clock, with the host far ahead."""
        if not self._bench.has_gpu or self._device != "cuda":
            return Unknown("the CPU has no clock of its own")
        forward = self._forward()
        operation = [lambda: forward(*self._scratch)]
        for lead_s in LEADS_S:
            found = [self._bench.device_s(operation, lead_s=lead_s) for _ in range(READINGS)]
            known = [one for one in found if one is not None]
            if known and all(one.ahead for one in known):
                return median([one.seconds for one in known])
        return Unknown("host-bound: the device runs out of work before the host has handed over a pass")

    def doubt(self) -> str:
        """What to doubt about its outputs."""
        return not_finite(self._call())

    def work(self) -> Work | Unknown:
        """What one pass asks for."""
        return self._runner.count(self._shapes)

    def peak_bytes(self) -> int | Unknown:
        """By torch's allocator; of the process on the CPU, the most so far."""
        return int(torch.cuda.max_memory_allocated()) if self._device == "cuda" else self._memory.peak_bytes()
