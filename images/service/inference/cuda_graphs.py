"""Passes recorded as CUDA graphs, one for each bucket of rows and tokens: one launch instead of hundreds.

A GPU computes a small batch in less time than the CPU takes to launch its kernels. A graph has a fixed shape,
so a batch is padded to its bucket. A batch without a bucket is computed without a graph.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from service.inference.buckets import Bucket, bucket_of, smaller
from service.inference.classifier import Encoded, Task

MAX_CAPTURE_S = 20.0  # after which no further shapes are captured
_MAX_SLOWER_IN_A_ROW = 12  # shapes whose graph was no faster; larger ones won't be either
_DRIVER_BYTES = 8 << 20  # for one graph in the driver; an H200 took under 5 MB, with its share of the pool
_TOLERANCE = (
    1e-3  # largest difference of a replay from the pass that it recorded; other kernels round otherwise
)

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]
# ids [rows, tokens], mask [rows, tokens], types [rows, tokens] -> probabilities, embeddings (each [rows, n])
Compute = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]

log = logging.getLogger("service")


class Recorder(Protocol):
    """Records and measures passes on a device. Raises RuntimeError, as torch does."""

    def record(self, run: Run) -> tuple[tuple[torch.Tensor, torch.Tensor], Callable[[], None]]:
        """Return what `run` returns, and a function that computes it again into the same memory."""
        ...

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call, until the device has finished; the best of a few."""
        ...

    def held(self) -> int:
        """Return the bytes of the device's memory that are in use."""
        ...

    def needed(self, run: Callable[[], object]) -> int:
        """Return the bytes of the device's memory that one call needs while it runs."""
        ...


class GraphRecorder:
    """Records CUDA graphs that share one memory pool, as only one of them runs at a time."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(place)

    def record(self, run: Run) -> tuple[tuple[torch.Tensor, torch.Tensor], Callable[[], None]]:
        """See `Recorder.record`."""
        torch.cuda.synchronize(self._place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()  # in a stream's first call, libraries allocate workspaces, which a graph may not do
            self._stream.synchronize()
            # Another thread may be computing with the model that this one replaces
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return outputs, graph.replay

    def seconds(self, run: Callable[[], object]) -> float:
        """See `Recorder.seconds`."""
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize(self._place)
            started = time.perf_counter()
            run()
            torch.cuda.synchronize(self._place)
            best = min(best, time.perf_counter() - started)
        return best

    def held(self) -> int:
        """See `Recorder.held`. Other processes' memory is included."""
        free, total = torch.cuda.mem_get_info(self._place)
        return int(total - free)

    def needed(self, run: Callable[[], object]) -> int:
        """See `Recorder.needed`."""
        torch.cuda.reset_peak_memory_stats(self._place)
        before = torch.cuda.memory_allocated(self._place)
        run()
        return int(torch.cuda.max_memory_allocated(self._place) - before)


@dataclass(frozen=True, eq=False)
class _Graph:
    inputs: torch.Tensor  # [rows, 1 + 2 * tokens]: see _packed
    outputs: tuple[torch.Tensor, torch.Tensor]
    replay: Callable[[], None]


@dataclass(eq=False)
class CapturedGraphs:
    """The recorded passes of one model. Used by one thread at a time.

    `n_bytes`: of the device's memory. `batches`: how many were replayed; `padding`: tokens that their buckets
    added.
    """

    graphs: Mapping[Bucket, _Graph] = field(default_factory=dict)
    n_bytes: int = 0
    batches: int = 0
    padding: int = 0

    def run(self, batch: Sequence[Encoded], task: Task) -> torch.Tensor | None:
        """Return probabilities or embeddings [rows, n] on the device, or None if no recorded shape holds the
        batch.

        Read them before the next call, which overwrites them.
        """
        width = max(len(row.ids) for row in batch)
        bucket = bucket_of(len(batch), width)
        graph = self.graphs.get(bucket) if bucket else None
        if bucket is None or graph is None:
            return None
        graph.inputs.copy_(_packed(batch, bucket))
        graph.replay()
        self.batches += 1
        self.padding += bucket.padded - len(batch) * width
        return graph.outputs[task == "embed"][: len(batch)]


