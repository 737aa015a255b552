"""The one thread that owns the device: it computes what the batcher decides, and runs canaries.

Callers are in the event loop. They `submit` rows and await a future. The thread hands a batch's results back
in one call, just before it waits or computes again: until then it holds the interpreter lock, and the event
loop that it has woken could only wait. Nothing can end a thread that hangs in a driver, so it is a daemon.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

from service.batching.batcher import Batch, Batcher, QueueFull, Wait
from service.batching.health import DeviceHealth
from service.errors import DeviceFault, RequestError, ServiceError

T = TypeVar("T")
Compute = Callable[[Sequence[Any]], Sequence[Any]]  # takes rows, returns a result for each

_AT_ONCE = 4  # requests answered in one turn of the event loop; each takes half a millisecond

log = logging.getLogger("service")


@dataclass(frozen=True)
class ComputedBatch:
    """A batch that was computed. `taken_s`, `started_s`: when, in monotonic seconds."""

    batch: Batch
    number: int
    taken_s: float
    started_s: float
    compute_s: float


@dataclass(frozen=True)
class Outcome:
    """A request's results, when its first batch began (monotonic), and the seconds of all its batches."""

    results: tuple[Any, ...]
    started_s: float
    compute_s: float
    batches: tuple[ComputedBatch, ...] = ()


@dataclass(eq=False)
class Job:
    """One request's rows on their way through the worker."""

    number: int
    compute: Compute
    rows: Sequence[Any]
    future: "asyncio.Future[Outcome]"
    results: list[Any] = field(default_factory=list)
    left: int = 0
    started_s: float = inf
    compute_s: float = 0.0
    batches: list[ComputedBatch] = field(default_factory=list)


