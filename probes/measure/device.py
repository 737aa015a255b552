"""The workbench of probes by torch: buffers by kind, operations, clocks. Works for CUDA, HIP and the CPU.

On ROCm torch calls the GPU "cuda" too; nothing below differs.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from probes.core.errors import ProbeError, Unsupported
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware import numa
from probes.hardware.torch_build import first_line, refusals
from probes.measure import architectures, sampling
from probes.measure.class_work import class_work
from probes.measure.placement_row import LayerStack
from probes.measure.stacks import Shape, StackPlan
from probes.measure.workbench import (
    READS_AFTER,
    WORD_BYTES,
    WRITTEN,
    Action,
    ClassedWork,
    Clocked,
    Kind,
    Operation,
    Pattern,
    Span,
    signed,
)
from probes.placement.packing.launch import usable
from probes.placement.packing.tensors import pack, unpack
from probes.placement.runtime.host_memory import zero_copy
from probes.records.rows import SMALL_LAYERS, SMALL_WIDTH, ClassWork, SmallWork
from probes.records.stats import median

CHUNK_WORDS = 2**20  # compared at a time: 8 MiB of expected content, which fits even in a small container


class TorchSpan:
    """Pieces of a buffer, a row each: `seen` by operations, `home` where content is written and compared."""

    def __init__(
        self, seen: torch.Tensor, home: torch.Tensor, kind: Kind, *, first_word: int, stride_words: int
    ) -> None:
        self.seen, self.home, self.kind = seen, home, kind
        self.first_word, self.stride_words = first_word, stride_words

    @property
    def n_bytes(self) -> int:
        """Its length, of all pieces together."""
        return int(self.seen.numel()) * WORD_BYTES

    def against(self, pattern: Pattern) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of `home` of at most CHUNK_WORDS, each with the pattern's content there.

        That is one tensor, moved on from part to part: it can be read until the next part is asked for.
        """
        rows = self.home if self.home.dim() == 2 else self.home.unsqueeze(0)
        width = min(rows.shape[1], CHUNK_WORDS)
        height = max(CHUNK_WORDS // width, 1)
        content, at = rows[:0], 0
        for top in range(0, rows.shape[0], height):
            for left in range(0, rows.shape[1], width):
                part = rows[top : top + height, left : left + width]
                first = self.first_word + top * self.stride_words + left
                if content.shape == part.shape:
                    content.add_(signed(pattern.step * (first - at)))
                else:
                    content = _content(part, pattern, first_word=first, stride_words=self.stride_words)
                at = first
                yield part, content


class TorchMemory:
    """A buffer of one kind, as 64-bit words."""

    def __init__(self, kind: Kind, n_bytes: int, *, has_gpu: bool) -> None:
        self.kind, self.n_bytes = kind, n_bytes
        words = n_bytes // WORD_BYTES
        device = "cuda" if kind == "vram" and has_gpu else "cpu"
        pin = kind in ("pinned", "zero_copy") and has_gpu
        self._home = torch.empty(words, dtype=torch.int64, device=device, pin_memory=pin)
        self._seen = zero_copy(self._home) if kind == "zero_copy" and has_gpu else self._home

    def span(self, offset_bytes: int, n_bytes: int) -> TorchSpan:
        """A piece of it; both figures are multiples of 8."""
        first, end = offset_bytes // WORD_BYTES, (offset_bytes + n_bytes) // WORD_BYTES
        words = end - first
        return TorchSpan(
            self._seen[first:end], self._home[first:end], self.kind, first_word=first, stride_words=words
        )

    def spans(self, n_bytes: int, *, stride_bytes: int, count: int) -> TorchSpan:
        """The first `count` pieces of `n_bytes`, `stride_bytes` apart, from its beginning."""
        words, stride = n_bytes // WORD_BYTES, stride_bytes // WORD_BYTES
        seen, home = (t.as_strided((count, words), (stride, 1)) for t in (self._seen, self._home))
        return TorchSpan(seen, home, self.kind, first_word=0, stride_words=stride)

    def release(self) -> None:
        """Free the bytes, even if something still holds this object."""
        del self._home, self._seen


def _content(part: torch.Tensor, pattern: Pattern, *, first_word: int, stride_words: int) -> torch.Tensor:
    """The pattern's content in a part of rows `stride_words` apart that begins at `first_word`."""
    starts = torch.arange(part.shape[0], device=part.device).mul_(stride_words).add_(first_word)
    words = starts.unsqueeze(1) + torch.arange(part.shape[1], device=part.device)
    return words.mul_(signed(pattern.step)).add_(signed(pattern.start))


SHORTEST_LEAD_S, LONGEST_LEAD_S = 20e-6, 0.2
# The device is ahead when it has not even begun as the last operation is handed over. Where its queue is too
# short for that (about a thousand kernels), when so much of the sample is still to be done.
STILL_TO_DO = 0.1
BEATS, BEAT_WORDS = 5, 2**13  # 64 KiB


class TorchWorkbench:
    """`probes.measure.workbench.Workbench` on torch's first GPU, or on the CPU without one."""

    def __init__(self, *, has_gpu: bool, yield_turn: Callable[[], None] | None = None) -> None:
        self.has_gpu = has_gpu
        self._yield_turn = yield_turn
        self._small: tuple[torch.Tensor, torch.Tensor] | None = None
        self.ticks_per_s = 0.0
        if has_gpu:
            torch.cuda.init()
            host = torch.zeros(BEAT_WORDS, dtype=torch.int64, pin_memory=True)
            self._small = host, host.to("cuda")
            self.ticks_per_s = sampling.ticks_per_s(_timed_sleep)

    @contextmanager
    def memory(self, kind: Kind, n_bytes: int) -> Iterator[TorchMemory]:
        """A buffer, freed at the end. Raises OutOfMemory."""
        with refusals(f"{binary_bytes(n_bytes)} of {kind} memory"):
            memory = TorchMemory(kind, n_bytes, has_gpu=self.has_gpu)
        try:
            yield memory
        finally:
            memory.release()
            self._give_back()

    def _give_back(self) -> None:
        gc.collect()
        if self.has_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            # torch keeps freed pinned memory for later; older ones have no call that releases it
            getattr(torch._C, "_host_emptyCache", lambda: None)()

    def fill(self, span: Span, pattern: Pattern) -> None:
        """Write the pattern, indexed from the start of the span's buffer."""
        piece = _torch(span)
        if pattern.step == 0:
            piece.home.fill_(signed(pattern.start))
        else:
            for part, content in piece.against(pattern):
                part.copy_(content)
        self._finish()

    def matches(self, span: Span, pattern: Pattern) -> bool:
        """Compare every word with the pattern, in chunks."""
        self._finish()
        return all(torch.equal(part, content) for part, content in _torch(span).against(pattern))

    def words(self, span: Span) -> tuple[int, ...]:
        """The words as int64. For a few: they are copied one by one."""
        self._finish()
        return tuple(_torch(span).home.reshape(-1).tolist())

    def total(self, span: Span) -> int:
        """The sum of the words as int64, read where the device reads."""
        return int(_torch(span).seen.sum().item())

    def operation(self, action: Action, target: Span | None, source: Span | None) -> Operation:
        """The action, ready to be repeated; see `probes.measure.workbench.Workbench`."""
        to = _torch(target) if target else None
        of = _torch(source) if source else None
        if action == "write" and to:
            return partial(to.seen.fill_, signed(WRITTEN.start))
        if action == "read" and to and of:
            return partial(torch.sum, of.seen, 0, out=to.seen[0])
        if action == "kernel_copy" and to and of:
            return partial(torch.add, of.seen, 1, out=to.seen)
        if action in ("copy", "copy_then_read") and to and of:
            # a copy to pageable memory that claims not to block may not be there when the next line reads it
            queued = "pageable" not in (to.kind, of.kind)
            copy = partial(to.home.copy_, of.home, non_blocking=queued)
            if action == "copy":
                return copy
            read = partial(torch.sum, to.seen)
            return lambda: (copy(), [read() for _ in range(READS_AFTER)])
        raise ProbeError(f"the action {action} lacks a side")

    def device_s(self, operations: Sequence[Operation], *, lead_s: float) -> Clocked | None:
        """Seconds between device events around the operations, queued behind a wait of `lead_s`."""
        if not self.has_gpu:
            return None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.wait(lead_s)
        start.record()
        for operation in operations:
            operation()
        waiting = not start.query()
        handed = time.perf_counter()
        end.record()
        end.synchronize()
        left_s = time.perf_counter() - handed
        seconds = float(start.elapsed_time(end)) / 1e3
        return Clocked(seconds, ahead=waiting or left_s >= STILL_TO_DO * seconds)

    def wait(self, seconds: float) -> None:
        """Let the device do nothing for a while; the host goes on. With 0 seconds there is no wait."""
        if seconds > 0:
            torch.cuda._sleep(int(min(max(seconds, SHORTEST_LEAD_S), LONGEST_LEAD_S) * self.ticks_per_s))

    def wall_s(self, operations: Sequence[Operation]) -> float:
        """Seconds of the host's clock, everything finished before and after."""
        self._finish()
        began = time.perf_counter()
        for operation in operations:
            operation()
        self._finish()
        return time.perf_counter() - began

    @property
    def in_turns(self) -> bool:
        """Whether a rest is the other side's turn to measure."""
        return self._yield_turn is not None

    def rest(self, seconds: float) -> None:
        """Do nothing for a while, or let the other side measure."""
        if self._yield_turn:
            self._yield_turn()
        else:
            time.sleep(seconds)

    def queue_s(self, operation: Operation) -> float:
        """Seconds that the host needs to hand the operation to the device, without its end."""
        self._finish()
        began = time.perf_counter()
        operation()
        handed = time.perf_counter() - began
        self._finish()
        return handed

    def numa_nodes(self) -> tuple[int | Unknown, int | Unknown]:
        """The NUMA nodes on which a page of pinned and a page of pageable memory are placed."""
        pageable = torch.ones(BEAT_WORDS, dtype=torch.int64)
        pinned = self._small[0].data_ptr() if self._small else None
        return (
            Unknown("no GPU to pin memory for") if pinned is None else numa.node_of(pinned),
            numa.node_of(pageable.data_ptr()),
        )

    def vram_free_bytes(self) -> int:
        """Free VRAM by the driver's account. 0 without a GPU."""
        return int(torch.cuda.mem_get_info()[0]) if self.has_gpu else 0

    def foreign_vram_bytes(self) -> int:
        """VRAM in use that isn't this process's: other programs', and what its context takes."""
        free, total = torch.cuda.mem_get_info()
        return int(total) - int(free) - int(torch.cuda.memory_reserved())

    def small_latencies_s(self) -> tuple[float, float] | None:
        """Seconds from call to end of a small kernel and of a small copy, the middle one of a few each."""
        if self._small is None:
            return None
        host, device = self._small
        kernel, copy = partial(device.add_, 1), partial(device.copy_, host, non_blocking=True)
        medians = [median([self.wall_s([operation]) for _ in range(BEATS)]) for operation in (kernel, copy)]
        return medians[0], medians[1]

    def small(self, name: SmallWork) -> Operation:
        """Small work on the GPU, ready to be repeated. Raises Unsupported where torch can't do it."""
        try:
            made: Operation = torch.inference_mode()(_SMALL[name](torch.device("cuda", 0)))
            made()
            self._finish()
        except RuntimeError as error:  # a library without kernels for this card
            raise Unsupported(first_line(error)) from error
        return made

    def class_work(self, name: ClassWork) -> ClassedWork:
        """Operations of one class on the GPU, else on the CPU. Raises Unsupported."""
        try:
            with torch.inference_mode():
                work = class_work(name, torch.device("cuda", 0) if self.has_gpu else torch.device("cpu"))
                work.operation()
                self._finish()
        except RuntimeError as error:  # as for small work, or no memory for it
            raise Unsupported(first_line(error)) from error
        return work

    def cap_vram(self, n_bytes: int) -> None:
        """Let torch's allocator refuse beyond this many bytes, as a smaller card would."""
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(n_bytes / total, 1.0))

    def shape(self, model: str, *, dtype: str, width: int) -> Shape:
        """A model's shape, for the plan. Raises Unsupported when this image can't build it."""
        return architectures.shape(model, dtype=dtype, width=width)

    @contextmanager
    def stack(self, plan: StackPlan, seed: int) -> Iterator[LayerStack]:
        """The model of the scenarios, all weights in VRAM."""
        with refusals(f"a model of {binary_bytes(plan.weight_bytes)}"):
            stack = LayerStack(plan, seed, zero_copy=zero_copy if self.has_gpu else None, wait=self.wait)
        try:
            yield stack
        finally:
            stack.release()
            self._give_back()

    def _finish(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


def _torch(span: Span) -> TorchSpan:
    assert isinstance(span, TorchSpan)  # a workbench is only ever handed its own spans
    return span


def _small_layers(device: torch.device) -> Operation:
    layers = architectures.plain_layers(SMALL_LAYERS, 256, heads=4, dtype=torch.float16, device=str(device))
    return partial(layers, torch.randn(1, 16, 256, device=device, dtype=torch.float16))


def _small_product(device: torch.device) -> Operation:
    weight, row = (torch.randn(n, SMALL_WIDTH, device=device, dtype=torch.float16) for n in (SMALL_WIDTH, 1))
    return partial(torch.nn.functional.linear, row, weight)


def _small_unpack(device: torch.device) -> Operation:
    if not usable(device):
        raise Unsupported("no kernel unpacks on this GPU")
    weight = torch.randn(SMALL_WIDTH, SMALL_WIDTH, device=device).to(torch.bfloat16)
    packed = pack(weight)
    assert packed is not None
    return partial(unpack, packed, torch.empty_like(weight))


_SMALL: Final = {"layers": _small_layers, "product": _small_product, "unpack": _small_unpack}


def _timed_sleep(ticks: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(ticks)
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)) / 1e3, 1e-6)
