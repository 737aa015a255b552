"""When a level has been measured long enough: successive windows agree. Pure.

As perf_analyzer does: the last three windows' throughput and latency are each within a tolerance of their
mean. In an open loop the number of arrivals scatters by itself, so throughput is judged by what share of the
arrivals was answered.
"""

from collections.abc import Sequence

from probes.throughput.served.servedscan import Loop, Window


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
    found = []
    if (apart := spread(speeds)) > tolerance:
        found.append(f"throughput differs by {apart:.0%} between windows")
    if (apart := spread(medians)) > tolerance:
        found.append(f"latency {_direction(medians)} by {apart:.0%} between windows")
    return ", ".join(found)


def spread(values: Sequence[float]) -> float:
    """The largest distance from the mean, relative to it; 0 where all are 0."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def _direction(values: Sequence[float]) -> str:
    return "rises" if list(values) == sorted(values) else "differs"
