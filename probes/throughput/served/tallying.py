"""From noted requests to windows and to a level. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from probes.records.stats import median, quantile
from probes.throughput.served.client.driving import GOOD, REFUSED, Note
from probes.throughput.served.servedscan import ClientSide, Count, Level, Loop, Window

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


def window_of(notes: Sequence[Note], dues: Sequence[float], begin_s: float, end_s: float) -> Window:
    """The window between two moments. `dues`: when requests were due, also those without a note yet."""
    good = [note for note in notes if note.outcome == GOOD and begin_s < note.ended_s <= end_s]
    return Window(
        round(end_s - begin_s, _DIGITS),
        sum(begin_s < due <= end_s for due in dues),
        len(good),
        median([note.ended_s - note.due_s for note in good]) if good else None,
    )


def level_of(
    load: Load, notes: Sequence[Note], windows: Sequence[Window], *, counted: tuple[float, float],
    unstable: str, busy_share: float,
) -> Level:  # fmt: skip
    """The level, of the requests that belong to the time `counted` (begin and end by the loop's clock)."""
    begin, end = counted
    closed = load.loop == "closed"
    mine = sorted(note for note in notes if begin < (note.ended_s if closed else note.due_s) <= end)
    good = [note for note in mine if note.outcome == GOOD]
    origin = [note.sent_s if closed else note.due_s for note in good]
    latency = [note.ended_s - from_s for note, from_s in zip(good, origin, strict=True)]
    refused = [note.ended_s - note.sent_s for note in mine if note.outcome == REFUSED]
    failed = Counter(note.outcome for note in mine if note.outcome not in (GOOD, REFUSED))
    return Level(
        loop=load.loop,
        callers=load.callers,
        rate_per_s=load.rate_per_s,
        seconds=round(end - begin, _DIGITS),
        answered=sum(note.outcome == GOOD and begin < note.ended_s <= end for note in notes),
        due_s=_rounded(from_s - begin for from_s in origin),
        waited_s=_rounded(() if closed else (note.sent_s - note.due_s for note in good)),
        latency_s=_rounded(latency),
        refused=len(refused),
        refused_median_s=round(median(refused), _DIGITS) if refused else None,
        failed=tuple(Count(what, n) for what, n in failed.most_common()),
        windows=tuple(windows),
        unstable=unstable,
        client=client_side(mine, latency, busy_share),
    )


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, _DIGITS) for value in values)


def client_side(notes: Sequence[Note], latency: Sequence[float], busy_share: float) -> ClientSide:
    """What the client cost, and whether it may have been the bottleneck."""
    late = [note.sent_s - note.due_s for note in notes if not note.queued] or [0.0]
    middle, p99 = median(late), quantile(late, 0.99)
    typical = median(latency) if latency else 0.0
    reasons = []
    if busy_share > BUSY:
        reasons.append(f"the client was busy {busy_share:.0%} of the time")
    if middle > max(LATE * typical, LATE_AT_LEAST_S):
        reasons.append(f"the client sent {middle * 1e3:.2g} ms late")
    queued = sum(note.queued for note in notes)
    return ClientSide(
        round(busy_share, 4), round(middle, _DIGITS), round(p99, _DIGITS), queued, ", ".join(reasons)
    )
