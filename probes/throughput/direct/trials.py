"""How a way's batch sizes are repeated: warm-up, trials with fresh inputs, the device alone, power. Pure.

The method is that of document 002 of the users: for each batch size n trials; before each, inputs are drawn
from a normal distribution outside the timed part; the timed part ends when the device has finished.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from probes.core.errors import OutOfMemory
from probes.core.unknown import Unknown
from probes.measure.sampling import MOST_WARMUPS, STEADY, WARMUPS, no_collection
from probes.records.stats import median
from probes.throughput.direct.results import BatchRow, End, Work, error_share

HOPELESS = 2.0  # times the longest: what the batch size before predicts isn't even begun
PATIENT = 4  # times as many trials as asked for, to come to the aim,
PATIENCE_S = 6.0  # or as many as fit in this, where trials are short: a slow spell lasts for seconds,
MOST_TRIALS = 20  # times as many as asked for at most
POWERED_S = 0.6  # driver counters of energy and utilisation move every 0.1 s or less


class Prepared(Protocol):
    """One batch size of a way, with its memory allocated."""

    def fresh(self) -> None:
        """Draw new inputs, where the way wants them."""

    def trial_s(self) -> float:
        """Seconds of one timed pass, finished before and after."""

    def pass_s(self) -> float | Unknown:
        """Seconds of the pass without copies, by the device's clock."""

    def work(self) -> Work | Unknown:
        """What one pass asks for."""

    def peak_bytes(self) -> int | Unknown:
        """The most memory so far."""

    def doubt(self) -> str:
        """What to doubt about the model's outputs; empty where there is nothing."""


class Runner(Protocol):
    """One way of running a model."""

    def at(self, batch: int) -> AbstractContextManager[Prepared]:
        """Memory for a batch size. Raises OutOfMemory, as everything within it may."""


class Gauges(Protocol):
    """What the driver counts about the device."""

    def joules(self) -> float | Unknown:
        """Return the energy used so far, in joules; only differences mean anything."""

    def busy_percent(self) -> float | Unknown:
        """What nvidia-smi and rocm-smi call utilisation."""


@dataclass(frozen=True)
class Repeats:
    """How often, and how long at most."""

    trials: int  # at least
    longest_s: float  # of a batch size's trials
    aim: float = 0.0  # repeat until the throughput's standard error is this share of it, but not for ever


@dataclass(frozen=True)
class SeriesEnd:
    """How a way ended."""

    tag: ClassVar[str] = "end"
    end: End
    reason: str = ""
    hint: str = ""


