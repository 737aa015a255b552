"""The one thread that owns the device: it computes what the batcher decides, and runs canaries.

Callers are in the event loop. They `submit` rows and await a future; the thread hands every batch's results
back in one call, as the last thing before it waits or computes again: until then it holds the interpreter,
and the event loop that it has woken could only wait for it. Nothing can end a thread that hangs in a driver,
so it is a daemon.
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


async def run_in_thread(work: Callable[[], T], *, name: str) -> T:
    """What `work` returns or raises. When the caller is cancelled, the thread goes on and nobody hears of it.

    For work that uses torch. OpenMP keeps a team of threads for each thread that ever computed in parallel,
    until that thread ends. While there are more of them than CPUs, each waits asleep instead of awake, and
    a pass of the device's own thread is slower by the time that it takes to wake its team 200 times. A
    thread of a pool lives on when its work is done, and so does its team.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, work())
        except BaseException as error:  # whatever it is, the caller has to hear of it
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    start_thread(run, name=name)
    return await future


def start_thread(work: Callable[[], None], *, name: str) -> None:
    """Start a thread that doesn't keep the process from ending. Raises ServiceError where none can be."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise ServiceError(
            f"the thread `{name}` can't be started: {error}",
            "allow more processes: compose's pids_limit, docker run --pids-limit, or ulimit -u",
        ) from error


Compute = Callable[[Sequence[Any]], Sequence[Any]]  # rows in, a result for each

_AT_ONCE = 4  # requests answered in one turn of the event loop; each takes it half a millisecond

log = logging.getLogger("service")


@dataclass(frozen=True)
class ComputedBatch:
    """A batch that was computed; when (monotonic seconds) it was taken and begun, and how long it took."""

    batch: Batch
    number: int
    taken_s: float
    started_s: float
    compute_s: float


@dataclass(frozen=True)
class Outcome:
    """A request's results, and when (monotonic seconds) the first of them began and how long they took."""

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
    """Computes jobs in batches. Public methods belong to the event loop's thread."""

    def __init__(
        self,
        batcher: Batcher,
        pulse: DeviceHealth,
        *,
        canary: Callable[[], None],
        on_batch: Callable[[ComputedBatch], None] = lambda _done: None,
    ) -> None:
        """`canary` raises when the device is at fault; it runs in the worker's thread, as computing does.

        `on_batch` hears of each batch in the event loop, once its requests have been answered.
        """
        self._batcher = batcher
        self.pulse = pulse
        self._canary = canary
        self._on_batch = on_batch
        self._jobs: dict[int, Job] = {}
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._changed = threading.Condition()
        self._busy_since_s: float | None = None
        self._idle_since_s = time.monotonic()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: list[tuple[Job, Outcome | Exception]] = []  # not handed over yet
        self._done: list[ComputedBatch] = []

    def start(self) -> None:
        """Start the thread, unless it runs. Call it in the event loop; the first `submit` does.

        Raises ServiceError where there can't be one.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            start_thread(self._run, name="device")

    def stop(self) -> None:
        """Let the thread end after what it computes now."""
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
        if self.pulse.state == "lost":
            raise RequestError(503, "the device doesn't work", retry_after_s=5)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        job = Job(next(self._numbers), compute, rows, future, [None] * len(rows), len(rows))
        with self._changed:
            try:
                self._batcher.offer(
                    job.number, lengths, group=group, now_s=time.monotonic(), deadline_s=deadline_s
                )
            except QueueFull as error:
                raise RequestError(
                    429, "busy: too many tokens are waiting", retry_after_s=retry_after_s(error.drain_s)
                ) from error
            self._jobs[job.number] = job
            self._changed.notify()
        return job

    def withdraw(self, job: Job) -> None:
        """Nobody waits for this job any more; what hasn't begun of it won't."""
        with self._changed:
            self._batcher.withdraw(job.number)
            self._jobs.pop(job.number, None)
        job.future.cancel()

    def refused(self) -> int:
        """A request was refused for want of a place: in how many whole seconds, at least 1, there is some."""
        with self._changed:
            self._batcher.refused()
            return retry_after_s(self._batcher.drain_s(time.monotonic()))

    @property
    def room(self) -> float:
        """The share of all places that may be taken now."""
        return self._batcher.room

    def waiting(self) -> tuple[int, int]:
        """Requests and tokens that haven't begun."""
        with self._changed:
            return self._batcher.waiting_requests, self._batcher.waiting_tokens

    def watch(self) -> None:
        """Judge how long the running computation takes. To be called every second or so."""
        since_s = self._busy_since_s
        self.pulse.watch(0.0 if since_s is None else time.monotonic() - since_s)

    # ---- the worker's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                step = self._step()
            if step is None:
                return
            step()

    def _step(self) -> Callable[[], None] | None:
        """What to do next, waiting for it if need be; None: end. Holds the lock."""
        while not self._stopping:
            now_s = time.monotonic()
            decided = self._decide(now_s)
            self._hand_over()
            if not isinstance(decided, float):
                return decided
            self._changed.wait(None if decided == inf else max(0.0, decided - now_s))
        self._hand_over()
        return None

    def _decide(self, now_s: float) -> Callable[[], None] | float:
        """What to do now, or until when to wait."""
        self._end_late(self._batcher.expire(now_s))
        decided: Batch | Wait = Wait()
        if self.pulse.state == "well":
            decided = self._batcher.next(now_s)
        elif self.pulse.state == "lost":
            self._fail_all("the device doesn't work")
        if isinstance(decided, Batch):
            return partial(self._run_batch, decided, [self._jobs[row.request] for row in decided.rows])
        canary_s = self.pulse.canary_at(self._idle_since_s)
        if canary_s <= now_s and decided.until_s == inf:  # nobody waits for the device
            return self._run_canary
        return min(canary_s, decided.until_s)

    def _run_batch(self, batch: Batch, jobs: Sequence[Job]) -> None:
        taken_s = time.monotonic()
        rows = [job.rows[row.at] for job, row in zip(jobs, batch.rows, strict=True)]
        started_s = self._busy_since_s = time.monotonic()
        results: Sequence[Any] = ()
        error: Exception | None = None
        try:
            results = jobs[0].compute(rows)
        except RequestError as refused:
            error = refused
        except DeviceFault as fault:
            log.error("the device failed: %s", fault)
            self.pulse.fault(str(fault), time.monotonic())
            error = RequestError(503, "the device failed; it is being checked", retry_after_s=2)
        except Exception as other:  # our own fault: these requests end with it, the thread goes on
            error = other
        ended_s = self._idle_since_s = time.monotonic()
        self._busy_since_s = None
        done = ComputedBatch(batch, next(self._batches), taken_s, started_s, ended_s - started_s)
        with self._changed:
            self._batcher.finished(ended_s, ok=error is None)
            if error is not None:
                self._end(jobs, error)
            else:
                self._collect(done, jobs, results)

    def _collect(self, done: ComputedBatch, jobs: Sequence[Job], results: Sequence[Any]) -> None:
        self._done.append(done)
        for job in dict.fromkeys(jobs):
            job.started_s = min(job.started_s, done.started_s)
            job.compute_s += done.compute_s
            job.batches.append(done)
        for job, row, result in zip(jobs, done.batch.rows, results, strict=True):
            job.results[row.at] = result
            job.left -= 1
            if not job.left and job.number in self._jobs:
                del self._jobs[job.number]
                outcome = Outcome(tuple(job.results), job.started_s, job.compute_s, tuple(job.batches))
                self._ended.append((job, outcome))

    def _end(self, jobs: Sequence[Job], error: Exception) -> None:
        ended = [job for job in dict.fromkeys(jobs) if job.number in self._jobs]
        for job in ended:
            del self._jobs[job.number]
            self._batcher.withdraw(job.number)
        self._ended += [(job, error) for job in ended]

    def _end_late(self, numbers: Sequence[int]) -> None:
        late = [self._jobs.pop(number) for number in numbers if number in self._jobs]
        self._ended += [(job, RequestError(504, "the deadline passed before its turn came")) for job in late]

    def _fail_all(self, why: str) -> None:
        self._end(list(self._jobs.values()), RequestError(503, why, retry_after_s=5))

    def _run_canary(self) -> None:
        self._busy_since_s = time.monotonic()
        error: str | None = None
        try:
            self._canary()
        except Exception as fault:  # whatever it is, the device didn't give the known result
            error = f"{type(fault).__name__}: {fault}"
        ended_s = self._idle_since_s = time.monotonic()
        self._busy_since_s = None
        before = self.pulse.state
        self.pulse.canary(error, ended_s)
        if error or before != self.pulse.state:
            log.warning("canary: %s; the device is %s", error or "passed", self.pulse.state)

    def _hand_over(self) -> None:
        ended, done, self._ended, self._done = self._ended, self._done, [], []
        if (ended or done) and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, self._loop, ended, done)

    # ---- the event loop's thread again ----------------------------------------------------------------

    def _settle(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: Sequence[tuple[Job, Outcome | Exception]],
        done: Sequence[ComputedBatch],
    ) -> None:
        """A few at a time, so that others are heard between a batch's answers."""
        for job, outcome in ended[:_AT_ONCE]:
            if job.future.done():
                continue
            if isinstance(outcome, Outcome):
                job.future.set_result(outcome)
            else:
                job.future.set_exception(outcome)
        if ended[_AT_ONCE:]:
            loop.call_soon(self._settle, loop, ended[_AT_ONCE:], done)
        else:
            for each in done:
                loop.call_soon(self._on_batch, each)  # after those who were answered just now


def retry_after_s(drain_s: float | None) -> int:
    """Retry-After for a queue that takes `drain_s` seconds: whole seconds, at least 1, also where unknown."""
    return max(1, -int(-(drain_s or 0.0) // 1))
