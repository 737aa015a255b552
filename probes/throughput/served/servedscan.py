"""What a served scan keeps: its settings, and of each level every request in the windows that count.

Derived figures (percentiles, throughput, goodput, the knee) aren't stored; `servedcurve` computes them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

Loop = Literal["closed", "open"]


@dataclass(frozen=True)
class ServedSettings:
    """What the served half was asked for. Rates are requests a second; none: shares of what was reached."""

    rows: int  # inputs of one request
    slo_s: float | None  # goodput counts answers within it
    window_s: float
    windows: int  # that must agree
    most_windows: int
    tolerance: float  # relative
    limit_s: float  # for one answer
    most_callers: int  # of the closed loop
    most_connections: int  # of the open loop
    keep_alive: bool
    rates_per_s: tuple[float, ...]
    seed: int


@dataclass(frozen=True)
class ServedBy:
    """Which server and model answered, by their own account."""

    url: str
    model: str
    server: str
    platform: str
    request: str  # what was sent, in words
    request_bytes: int
    facts: tuple[tuple[str, ...], ...] = ()  # name and value of what the model says of itself


@dataclass(frozen=True)
class Window:
    """One window of a level, also of those that don't count."""

    seconds: float
    arrived: int  # due in it
    answered: int  # good answers that came in it
    median_s: float | None  # of those answers; None without any


@dataclass(frozen=True)
class Count:
    """How many requests ended in one way."""

    what: str
    requests: int


@dataclass(frozen=True)
class ClientSide:
    """What the client itself cost. `late_s` are the middle and 99 % of its delays in sending, seconds.

    `queued`: requests of an open loop that waited because all connections were busy; that is the server's
    doing, and counts as latency.
    """

    busy_share: float  # of the time, the client's event loop
    late_median_s: float
    late_p99_s: float
    queued: int
    bound_by: str  # why the client may have limited this level; empty where it didn't


@dataclass(frozen=True)
class Level:
    """One concurrency (closed loop) or rate (open loop), measured until windows agree.

    The three lists belong together, one entry for each good answer in order of time. Closed loop: answers
    that came in the windows that count, latency from sending; `waited_s` is empty. Open loop: requests due
    in them, latency from when they were due; less `waited_s` it is from when they were sent.
    """

    loop: Loop
    callers: int  # closed: who ask; open: connections at most
    rate_per_s: float | None  # asked for; None in a closed loop
    seconds: float  # of the windows that count
    answered: int  # good answers that came in them
    due_s: tuple[float, ...]  # from the begin of the windows that count
    waited_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    refused: int  # 429, due in them
    refused_median_s: float | None
    failed: tuple[Count, ...]  # any other end, by what it was
    windows: tuple[Window, ...]
    unstable: str  # why no windows agreed; empty where they did
    client: ClientSide

    @property
    def asked(self) -> int:
        """Requests of the windows that count, however they ended."""
        return len(self.latency_s) + self.refused + sum(one.requests for one in self.failed)


@dataclass(frozen=True)
class ServedScan:
    """The served half of a scan. `ended` says why there are no more levels."""

    tag: ClassVar[str] = "served"
    by: ServedBy
    settings: ServedSettings
    levels: tuple[Level, ...]
    ended: str
    complete: bool = True  # false: interrupted, or the server went away

    def of(self, loop: Loop) -> tuple[Level, ...]:
        """The levels of one loop."""
        return tuple(level for level in self.levels if level.loop == loop)
