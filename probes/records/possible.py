"""What a report from outside holds that no run can have measured: found before it is computed with."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from probes.errors import ReportError
from probes.shared.codec import shown

_TIMES = ("wall_s", "device_s", "read_s")
_LONGEST_S = 1e9  # 30 years
_SIZES = ("payload_bytes", "n_bytes", "batch", "rows")  # of what was measured, so not zero


def require_possible(started: str, runs: Iterable[Sequence[object]]) -> None:
    """Check the beginning of a report and the records of its runs. Raises ReportError naming the place."""
    require_moment(started)
    for i, records in enumerate(runs):
        for j, record in enumerate(records):
            if why := impossible(record):
                raise ReportError(f"report.runs[{i}].records[{j}].{why}")


def require_moment(started: str) -> None:
    """A report's beginning is a time that computers count. Raises ReportError."""
    try:
        datetime.fromisoformat(started).timestamp()
    except (ValueError, OverflowError):
        raise ReportError(f"report.started: expected a date and time, found {shown(started)}") from None


def impossible(record: object) -> str:
    """What no measurement gives: no samples, negative, endless or mostly zero ones, no size.

    Empty for a record that is possible.
    """
    for name in _TIMES:
        samples = getattr(record, name, None)
        if isinstance(samples, tuple) and not _are_times(samples):
            return f"{name}: expected times, found {shown(list(samples))}"
    sizes = {name: getattr(record, name, 1) for name in _SIZES}
    return next((f"{name}: expected a size, found {size}" for name, size in sizes.items() if size < 1), "")


def _are_times(samples: tuple[float, ...]) -> bool:
    """Whether there are any, none of them negative or endless, and more than half of them aren't zero."""
    ordered = sorted(samples)
    return bool(ordered) and ordered[0] >= 0 < ordered[(len(ordered) - 1) // 2] and ordered[-1] < _LONGEST_S
