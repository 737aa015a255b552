"""What the operations of a traced pass take on a device: each distinct one is run there, alone.

A trace knows what a pass calls, not what that costs: kernels that a library chooses, and the bytes that these
take meanwhile, differ from card to card. `measured` runs every distinct call of a trace on tensors of the
same shapes, strides and dtypes: its time on the device replayed as a graph, the host's time to launch it, and
the bytes that it takes besides its results.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Bytes of weights that are read in turn, so that none is in a cache: three times an H200's L2. In a pass each
# weight is read once, and a product of 1024 x 1024 takes half as long from the L2.
COLD_BYTES: Final = 192 << 20
COLD_FROM: Final = 256 << 10  # bytes of weights that take notable time
LONG_S: Final = 2e-3  # of repetitions that are timed together
MOST_REPEATS: Final = 40
ROUNDS: Final = 3  # of which the quickest counts
STD: Final = 0.02  # of the numbers of weights and activations


@dataclass(frozen=True, slots=True)
class TensorLike:
    """What a tensor of a call looks like. `weight`: a parameter, which a pass finds in no cache."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    weight: bool

    def made(self, device: torch.device) -> torch.Tensor:
        """One of these, of random numbers, or zeros where they are whole numbers: indices of anything."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point and made.element_size() > 1:
            return made.normal_(0.0, STD)
        return made.fill_(self.dtype is torch.bool)


@dataclass(frozen=True)
class OperationCall:
    """A call of one of torch's operations with its tensors left out. Equal ones cost the same."""

    function: Any  # torch's OpOverload
    leaves: tuple[Any, ...]
    structure: TreeSpec

    @classmethod
    def of(
        cls,
        function: Any,  # noqa: ANN401  # torch's OpOverload
        args: Any,  # noqa: ANN401
        kwargs: Any,  # noqa: ANN401
        is_weight: Callable[[torch.Tensor], bool],
    ) -> "OperationCall":
        """What a call looks like."""
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        kept = tuple(
            TensorLike(tuple(leaf.shape), leaf.stride(), leaf.dtype, is_weight(leaf))
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        )
        return cls(function, kept, structure)

    def __hash__(self) -> int:
        return hash(
            (self.function, len(self.leaves), *(leaf for leaf in self.leaves if isinstance(leaf, TensorLike)))
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights among its tensors."""
        return sum(
            leaf.dtype.itemsize * torch.Size(leaf.shape).numel()
            for leaf in self.leaves
            if isinstance(leaf, TensorLike) and leaf.weight
        )

    def arguments(self, device: torch.device, before: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """Arguments on a device; with those of `before`, only weights are made anew."""
        old = tree_flatten(before)[0] if before else [None] * len(self.leaves)
        leaves = [self._leaf(leaf, was, device) for leaf, was in zip(self.leaves, old, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return args, kwargs

    def _leaf(self, leaf: Any, was: Any, device: torch.device) -> Any:  # noqa: ANN401
        if isinstance(leaf, TensorLike):
            return leaf.made(device) if was is None or leaf.weight else was
        return device if isinstance(leaf, torch.device) else leaf


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Seconds on the device, and of the host's to launch it; bytes that it takes besides what it gives."""

    device_s: float
    host_s: float
    workspace: int


def measured(
    calls: Mapping[OperationCall, bool], device: torch.device
) -> dict[OperationCall, OperationTime | None]:
    """The time of each call; None where it can't be run alone, as one whose numbers decide its shapes.

    `calls`: whether each launches anything; those that don't aren't run, and have None. On a GPU, torch's own
    statistics of peak memory begin anew.
    """
    with torch.inference_mode(), _same_random_numbers(device):
        overhead = _overhead_s(device)
        return {call: _time_of(call, device, overhead) if runs else None for call, runs in calls.items()}


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # those of the stream that graphs were recorded on
        getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()
        torch.cuda.empty_cache()


def _overhead_s(device: torch.device) -> float:
    """What a call of an operation by its overload takes more than one as modules call it."""
    one = torch.zeros(1, device=device)
    ways = (lambda: torch.add(one, one), lambda: torch.ops.aten.add.Tensor(one, one))
    usual, overload = (min(_launching_s(way, 200, device) for _ in range(ROUNDS)) for way in ways)
    return max(overload - usual, 0.0)


def _time_of(call: OperationCall, device: torch.device, overhead_s: float) -> OperationTime | None:
    try:
        first = call.arguments(device)
        workspace = _workspace(call, first, device)
        count = -(-COLD_BYTES // call.weight_bytes) if call.weight_bytes >= COLD_FROM else 1
        sets = [first, *(call.arguments(device, first) for _ in range(count - 1))]
        return OperationTime(*_times(call, sets, device, overhead_s), workspace)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return None


def _workspace(call: OperationCall, given: tuple[Any, Any], device: torch.device) -> int:
    """Bytes taken at once during a call, besides its results. Libraries keep what the first call takes."""
    args, kwargs = given
    call.function(*args, **kwargs)
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = call.function(*args, **kwargs)
    peak, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del made
    return max(int(peak - max(kept, before)), 0)


def _times(
    call: OperationCall, sets: list[tuple[Any, Any]], device: torch.device, overhead_s: float
) -> tuple[float, float]:
    """Seconds on the device and of the host."""
    repeats = 0

    def several() -> None:
        for n in range(repeats):
            args, kwargs = sets[n % len(sets)]
            call.function(*args, **kwargs)

    repeats = len(sets)
    several()
    one_s = _finished_s(several, device) / repeats
    repeats = max(min(int(LONG_S / max(one_s, 1e-7)), MOST_REPEATS), len(sets))
    host_s = min(_launching_s(several, 1, device) for _ in range(ROUNDS)) / repeats
    if device.type != "cuda":
        return min(_finished_s(several, device) for _ in range(ROUNDS)) / repeats, 0.0
    replay = _recorded(several, device)
    replay()
    empty_s = min(_device_s(lambda: None) for _ in range(ROUNDS))
    device_s = min(_device_s(replay) for _ in range(ROUNDS)) - empty_s
    return max(device_s, 0.0) / repeats, max(host_s - overhead_s, 0.0)


def _recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The work as a graph, or as it is where it can't be recorded."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:  # it waits for the device
        torch.cuda.synchronize(device)
        return work
    replay: Callable[[], None] = graph.replay
    return replay


def _device_s(work: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _finished_s(work: Callable[[], None], device: torch.device) -> float:
    return _clocked(work, device, wait=True)


def _launching_s(work: Callable[[], Any], times: int, device: torch.device) -> float:
    def all_of_it() -> None:
        for _ in range(times):
            work()

    return _clocked(all_of_it, device, wait=False) / times


def _clocked(work: Callable[[], None], device: torch.device, *, wait: bool) -> float:
    """Seconds of the host's clock, with what the device still does (`wait`) or without."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    work()
    if wait and device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds
