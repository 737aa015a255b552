"""Measures one level: drives the load until windows agree. Uses only the running loop's clock."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from probes.throughput.served.client.arrivals import poisson
from probes.throughput.served.client.driving import GOOD, MakeCaller, Note, closed_loop, open_loop
from probes.throughput.served.servedscan import Level, ServedSettings, Window
from probes.throughput.served.stability import disagreement
from probes.throughput.served.tallying import Load, level_of, window_of

WARM_UP = 0.5  # of a window, before the first one begins
FEWEST = 20  # answers of a window, which is made up to five times as long for them
LONGEST = 5
_TURNS_S = 0.001  # for answers that came together to be noted


class _Ledger:
    """The notes of a level, when its requests were due, and a sign for each good answer."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.dues: list[float] = []
        self.good = asyncio.Event()
        self.n_good = 0
        self.last_good_s = 0.0  # when the last of them came

    def add(self, note: Note) -> None:
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
class _Span:
    """The windows so far: their bounds and what was seen in each as it ended."""

    bounds: list[tuple[float, float]]
    windows: list[Window]
    why: str = "no window measured"
    busy_share: float = 0.0


async def measure_level(
    load: Load,
    make: MakeCaller,
    settings: ServedSettings,
    *,
    busy_s: Callable[[], float],
    early_s: Callable[[float], float] = lambda _rate: 0.0,
) -> Level:
    """One level. `busy_s`: for how long the client's loop has worked so far.

    `early_s`: how long before an arrival to be awake, by the rate; a real clock's timers wake late.
    """
    ledger, stop = _Ledger(), asyncio.Event()
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
    make: MakeCaller,
    settings: ServedSettings,
    ledger: _Ledger,
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
    load: Load, settings: ServedSettings, ledger: _Ledger, busy_s: Callable[[], float]
) -> _Span:
    """Windows until they agree, or as many as are allowed."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(WARM_UP * settings.window_s)
    at = len(ledger.notes)
    begin = first = await _boundary(load, settings, ledger)
    span, busy_before = _Span([], []), busy_s()
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


async def _window(settings: ServedSettings, ledger: _Ledger) -> None:
    """As long as a window is, and until it has some answers."""
    before = ledger.n_good
    await asyncio.sleep(settings.window_s)
    for _ in range(LONGEST - 1):
        if ledger.n_good - before >= FEWEST or ledger.hopeless:
            return
        await asyncio.sleep(settings.window_s)


async def _boundary(load: Load, settings: ServedSettings, ledger: _Ledger) -> float:
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
