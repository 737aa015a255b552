"""What the operations of a traced pass take on a device: each distinct one alone, then all in a row.

A trace knows what a pass calls, not what that costs: kernels that a library chooses, and the bytes that these
take meanwhile, differ from card to card. `measured` runs every distinct call of a pass on tensors of the
same shapes, strides and dtypes: its time on the device replayed as a graph, the host's time to launch it, and
the bytes that it takes besides its results. A call takes longer among others than repeated: its kernels'
instructions aren't at hand. So the whole pass is run in a row as well, and what it takes more is shared out
equally among its calls; what it takes less, by their times.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
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
AT_ONCE: Final = 256  # calls that the host launches without waiting for the device to end them
ALIGNED: Final = 512  # bytes, as torch's allocator
STD: Final = 0.02  # of the numbers of weights and activations


@dataclass(frozen=True, slots=True)
class TensorLike:
    """What a tensor of a call looks like. `weight`: a parameter, which a pass finds in no cache."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    weight: bool

    @property
    def stored_bytes(self) -> int:
        """Bytes from its first to its last number."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return int((last + 1) * self.dtype.itemsize)

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

    def run(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Call it as modules do, if that takes the same arguments. An overload takes longer to parse them."""
        usual = _as_modules_call(self.function.overloadpacket.__name__)
        if usual is not None:
            with suppress(TypeError):
                return usual(*args, **kwargs)
        return self.function(*args, **kwargs)

    @property
    def writes(self) -> bool:
        """Whether it changes one of its tensors."""
        return bool(self.function._schema.is_mutable)


@cache
def _as_modules_call(name: str) -> Callable[..., Any] | None:
    return next(
        (f for f in (getattr(part, name, None) for part in (torch._C._nn, torch, torch.Tensor)) if f), None
    )


class Operands:
    """Tensors on a device for calls: weights that are in no cache, and one tensor for all that look alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[TensorLike, torch.Tensor] = {}
        self._of_writing: dict[OperationCall, tuple[Any, Any]] = {}
        self._cold = torch.empty(0, dtype=torch.uint8, device=device)
        self._at = 0

    def arguments(self, call: OperationCall) -> tuple[Any, Any]:
        """Arguments of a call. Its weights are others than those of the call before.

        A call that writes has tensors of its own, always the same, lest others find indices out of range.
        """
        if call in self._of_writing:
            return self._of_writing[call]
        args, kwargs = tree_unflatten([self._leaf(leaf, call) for leaf in call.leaves], call.structure)
        if call.writes:
            self._of_writing[call] = args, kwargs
        return args, kwargs

    def _leaf(self, leaf: Any, call: OperationCall) -> Any:  # noqa: ANN401
        if isinstance(leaf, torch.device):
            return self._device
        if not isinstance(leaf, TensorLike):
            return leaf
        if call.writes:
            return leaf.made(self._device)
        if leaf.weight:
            return self.weight(leaf)
        return self._shared(leaf)

    def _shared(self, like: TensorLike) -> torch.Tensor:
        if like not in self._made:
            self._made[like] = like.made(self._device)
        return self._made[like]

    def weight(self, like: TensorLike) -> torch.Tensor:
        """The next place of a buffer that is read in turn; the bits of halves are numbers in all dtypes.

        Whole numbers, which may be indices, have memory of their own.
        """
        if not like.dtype.is_floating_point:
            return self._shared(like)
        n_bytes = like.stored_bytes
        if self._cold.numel() < n_bytes + COLD_BYTES:
            halves = torch.empty((n_bytes + COLD_BYTES) // 2, dtype=torch.bfloat16, device=self._device)
            self._cold, self._at = halves.normal_(0.0, STD).view(torch.uint8), 0
        if self._at + n_bytes > self._cold.numel():
            self._at = 0
        stored = self._cold[self._at : self._at + n_bytes].view(like.dtype)
        self._at += (n_bytes // ALIGNED + 1) * ALIGNED  # apart: neighbours would be a loop's packed weights
        return stored.as_strided(like.shape, like.stride)


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Seconds on the device, and of the host's to launch it; bytes that it takes besides what it gives."""

    device_s: float
    host_s: float
    workspace: int
    recordable: bool = True  # in a graph


def measured(
    calls: Sequence[OperationCall], device: torch.device
) -> dict[OperationCall, OperationTime | None]:
    """The time of each distinct call of a pass. `calls`: all that launch kernels, in order.

    None where a call can't be run alone, as one whose numbers decide its shapes. On a GPU, torch's own
    statistics of peak memory begin anew.
    """
    with torch.inference_mode(), same_random_numbers(device):
        operands = Operands(device)
        times = {call: _time_of(call, operands, device) for call in dict.fromkeys(calls)}
        return times if device.type != "cuda" else _among_others(calls, times, operands, device)


