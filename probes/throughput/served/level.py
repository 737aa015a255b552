"""Measures one level: drives the load until windows agree. Uses only the running loop's clock."""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from probes.records.stats import median, quantile
from probes.throughput.served.http import GOOD, REFUSED
from probes.throughput.served.load import MakeClient, RequestRecord, closed_loop, open_loop
from probes.throughput.served.results import ClientSide, Count, Level, Loop, ServedSettings, Window

BUSY = 0.7  # of a core: above it the client's own queue shows in the latencies
LATE = 0.1  # of the median latency
LATE_AT_LEAST_S = 0.0005
_DIGITS = 6  # microseconds


@dataclass(frozen=True)
class Load:
    """What one level asks for."""

    loop: Loop
    callers: int
    rate_per_s: float | None = None


def window_of(
    records: Sequence[RequestRecord], dues: Sequence[float], begin_s: float, end_s: float
) -> Window:
    """The window between two moments. `dues`: when requests were due, also those without a note yet."""
    good = [record for record in records if record.outcome == GOOD and begin_s < record.ended_s <= end_s]
    return Window(
        round(end_s - begin_s, _DIGITS),
        sum(begin_s < due <= end_s for due in dues),
        len(good),
        median([record.ended_s - record.due_s for record in good]) if good else None,
    )


def level_of(
    load: Load, records: Sequence[RequestRecord], windows: Sequence[Window], *, counted: tuple[float, float],
    unstable: str, busy_share: float,
) -> Level:  # fmt: skip
    """The level, of the requests that belong to the time `counted` (begin and end by the loop's clock)."""
    begin, end = counted
    closed = load.loop == "closed"
    counted_records = sorted(
        record for record in records if begin < (record.ended_s if closed else record.due_s) <= end
    )
    good = [record for record in counted_records if record.outcome == GOOD]
    origin = [record.sent_s if closed else record.due_s for record in good]
    latency = [record.ended_s - from_s for record, from_s in zip(good, origin, strict=True)]
    refused = [record.ended_s - record.sent_s for record in counted_records if record.outcome == REFUSED]
    failed = Counter(record.outcome for record in counted_records if record.outcome not in (GOOD, REFUSED))
    return Level(
        loop=load.loop,
        callers=load.callers,
        rate_per_s=load.rate_per_s,
        seconds=round(end - begin, _DIGITS),
        answered=sum(record.outcome == GOOD and begin < record.ended_s <= end for record in records),
        due_s=_rounded(from_s - begin for from_s in origin),
        waited_s=_rounded(() if closed else (record.sent_s - record.due_s for record in good)),
        latency_s=_rounded(latency),
        refused=len(refused),
        refused_median_s=round(median(refused), _DIGITS) if refused else None,
        failed=tuple(Count(what, n) for what, n in failed.most_common()),
        windows=tuple(windows),
        unstable=unstable,
        client=client_side(counted_records, latency, busy_share),
    )


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, _DIGITS) for value in values)


def client_side(records: Sequence[RequestRecord], latency: Sequence[float], busy_share: float) -> ClientSide:
    """What the client cost, and whether it may have been the bottleneck."""
    late = [record.sent_s - record.due_s for record in records if not record.queued] or [0.0]
    middle, p99 = median(late), quantile(late, 0.99)
    typical = median(latency) if latency else 0.0
    reasons = []
    if busy_share > BUSY:
        reasons.append(f"the client was busy {busy_share:.0%} of the time")
    if middle > max(LATE * typical, LATE_AT_LEAST_S):
        reasons.append(f"the client sent {middle * 1e3:.2g} ms late")
    queued = sum(record.queued for record in records)
    return ClientSide(
        round(busy_share, 4), round(middle, _DIGITS), round(p99, _DIGITS), queued, ", ".join(reasons)
    )


def disagreement(windows: Sequence[Window], loop: Loop, *, needed: int, tolerance: float) -> str:
    """Why the last `needed` windows don't agree yet; empty where they do."""
    last = windows[-needed:]
    if len(last) < needed:
        return f"{len(last)} of {needed} windows measured"
    medians = [window.median_s for window in last if window.median_s is not None]
    if len(medians) < needed:
        return "a window without a good answer"
    if loop == "closed":
        speeds = [window.answered / window.seconds for window in last]
    else:
        speeds = [window.answered / max(window.arrived, 1) for window in last]
    reasons = []
    if (apart := spread(speeds)) > tolerance:
        reasons.append(f"throughput differs by {apart:.0%} between windows")
    if (apart := spread(medians)) > tolerance:
        reasons.append(f"latency {_direction(medians)} by {apart:.0%} between windows")
    return ", ".join(reasons)


def spread(values: Sequence[float]) -> float:
    """The largest distance from the mean, relative to it; 0 where all are 0."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def _direction(values: Sequence[float]) -> str:
    return "rises" if list(values) == sorted(values) else "differs"


def poisson(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Endless due times in seconds from the start, the same for a seed. Raises ValueError for rate <= 0."""
    if rate_per_s <= 0:
        raise ValueError(f"a rate of {rate_per_s} a second")
    gaps = random.Random(seed)
    at = 0.0
    while True:
        at += gaps.expovariate(rate_per_s)
        yield at


