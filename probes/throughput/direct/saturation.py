"""Which part of a trial each resource needs at its ceiling, and which one binds. Pure.

Each share is the time that a resource would need by itself, at this machine's measured ceiling, over the time
that a trial took: a resource at 100 % can't go faster. Shares don't add up to one, as resources work at the
same time. What the driver calls utilisation is none of these: it counts time in which any kernel runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from probes.shared.unknown import Unknown
from probes.throughput.ceilings.ceiling import Ceiling, Ceilings, DeviceCeilings
from probes.throughput.direct.figures import latency_s
from probes.throughput.direct.scanned import BatchRow, Way, Work

Resource = Literal["compute", "memory", "link", "host", "none"]
BINDS = 0.5  # of a trial: a resource that needs less doesn't explain its length
AUTOCAST = {"gpu": "fp16", "cpu": "bf16"}  # torch's default dtype of autocast
CROSSES = ("copied", "pinned", "in-place")  # inputs that go over the link in every trial


@dataclass(frozen=True)
class Saturation:
    """Shares of a trial's time."""

    compute: float | Unknown
    memory: float | Unknown  # by the model that every operation reads and writes memory
    link: float | Unknown
    host: (
        float | Unknown
    )  # in which the device waits for the host, or the host's own work where it has no clock
    binds: Resource

    def share(self, resource: Resource) -> float | Unknown:
        """One of the shares."""
        found: float | Unknown = getattr(self, resource, Unknown("nothing binds"))
        return found


def saturation(row: BatchRow, way: Way, ceilings: Ceilings | Unknown) -> Saturation:
    """The shares of one batch size. What lacks a ceiling or a count is unknown with the reason."""
    on = ceilings if isinstance(ceilings, Unknown) else ceilings.on(way.device)
    trial_s = latency_s(row)[0]
    crossing = way.device == "gpu" and way.inputs in CROSSES
    link = _share(row, on, lambda work: work.input_bytes, lambda d: d.to_device, trial_s) if crossing else 0.0
    shares: dict[Resource, float | Unknown] = {
        "compute": _share(row, on, lambda work: work.flop, lambda d: d.flops(arithmetic(way)), trial_s),
        "memory": _share(row, on, lambda work: work.op_bytes, lambda d: d.memory, trial_s),
        "link": link,
        "host": _host(row, on, trial_s, link),
    }
    known: dict[Resource, float] = {name: x for name, x in shares.items() if not isinstance(x, Unknown)}
    largest = max(known, key=lambda name: known[name]) if known else "none"
    return Saturation(
        compute=shares["compute"],
        memory=shares["memory"],
        link=shares["link"],
        host=shares["host"],
        binds=largest if known.get(largest, 0.0) >= BINDS else "none",
    )


def arithmetic(way: Way) -> str:
    """The precision whose ceiling a way is compared with."""
    return AUTOCAST[way.device] if way.precision == "autocast" else way.precision


def _share(
    row: BatchRow,
    on: DeviceCeilings | Unknown,
    of: Callable[[Work], float],
    ceiling: Callable[[DeviceCeilings], Ceiling | Unknown],
    trial_s: float,
) -> float | Unknown:
    if isinstance(row.work, Unknown):
        return row.work
    if isinstance(on, Unknown):
        return on
    found = ceiling(on)
    return found if isinstance(found, Unknown) else of(row.work) / found.median / trial_s


def _host(
    row: BatchRow, on: DeviceCeilings | Unknown, trial_s: float, link: float | Unknown
) -> float | Unknown:
    """By the device's clock: what a trial takes beyond the pass and the copy. Else by counted operations."""
    if isinstance(row.pass_s, Unknown):
        return _share(row, on, lambda work: work.operations, lambda d: d.launches, trial_s)
    copied = 0.0 if isinstance(link, Unknown) else link
    return max(1.0 - row.pass_s / trial_s - copied, 0.0)
