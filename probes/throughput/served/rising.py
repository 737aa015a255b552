"""Which level comes next, and when there are enough. Pure."""

from collections.abc import Sequence

from probes.throughput.served.servedcurve import GROWTH, best, throughput
from probes.throughput.served.servedscan import Level, ServedSettings

SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)  # of the best closed-loop throughput
FLAT = 2  # levels in a row without growth
KEPT_UP = 0.9  # of the arrivals answered while they came: below it the queue grows without end
UNDER_WAY = 3  # requests that a server which keeps up may have at a level's end, however few arrived


def next_callers(levels: Sequence[Level], settings: ServedSettings) -> tuple[int | None, str]:
    """How many callers ask next: twice as many; None with the reason once throughput doesn't grow."""
    if not levels:
        return 1, ""
    last = levels[-1]
    if not last.answered:
        return None, f"with {last.callers} calling at once no answer was good: {ends_of(last)}"
    if _flat(levels) >= FLAT:
        return None, f"more callers than {_best_callers(levels)} don't raise throughput"
    if 2 * last.callers > settings.most_callers:
        return None, f"more callers than {settings.most_callers} weren't asked for"
    return 2 * last.callers, ""


def _best_callers(levels: Sequence[Level]) -> int:
    found = best(levels[: len(levels) - FLAT])
    return found.callers if found else 0


def _flat(levels: Sequence[Level]) -> int:
    """How many of the last levels in a row are no faster than one before them."""
    top, flat = 0.0, 0
    for level in levels:
        speed = throughput(level).value
        flat = 0 if speed > (1 + GROWTH) * top else flat + 1
        top = max(top, speed)
    return flat


def open_rates(closed: Sequence[Level], settings: ServedSettings) -> tuple[float, ...]:
    """The rates of the open loop, rising: those asked for, else shares of the best throughput."""
    if settings.rates_per_s:
        return tuple(sorted(settings.rates_per_s))
    fastest = best(closed)
    return () if fastest is None else tuple(share * throughput(fastest).value for share in SHARES)


def saturated(level: Level) -> str:
    """Why a higher rate would say nothing more; empty where it would."""
    arrived = sum(window.arrived for window in level.windows) or 1
    answered = sum(window.answered for window in level.windows)
    if not level.latency_s:
        return f"at {level.rate_per_s:.4g}/s no answer was good: {ends_of(level)}"
    if arrived - answered > max((1 - KEPT_UP) * arrived, UNDER_WAY):
        return f"at {level.rate_per_s:.4g}/s the server answered {answered / arrived:.0%} of what arrived"
    return ""


def ends_of(level: Level) -> str:
    """How requests ended that weren't answered well."""
    refused = [f"refused (429) {level.refused}"] if level.refused else []
    return ", ".join([*refused, *(f"{one.what} {one.requests}" for one in level.failed)]) or "none ended"