def _packed(batch: Sequence[Encoded], bucket: Bucket) -> torch.Tensor:
    """Return a batch as one tensor [rows, 1 + 2 * tokens] (int64): each row's length, ids and types.

    Rows that only fill the bucket have one token, because attention over none would give NaN.
    """
    flat: list[int] = []
    for row in batch:
        n_free = bucket.tokens - len(row.ids)
        flat += (len(row.ids), *row.ids, *[0] * n_free)
        flat += (*row.types, *[0] * (bucket.tokens - len(row.types)))
    flat += (1, *[0] * (2 * bucket.tokens)) * (bucket.rows - len(batch))
    return torch.frombuffer(array("q", flat), dtype=torch.int64).view(bucket.rows, -1)


def _unpacked(inputs: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, mask and types, each [rows, tokens], of what `_packed` made."""
    positions = torch.arange(tokens, device=inputs.device)
    return inputs[:, 1 : tokens + 1], positions[None, :] < inputs[:, :1], inputs[:, tokens + 1 :]


def capture(
    compute: Compute, shapes: Iterable[Bucket], recorder: Recorder, *, place: str, max_bytes: int
) -> CapturedGraphs:
    """Record `compute` for these shapes, the smallest first, within `max_bytes` of the device's memory.

    A shape is kept if its replay gives the pass's results and is faster than the pass of the next smaller
    shape, because then it is faster for every batch that uses it. A failure ends capturing; the shapes
    captured before it are kept.
    """
    captured = CapturedGraphs()
    kept: dict[Bucket, _Graph] = {}
    seconds: dict[Bucket, float] = {}
    started, held = time.monotonic(), recorder.held()
    n_slower = in_a_row = 0
    for bucket in shapes:
        if in_a_row == _MAX_SLOWER_IN_A_ROW or time.monotonic() - started > MAX_CAPTURE_S:
            break
        left = max_bytes - captured.n_bytes
        try:
            graph, seconds[bucket], replay_s = _recorded(compute, bucket, recorder, place=place, left=left)
        except _TooLarge:
            log.info("no more shapes are captured: %d bytes of %d are left", left, max_bytes)
            break
        except (RuntimeError, _Differs) as error:
            reason = str(error).strip().partition("\n")[0]
            log.warning(
                "capturing %d rows of %d tokens failed: %s; other shapes are computed uncaptured",
                bucket.rows,
                bucket.tokens,
                reason,
            )
            break
        captured.n_bytes = max(captured.n_bytes, recorder.held() - held)
        if replay_s <= seconds.get(smaller(bucket), seconds[bucket]):
            kept[bucket] = graph
            in_a_row = 0
        else:
            n_slower, in_a_row = n_slower + 1, in_a_row + 1
    captured.graphs = kept
    log.info(
        "captured shapes=%d slower=%d bytes=%d capture_s=%.2f",
        len(kept),
        n_slower,
        captured.n_bytes,
        time.monotonic() - started,
    )
    return captured


class _Differs(Exception):
    """A replay gave other results than the pass that it recorded."""


class _TooLarge(Exception):
    """The pass may need more memory than is left."""


def _recorded(
    compute: Compute, bucket: Bucket, recorder: Recorder, *, place: str, left: int
) -> tuple[_Graph, float, float]:
    """Return a graph, and the seconds of a pass without and with it. Raises _TooLarge beyond `left` bytes."""
    with torch.inference_mode():
        row = Encoded(tuple(number % 4 for number in range(bucket.tokens)))
        shorter = Encoded(row.ids[: max(1, bucket.tokens // 2)])
        inputs = _packed([row] * (bucket.rows - 1) + [shorter], bucket).to(place)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            return compute(*_unpacked(inputs, bucket.tokens))

        expected = [output.clone() for output in run()]
        plain_s = recorder.seconds(run)
        # The graphs' common pool grows by that much at most, if nothing in it can be reused
        if recorder.needed(run) + _DRIVER_BYTES > left:
            raise _TooLarge
        outputs, replay = recorder.record(run)
        replay()
        for output, reference in zip(outputs, expected, strict=True):
            difference = float((output.float() - reference.float()).abs().max())
            if not difference <= _TOLERANCE:  # also for NaN
                raise _Differs(f"its replay differs by {difference:.2g}")
        return _Graph(inputs, outputs, replay), plain_s, recorder.seconds(replay)
