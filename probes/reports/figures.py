"""Figures as text: values with errors, times, bandwidths, sizes, and every field of a dataclass. Pure."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.records.stats import Summary, summarize

ERROR_DIGITS = 2  # significant digits of an error; its value is written to the same place
MOST_DECIMALS = 9


def with_error(value: float, error: float | None) -> str:
    """`4.8520 ± 0.0064`, both to the error's second digit; a value without error says why it has none."""
    if error is None:
        return f"{value:.4g} (one sample: no error)"
    if not math.isfinite(error) or error <= 0:
        return f"{value:.4g} ± {error:.2g}"
    decimals = min(MOST_DECIMALS, max(0, ERROR_DIGITS - 1 - math.floor(math.log10(error))))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def span(seconds: float, error_s: float | None = None, *, bare: bool = False) -> str:
    """A time with the unit that reads best; with its standard error unless `bare`."""
    factor, unit = next(
        ((f, name) for f, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if abs(seconds) * f >= 1.0),
        (1e9, "ns"),
    )
    if bare:
        return f"{seconds * factor:.3g} {unit}"
    return f"{with_error(seconds * factor, None if error_s is None else error_s * factor)} {unit}"


def figure(summary: Summary) -> str:
    """The figure of a row and its standard error, from samples in seconds."""
    return span(summary.median, summary.error)


@dataclass(frozen=True)
class Rate:
    """A bandwidth in GB/s (10^9 bytes/s), from a row's figure; `low` and `high` from its p95 and p5."""

    value: float
    error: float | None
    low: float
    high: float

    def __str__(self) -> str:
        return with_error(self.value, self.error)


def rate(n_bytes: int, times_s: Sequence[Sequence[float]]) -> Rate:
    """The bandwidth of moving this many bytes in the times that each process measured, error to first order.

    Raises ValueError for no samples.
    """
    summary = summarize(times_s)
    value = n_bytes / summary.median / 1e9
    return Rate(
        value=value,
        error=None if summary.error is None else value * summary.error / summary.median,
        low=n_bytes / summary.p95 / 1e9,
        high=n_bytes / summary.p5 / 1e9,
    )


def size(value: int | Unknown) -> str:
    """Bytes with a binary unit, whole numbers without decimals; or why they are unknown."""
    return str(value) if isinstance(value, Unknown) else binary_bytes(value).replace(".00 ", " ")


def text(value: object) -> str:
    """A plain value as a cell; unknown with its reason."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case None:
            return "none"
        case tuple():
            return ", ".join(map(text, value)) or "none"
        case _:
            return str(value)


def facts(value: object, name: str = "") -> list[tuple[str, str]]:
    """Every field of a dataclass and of those in it, as name and text."""
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        return [fact for i, item in enumerate(value) for fact in facts(item, f"{name} {i}")]
    if isinstance(value, Unknown) or not dataclasses.is_dataclass(value):
        return [(name, field_text(name, value))]
    inner = ((f"{name} {field.name}".strip(), field.name) for field in dataclasses.fields(value))
    return [fact for named, field in inner for fact in facts(getattr(value, field), named)]


def field_text(name: str, value: object) -> str:
    """The value of a field, by its name: bytes with a unit."""
    if name.endswith("_bytes") and isinstance(value, int | Unknown):
        return size(value)
    return text(value)