def _among_others(
    calls: Sequence[OperationCall],
    times: dict[OperationCall, OperationTime | None],
    operands: Operands,
    device: torch.device,
) -> dict[OperationCall, OperationTime | None]:
    """The times as they are in a row; as they were if memory runs out."""
    row = [(call, seen) for call in calls if (seen := times[call]) is not None and seen.recordable]
    if not row:
        return times
    try:
        given = [(call, *operands.arguments(call)) for call, _ in row]
        device_s, host_s = _row_s(given, device)
    except RuntimeError:
        _synchronize(device)
        return times
    on_device, on_host = (
        _Shared(device_s, [s.device_s for _, s in row]),
        _Shared(host_s, [s.host_s for _, s in row]),
    )
    return {
        call: seen
        if seen is None or not seen.recordable
        else replace(seen, device_s=on_device(seen.device_s), host_s=on_host(seen.host_s))
        for call, seen in times.items()
    }


class _Shared:
    """What calls take in a row: each as much more than alone, or each by the same share less."""

    def __init__(self, row_s: float, alone_s: Sequence[float]) -> None:
        alone = sum(alone_s)
        self._more_s = max(row_s - alone, 0.0) / len(alone_s)
        self._share = min(row_s / alone, 1.0) if alone else 1.0

    def __call__(self, alone_s: float) -> float:
        return alone_s * self._share + self._more_s


def _row_s(given: Sequence[tuple[OperationCall, Any, Any]], device: torch.device) -> tuple[float, float]:
    """Seconds of the device and of the host for calls in a row.

    The host launches some at a time, so that it doesn't wait for the device.
    """

    def run(some: Sequence[tuple[OperationCall, Any, Any]]) -> None:
        for call, args, kwargs in some:
            call.run(args, kwargs)

    parts = [given[at : at + AT_ONCE] for at in range(0, len(given), AT_ONCE)]
    rounds = [sum(launching_s(partial(run, part), device) for part in parts) for _ in range(1 + ROUNDS)]
    replay = _recorded(partial(run, given))
    replay()
    return min(_device_s(replay) for _ in range(ROUNDS)), min(rounds[1:])


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Let random numbers come again afterwards, and give back memory that nobody holds by then."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # those of the stream that graphs were recorded on
        getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()
        torch.cuda.empty_cache()


def _time_of(call: OperationCall, operands: Operands, device: torch.device) -> OperationTime | None:
    try:
        workspace = _workspace(call, operands.arguments(call), device)
        count = -(-COLD_BYTES // call.weight_bytes) if call.weight_bytes >= COLD_FROM else 1
        sets = [operands.arguments(call) for _ in range(count)]
        return _times(call, sets, device, workspace)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        _synchronize(device)
        return None


def _workspace(call: OperationCall, given: tuple[Any, Any], device: torch.device) -> int:
    """Bytes taken at once during a call, besides its results. Libraries keep what the first call takes."""
    args, kwargs = given
    call.run(args, kwargs)
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = call.run(args, kwargs)
    peak, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del made
    return max(int(peak - max(kept, before)), 0)


def _times(
    call: OperationCall,
    sets: list[tuple[Any, Any]],
    device: torch.device,
    workspace: int,
) -> OperationTime:
    repeats = 0

    def several() -> None:
        for n in range(repeats):
            args, kwargs = sets[n % len(sets)]
            call.run(args, kwargs)

    repeats = len(sets)
    several()
    one_s = _finished_s(several, device) / repeats
    repeats = max(min(int(LONG_S / max(one_s, 1e-7)), MOST_REPEATS), len(sets))
    host_s = min(launching_s(several, device) for _ in range(ROUNDS)) / repeats
    if device.type != "cuda":
        return OperationTime(
            min(_finished_s(several, device) for _ in range(ROUNDS)) / repeats, 0.0, workspace
        )
    try:
        replay, recordable = _recorded(several), True
    except RuntimeError:  # it waits for the device
        _synchronize(device)
        replay, recordable = several, False
    replay()
    empty_s = min(_device_s(lambda: None) for _ in range(ROUNDS))
    device_s = min(_device_s(replay) for _ in range(ROUNDS)) - empty_s
    return OperationTime(max(device_s, 0.0) / repeats, host_s, workspace, recordable)


def _recorded(work: Callable[[], None]) -> Callable[[], None]:
    """The work as a graph. Raises RuntimeError for what waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def _device_s(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _finished_s(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of the host's clock, with what the device still does."""

    def finished() -> None:
        work()
        _synchronize(device)

    return launching_s(finished, device)


def launching_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the host's clock to hand work over to an idle device."""
    _synchronize(device)
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    _synchronize(device)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


SMALL_COPY: Final = 256 << 10  # bytes
LINK_ROUNDS: Final = 20  # of some 2 ms: others on the same host share its memory and its links


def link_times(host: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """Bytes a second of copies to the device, and the seconds that each takes beyond its bytes.

    `host`: 1-D, of bytes, pinned where a model's weights will be; some 64 MiB.
    """
    there = torch.empty_like(host, device=device)

    def copy_small() -> None:
        for _ in range(MOST_REPEATS):
            there[:SMALL_COPY].copy_(host[:SMALL_COPY], non_blocking=True)

    def least_s(work: Callable[[], object]) -> float:
        work()
        return min(_device_s(work) for _ in range(LINK_ROUNDS))

    large_s = least_s(lambda: there.copy_(host, non_blocking=True))
    small_s = least_s(copy_small) / MOST_REPEATS
    rate = (host.numel() - SMALL_COPY) / max(large_s - small_s, 1e-9)
    return rate, max(small_s - SMALL_COPY / rate, 0.0)
