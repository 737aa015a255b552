"""Metrics in Prometheus' text exposition format, version 0.0.4. Pure.

Base units, named in the metric (https://prometheus.io/docs/practices/naming): _seconds, _bytes.
The one exception shows it in its name: bandwidth in gigabytes (10^9 bytes) per second.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from probes.core.quoting import prometheus

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One sample of a gauge."""

    name: str
    labels: Labels
    value: float


def render_metrics(metrics: Iterable[Metric], helps: Mapping[str, str]) -> str:
    """The text of some metrics; of two samples with the same labels the later one stands."""
    values: dict[tuple[str, Labels], float] = {}
    for metric in metrics:
        if math.isfinite(metric.value):
            values[metric.name, metric.labels] = metric.value
    lines = []
    for name, help_text in helps.items():
        samples = [(labels, value) for (of, labels), value in values.items() if of == name]
        if samples:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_braces(labels)} {value!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{key}="{prometheus(value)}"' for key, value in labels) + "}" if labels else ""


def if_known(name: str, labels: Labels, value: object) -> Iterator[Metric]:
    """The metric, if its value is known."""
    if isinstance(value, int | float):
        yield Metric(name, labels, value)