def rows(
    runner: Runner,
    batches: Sequence[int],
    repeats: Repeats,
    gauges: Gauges,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> Iterator[BatchRow | SeriesEnd]:
    """Every batch size that fits in memory and in time, then how it ended.

    Half of the trials are taken on the way up through the batch sizes and half on the way down, so that a
    drift of the machine hits all alike. Rows whose error is above the aim then get more trials, in turns. A
    row is sent again after each visit: the last one of a batch size counts (`scanned.latest`).
    """
    end, found = SeriesEnd("finished"), list[BatchRow]()
    for batch in batches:
        one = _first(runner, batch, repeats, gauges, last=found[-1] if found else None, now=now)
        if isinstance(one, SeriesEnd):
            end = one
            break
        yield one
        found.append(one)
    while any(more(row.wall_s, row.batch, repeats) for row in found):
        found.reverse()
        for place, row in enumerate(found):
            again = _again(runner, row, repeats)
            if isinstance(again, SeriesEnd):
                yield again
                return
            if again is not row:
                yield again
            found[place] = again
    yield end


def more(wall_s: Sequence[float], batch: int, repeats: Repeats) -> int:
    """How many trials a batch size's next visit takes; 0 when there are enough, or patience is at its end."""
    n, spent_s = len(wall_s), sum(wall_s)
    if n < repeats.trials:
        return repeats.trials - n
    most = (MOST_TRIALS if spent_s < PATIENCE_S else PATIENT) * repeats.trials
    if not repeats.aim or n >= most or spent_s >= repeats.longest_s:
        return 0
    return 0 if error_share(batch, wall_s) <= repeats.aim else min(max(n // 2, 1), most - n)


def _first(
    runner: Runner,
    batch: int,
    repeats: Repeats,
    gauges: Gauges,
    *,
    last: BatchRow | None,
    now: Callable[[], float],
) -> BatchRow | SeriesEnd:
    """A batch size's first visit, unless the one before predicts that its trials take too long."""
    ahead_s = median(last.wall_s) * batch / last.batch * repeats.trials if last else 0.0
    if ahead_s > HOPELESS * repeats.longest_s:
        return _too_long(batch, ahead_s, repeats)
    try:
        with runner.at(batch) as prepared, no_collection():
            return _row(prepared, batch, repeats, gauges, now=now)
    except OutOfMemory as error:
        return SeriesEnd("out of memory", f"batch {batch}: {error.message}", error.hint)


def _again(runner: Runner, row: BatchRow, repeats: Repeats) -> BatchRow | SeriesEnd:
    """The row with the trials that it still wants."""
    wanted = more(row.wall_s, row.batch, repeats)
    if not wanted:
        return row
    try:
        with runner.at(row.batch) as prepared, no_collection():
            _warm_up(prepared, repeats)
            return replace(row, wall_s=(*row.wall_s, *_trials(prepared, wanted)))
    except OutOfMemory as error:
        return SeriesEnd("out of memory", f"batch {row.batch}, measured again: {error.message}", error.hint)


def _apart(seconds: float, limit_s: float) -> tuple[str, str]:
    """Both in as few digits as show that the first is longer: `2.4` and `2`, not `2` and `2`."""
    limit = f"{limit_s:.10g}"
    for decimals in range(10):
        about = f"{seconds:.{decimals}f}"
        if float(about) > limit_s:
            break
    return about, limit


def _too_long(batch: int, seconds: float, repeats: Repeats) -> SeriesEnd:
    about, limit = _apart(seconds, repeats.longest_s)
    return SeriesEnd(
        "too long",
        f"{repeats.trials} trials of batch {batch} would take about {about} s, more than {limit} s",
        "for larger batches: --longest SECONDS, or fewer --trials",
    )


def _row(
    prepared: Prepared, batch: int, repeats: Repeats, gauges: Gauges, *, now: Callable[[], float]
) -> BatchRow | SeriesEnd:
    warm_s = _warm_up(prepared, repeats)
    if warm_s * repeats.trials > repeats.longest_s:
        return _too_long(batch, warm_s * repeats.trials, repeats)
    # in this order: by the end of the passes for the power gauge, a card has the clocks of lasting work
    joules, powered, busy = _power(prepared, gauges, now=now)
    walls = _trials(prepared, (repeats.trials + 1) // 2)
    peak_bytes = prepared.peak_bytes()  # of the trials alone
    return BatchRow(
        batch=batch,
        wall_s=walls,
        pass_s=prepared.pass_s(),
        work=prepared.work(),
        peak_bytes=peak_bytes,
        joules=joules,
        powered=powered,
        busy_percent=busy,
        doubt=prepared.doubt(),
    )


def _trials(prepared: Prepared, count: int) -> tuple[float, ...]:
    walls = []
    for _ in range(count):
        prepared.fresh()
        walls.append(prepared.trial_s())
    return tuple(walls)


def _warm_up(prepared: Prepared, repeats: Repeats) -> float:
    """Repeat until a pass is about as fast as the fastest so far; the fastest one's seconds."""
    taken: list[float] = []
    while len(taken) < WARMUPS or (taken[-1] > STEADY * min(taken) and len(taken) < MOST_WARMUPS):
        prepared.fresh()
        taken.append(prepared.trial_s())
        # the first pass of all loads kernels, on a GPU for half a second: it says nothing about the rest
        if len(taken) > 1 and min(taken) * repeats.trials > HOPELESS * repeats.longest_s:
            break
    return min(taken)


def _power(
    prepared: Prepared, gauges: Gauges, *, now: Callable[[], float]
) -> tuple[float | Unknown, int, float | Unknown]:
    """Joules of so many passes one after another with the same inputs, and utilisation meanwhile."""
    before = gauges.joules()
    if isinstance(before, Unknown) and isinstance(gauges.busy_percent(), Unknown):
        return before, 0, gauges.busy_percent()
    began_s, passes = now(), 0
    while now() - began_s < POWERED_S:
        prepared.trial_s()
        passes += 1
    after, busy = gauges.joules(), gauges.busy_percent()
    if isinstance(before, Unknown):
        return before, 0, busy
    if isinstance(after, Unknown):
        return after, 0, busy
    if after < before:
        return Unknown("the energy counter began again"), 0, busy
    return after - before, passes, busy