WARM_UP = 0.5  # of a window, before the first one begins
FEWEST = 20  # answers of a window, which is made up to five times as long for them
LONGEST = 5
_TURNS_S = 0.001  # for answers that came together to be noted


class _Records:
    """The notes of a level, when its requests were due, and a sign for each good answer."""

    def __init__(self) -> None:
        self.notes: list[RequestRecord] = []
        self.dues: list[float] = []
        self.good = asyncio.Event()
        self.n_good = 0
        self.last_good_s = 0.0  # when the last of them came

    def add(self, note: RequestRecord) -> None:
        self.notes.append(note)
        if note.outcome == GOOD:
            self.n_good += 1
            self.last_good_s = note.ended_s
            self.good.set()

    @property
    def hopeless(self) -> bool:
        """Requests have ended, and none of them well."""
        return bool(self.notes) and not self.n_good

    def due(self, times: Iterator[float]) -> Iterator[float]:
        """The times, each kept when it is asked for."""
        for at in times:
            self.dues.append(at)
            yield at


@dataclass
class _Windows:
    """The windows so far: their bounds and what was seen in each as it ended."""

    bounds: list[tuple[float, float]]
    windows: list[Window]
    why: str = "no window measured"
    busy_share: float = 0.0


async def measure_level(
    load: Load,
    make: MakeClient,
    settings: ServedSettings,
    *,
    busy_s: Callable[[], float],
    early_s: Callable[[float], float] = lambda _rate: 0.0,
) -> Level:
    """One level. `busy_s`: for how long the client's loop has worked so far.

    `early_s`: how long before an arrival to be awake, by the rate; a real clock's timers wake late.
    """
    ledger, stop = _Records(), asyncio.Event()
    gc.collect()
    gc.disable()  # a collection would delay answers
    driving = asyncio.create_task(_load(load, make, settings, ledger, stop=stop, early_s=early_s))
    watching = asyncio.create_task(_windows(load, settings, ledger, busy_s))
    try:
        await asyncio.wait([driving, watching], return_when=asyncio.FIRST_COMPLETED)
        if driving.done():  # before the stop only a fault of ours ends it
            driving.result()
        span = await watching
        stop.set()
        await driving
    finally:
        watching.cancel()
        driving.cancel()
        gc.enable()
    counted = span.bounds[-settings.windows :]
    dues = ledger.dues if load.loop == "open" else [note.due_s for note in ledger.notes]
    return level_of(
        load,
        ledger.notes,
        [window_of(ledger.notes, dues, *bounds) for bounds in span.bounds],
        counted=(counted[0][0], counted[-1][1]),
        unstable=span.why,
        busy_share=span.busy_share,
    )


async def _load(
    load: Load,
    make: MakeClient,
    settings: ServedSettings,
    ledger: _Records,
    *,
    stop: asyncio.Event,
    early_s: Callable[[float], float],
) -> None:
    if load.loop == "closed":
        await closed_loop(make, load.callers, ledger.add, stop)
        return
    began = asyncio.get_running_loop().time()
    rate = load.rate_per_s or 0.0
    due = (began + at for at in poisson(rate, seed=settings.seed))
    await open_loop(
        make,
        ledger.due(due),
        ledger.add,
        stop,
        most=load.callers,
        patience_s=settings.limit_s,
        early_s=early_s(rate),
    )


async def _windows(
    load: Load, settings: ServedSettings, ledger: _Records, busy_s: Callable[[], float]
) -> _Windows:
    """Windows until they agree, or as many as are allowed."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(WARM_UP * settings.window_s)
    at = len(ledger.notes)
    begin = first = await _boundary(load, settings, ledger)
    span, busy_before = _Windows([], []), busy_s()
    for _ in range(settings.most_windows):
        await _window(settings, ledger)
        end = await _boundary(load, settings, ledger)
        span.bounds.append((begin, end))
        span.windows.append(window_of(ledger.notes[at:], ledger.dues, begin, end))
        begin, at = (
            end,
            max(0, len(ledger.notes) - load.callers),
        )  # answers at the bound may be noted after it
        span.why = disagreement(
            span.windows, load.loop, needed=settings.windows, tolerance=settings.tolerance
        )
        if not span.why or ledger.hopeless:
            break
    span.busy_share = (busy_s() - busy_before) / max(loop.time() - first, 1e-9)
    return span


async def _window(settings: ServedSettings, ledger: _Records) -> None:
    """As long as a window is, and until it has some answers."""
    before = ledger.n_good
    await asyncio.sleep(settings.window_s)
    for _ in range(LONGEST - 1):
        if ledger.n_good - before >= FEWEST or ledger.hopeless:
            return
        await asyncio.sleep(settings.window_s)


async def _boundary(load: Load, settings: ServedSettings, ledger: _Records) -> float:
    """Now; in a closed loop the next good answer, for batches end many at once and a window would cut one."""
    loop = asyncio.get_running_loop()
    if load.loop == "open":
        return loop.time()
    ledger.good.clear()
    try:
        async with asyncio.timeout(settings.window_s):
            await ledger.good.wait()
    except TimeoutError:
        return loop.time()
    end = ledger.last_good_s  # a refusal may have been noted after it
    await asyncio.sleep(_TURNS_S)
    return end
