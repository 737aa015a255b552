"""Passes recorded as CUDA graphs, one for each bucket of rows and tokens: one launch instead of hundreds.

A GPU computes a small batch in less time than the CPU takes to launch its kernels. A graph is launched once,
for a shape that is fixed; so a batch is padded to its bucket. A batch without a bucket is computed as before.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from service.inference.buckets import Bucket, bucket_of, smaller
from service.inference.classifier import Encoded

MAX_CAPTURE_S = 20.0  # that capturing may take at the start; what isn't captured by then is computed without
_MAX_SLOWER_IN_A_ROW = 12  # shapes in a row that weren't worth it: larger ones are computed for longer still
_DRIVER_BYTES = 8 << 20  # for one graph in the driver; an H200 took under 5 MB, with its share of the pool
_TOLERANCE = (
    1e-3  # largest difference of a replay from the pass that it recorded; other kernels round otherwise
)

Task = Literal["classify", "embed"]
Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]
# ids [rows, tokens], mask [rows, tokens], types [rows, tokens] -> probabilities, embeddings (each [rows, n])
Compute = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]

log = logging.getLogger("service")


class Recorder(Protocol):
    """What records and measures on a device. Raises RuntimeError, as torch does."""

    def record(self, run: Run) -> tuple[tuple[torch.Tensor, torch.Tensor], Callable[[], None]]:
        """What `run` returns, and a function that computes it again into the same memory."""
        ...

    def seconds(self, run: Callable[[], object]) -> float:
        """What one call takes, until the device has computed it; the best of a few."""
        ...

    def held(self) -> int:
        """Bytes of the device's memory that are in use."""
        ...

    def needed(self, run: Callable[[], object]) -> int:
        """Bytes of the device's memory that one call takes while it runs."""
        ...


class GraphRecorder:
    """CUDA graphs that share one pool of memory: only one of them runs at a time. Satisfies `Recorder`."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(place)

    def record(self, run: Run) -> tuple[tuple[torch.Tensor, torch.Tensor], Callable[[], None]]:
        """See `Recorder.record`."""
        torch.cuda.synchronize(self._place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()  # libraries allocate their workspaces in a stream's first call, which no graph may do
            self._stream.synchronize()
            # Another thread may be answering with the model that this one replaces
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
        """See `Recorder.held`; other processes' memory counts too."""
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
    """The recorded passes of one model. Used by one thread at a time."""

    graphs: Mapping[Bucket, _Graph] = field(default_factory=dict)
    n_bytes: int = 0  # of the device's memory
    batches: int = 0  # that were replayed, and the tokens of padding that their buckets added
    padding: int = 0

    def run(self, batch: Sequence[Encoded], task: Task) -> torch.Tensor | None:
        """Probabilities or embeddings [rows, n] on the device, to be read before the next call.

        None where no recorded shape holds the batch.
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
    """A batch as one tensor [rows, 1 + 2 * tokens] (int64): each row's length, ids and types.

    Rows that only fill the bucket have one token: attention over none would give NaN.
    """
    flat: list[int] = []
    for row in batch:
        n_free = bucket.tokens - len(row.ids)
        flat += (len(row.ids), *row.ids, *[0] * n_free)
        flat += (*row.types, *[0] * (bucket.tokens - len(row.types)))
    flat += (1, *[0] * (2 * bucket.tokens)) * (bucket.rows - len(batch))
    return torch.frombuffer(array("q", flat), dtype=torch.int64).view(bucket.rows, -1)


def _unpacked(inputs: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    places = torch.arange(tokens, device=inputs.device)
    return inputs[:, 1 : tokens + 1], places[None, :] < inputs[:, :1], inputs[:, tokens + 1 :]


def capture(
    compute: Compute, shapes: Iterable[Bucket], recorder: Recorder, *, place: str, max_bytes: int
) -> CapturedGraphs:
    """Record `compute` for these shapes, the smallest first, within `max_bytes` of the device's memory.

    A shape is kept where its replay gives what the pass gives, and is quicker than the pass of the next
    smaller shape: then it is quicker for every batch that takes it. A fault ends capturing; the service
    goes on with what was captured before.
    """
    made = CapturedGraphs()
    kept: dict[Bucket, _Graph] = {}
    seconds: dict[Bucket, float] = {}
    started, held = time.monotonic(), recorder.held()
    n_slower = in_a_row = 0
    for bucket in shapes:
        if in_a_row == _MAX_SLOWER_IN_A_ROW or time.monotonic() - started > MAX_CAPTURE_S:
            break
        left = max_bytes - made.n_bytes
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
        made.n_bytes = max(made.n_bytes, recorder.held() - held)
        if replay_s <= seconds.get(smaller(bucket), seconds[bucket]):
            kept[bucket] = graph
            in_a_row = 0
        else:
            n_slower, in_a_row = n_slower + 1, in_a_row + 1
    made.graphs = kept
    log.info(
        "captured shapes=%d slower=%d bytes=%d capture_s=%.2f",
        len(kept),
        n_slower,
        made.n_bytes,
        time.monotonic() - started,
    )
    return made


class _Differs(Exception):
    """A replay gave something else than the pass that it recorded."""


class _TooLarge(Exception):
    """The pass may need more memory than is left."""


def _recorded(
    compute: Compute, bucket: Bucket, recorder: Recorder, *, place: str, left: int
) -> tuple[_Graph, float, float]:
    """A graph that takes at most `left` bytes, and the seconds of a pass without and with it."""
    with torch.inference_mode():
        row = Encoded(tuple(number % 4 for number in range(bucket.tokens)))
        shorter = Encoded(row.ids[: max(1, bucket.tokens // 2)])
        inputs = _packed([row] * (bucket.rows - 1) + [shorter], bucket).to(place)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            return compute(*_unpacked(inputs, bucket.tokens))

        expected = [each.clone() for each in run()]
        plain_s = recorder.seconds(run)
        # The graphs' common pool grows by that much at most, where nothing in it can be used again
        if recorder.needed(run) + _DRIVER_BYTES > left:
            raise _TooLarge
        outputs, replay = recorder.record(run)
        replay()
        for found, wanted in zip(outputs, expected, strict=True):
            apart = float((found.float() - wanted.float()).abs().max())
            if not apart <= _TOLERANCE:  # NaN isn't
                raise _Differs(f"its replay differs by {apart:.2g}")
        return _Graph(inputs, outputs, replay), plain_s, recorder.seconds(replay)