class Worker:
    """Computes jobs in batches. Public methods are called in the event loop's thread."""

    def __init__(
        self,
        batcher: Batcher,
        health: DeviceHealth,
        *,
        canary: Callable[[], None],
        on_batch: Callable[[ComputedBatch], None] = lambda _batch: None,
    ) -> None:
        """`canary` raises when the device is at fault; it is called in the worker's thread, as computing is.

        `on_batch` is called in the event loop with each batch, after its requests have been answered.
        """
        self._batcher = batcher
        self.health = health
        self._canary = canary
        self._on_batch = on_batch
        self._jobs: dict[int, Job] = {}
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._changed = threading.Condition()
        self._busy_since_s: float | None = None
        self._idle_since_s = time.monotonic()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended_jobs: list[tuple[Job, Outcome | Exception]] = []  # not handed over yet
        self._computed: list[ComputedBatch] = []

    def start(self) -> None:
        """Start the thread unless it runs. Call it in the event loop; the first `submit` does.

        Raises ServiceError when it can't be started.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            start_thread(self._run, name="device")

    def stop(self) -> None:
        """Have the thread end after its current batch."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def submit(
        self,
        compute: Compute,
        rows: Sequence[Any],
        *,
        lengths: Sequence[int],
        group: Hashable,
        deadline_s: float = inf,
    ) -> Job:
        """Queue rows; the job's future gets their Outcome or an error. Raises RequestError (429, 503)."""
        self.start()
        if self.health.state == "lost":
            raise RequestError(503, "the device doesn't work", retry_after_s=5)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        job = Job(next(self._numbers), compute, rows, future, [None] * len(rows), len(rows))
        with self._changed:
            try:
                self._batcher.offer(
                    job.number, lengths, group=group, now_s=time.monotonic(), deadline_s=deadline_s
                )
            except QueueFull as error:
                message = "busy: too many tokens are waiting (limit: max_queue_tokens)"
                raise RequestError(429, message, retry_after_s=retry_after_s(error.drain_s)) from error
            self._jobs[job.number] = job
            self._changed.notify()
        return job

    def withdraw(self, job: Job) -> None:
        """Cancel a job: rows that haven't begun aren't computed."""
        with self._changed:
            self._batcher.withdraw(job.number)
            self._jobs.pop(job.number, None)
        job.future.cancel()

    def note_refusal(self) -> int:
        """Note that a request was refused because a limit was reached. Return its Retry-After in seconds."""
        with self._changed:
            self._batcher.note_refusal()
            return retry_after_s(self._batcher.drain_s(time.monotonic()))

    @property
    def load_share(self) -> float:
        """See `Batcher.load_share`."""
        return self._batcher.load_share

    def waiting(self) -> tuple[int, int]:
        """Return the numbers of requests and tokens that haven't begun."""
        with self._changed:
            return self._batcher.waiting_requests, self._batcher.waiting_tokens

    def watch(self) -> None:
        """Judge how long the running computation takes. Call it every second or so."""
        since_s = self._busy_since_s
        self.health.watch(0.0 if since_s is None else time.monotonic() - since_s)

    # ---- the worker's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                step = self._step()
            if step is None:
                return
            step()

    def _step(self) -> Callable[[], None] | None:
        """Wait for something to do and return it; None: end. The caller holds the lock."""
        while not self._stopping:
            now_s = time.monotonic()
            decision = self._decide(now_s)
            self._hand_over()
            if not isinstance(decision, float):
                return decision
            self._changed.wait(None if decision == inf else max(0.0, decision - now_s))
        self._hand_over()
        return None

    def _decide(self, now_s: float) -> Callable[[], None] | float:
        """Return what to do now, or until when to wait."""
        self._end_late(self._batcher.expire(now_s))
        batch: Batch | Wait = Wait()
        if self.health.state == "well":
            batch = self._batcher.next(now_s)
        elif self.health.state == "lost":
            self._end(
                list(self._jobs.values()), RequestError(503, "the device doesn't work", retry_after_s=5)
            )
        if isinstance(batch, Batch):
            return partial(self._run_batch, batch, [self._jobs[row.request] for row in batch.rows])
        canary_s = self.health.canary_at(self._idle_since_s)
        if canary_s <= now_s and batch.until_s == inf:  # no request waits for the device
            return self._run_canary
        return min(canary_s, batch.until_s)

    def _run_batch(self, batch: Batch, jobs: Sequence[Job]) -> None:
        taken_s = time.monotonic()
        rows = [job.rows[row.at] for job, row in zip(jobs, batch.rows, strict=True)]
        started_s = self._busy_since_s = time.monotonic()
        results: Sequence[Any] = ()
        error: Exception | None = None
        try:
            results = jobs[0].compute(rows)
        except RequestError as request_error:
            error = request_error
        except DeviceFault as fault:
            log.error("the device failed: %s", fault)
            self.health.fault(str(fault), time.monotonic())
            error = RequestError(503, "the device failed; it is being checked", retry_after_s=2)
        except Exception as bug:  # these requests end with it, the thread goes on
            error = bug
        ended_s = self._idle_since_s = time.monotonic()
        self._busy_since_s = None
        computed = ComputedBatch(batch, next(self._batches), taken_s, started_s, ended_s - started_s)
        with self._changed:
            self._batcher.finished(ended_s, ok=error is None)
            if error is not None:
                self._end(jobs, error)
            else:
                self._collect(computed, jobs, results)

    def _collect(self, computed: ComputedBatch, jobs: Sequence[Job], results: Sequence[Any]) -> None:
        self._computed.append(computed)
        for job in dict.fromkeys(jobs):
            job.started_s = min(job.started_s, computed.started_s)
            job.compute_s += computed.compute_s
            job.batches.append(computed)
        for job, row, result in zip(jobs, computed.batch.rows, results, strict=True):
            job.results[row.at] = result
            job.left -= 1
            if not job.left and job.number in self._jobs:
                del self._jobs[job.number]
                outcome = Outcome(tuple(job.results), job.started_s, job.compute_s, tuple(job.batches))
                self._ended_jobs.append((job, outcome))

    def _end(self, jobs: Sequence[Job], error: Exception) -> None:
        ended = [job for job in dict.fromkeys(jobs) if job.number in self._jobs]
        for job in ended:
            del self._jobs[job.number]
            self._batcher.withdraw(job.number)
        self._ended_jobs += [(job, error) for job in ended]

    def _end_late(self, numbers: Sequence[int]) -> None:
        late = [self._jobs.pop(number) for number in numbers if number in self._jobs]
        self._ended_jobs += [
            (job, RequestError(504, "the deadline passed before its turn came")) for job in late
        ]

    def _run_canary(self) -> None:
        self._busy_since_s = time.monotonic()
        error: str | None = None
        try:
            self._canary()
        except Exception as fault:  # any: the device didn't give the known result
            error = f"{type(fault).__name__}: {fault}"
        ended_s = self._idle_since_s = time.monotonic()
        self._busy_since_s = None
        before = self.health.state
        self.health.canary(error, ended_s)
        if error or before != self.health.state:
            log.warning("canary: %s; the device is %s", error or "passed", self.health.state)

    def _hand_over(self) -> None:
        ended, computed = self._ended_jobs, self._computed
        self._ended_jobs, self._computed = [], []
        if (ended or computed) and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, self._loop, ended, computed)

    # ---- the event loop's thread again ----------------------------------------------------------------

    def _settle(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: Sequence[tuple[Job, Outcome | Exception]],
        computed: Sequence[ComputedBatch],
    ) -> None:
        """Answer a few requests, and the rest in later turns, so that the loop isn't blocked."""
        for job, outcome in ended[:_AT_ONCE]:
            if job.future.done():
                continue
            if isinstance(outcome, Outcome):
                job.future.set_result(outcome)
            else:
                job.future.set_exception(outcome)
        if ended[_AT_ONCE:]:
            loop.call_soon(self._settle, loop, ended[_AT_ONCE:], computed)
        else:
            for batch in computed:
                loop.call_soon(self._on_batch, batch)  # after the answers are sent


def retry_after_s(drain_s: float | None) -> int:
    """Return Retry-After for a queue that takes `drain_s` seconds (None: unknown): at least 1, rounded up."""
    return max(1, -int(-(drain_s or 0.0) // 1))


# ---- threads --------------------------------------------------------------------------------------------


async def run_in_thread(work: Callable[[], T], *, name: str) -> T:
    """Run `work` in a thread of its own and return or raise what it does. Cancelling doesn't stop the thread.

    For work that uses torch: a pool's thread would slow the device's thread down. OpenMP keeps a team of
    threads for each thread that ever computed in parallel, until that thread ends. If there are more of them
    than CPUs, each sleeps while it waits instead of spinning, and a pass, which wakes its team 200 times,
    takes longer.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, work())
        except BaseException as error:  # the caller raises it
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    start_thread(run, name=name)
    return await future


def start_thread(work: Callable[[], None], *, name: str) -> None:
    """Start a daemon thread. Raises ServiceError where the system allows no more of them."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise ServiceError(
            f"the thread `{name}` can't be started: {error}",
            "allow more processes: compose's pids_limit, docker run --pids-limit, or ulimit -u",
        ) from error
