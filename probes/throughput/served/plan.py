"""What a served scan is about to do, and how long that takes: from its levels, windows and seconds. Pure."""

import math
from dataclasses import dataclass

from probes.throughput.served.level import FEWEST as FEWEST_ANSWERS
from probes.throughput.served.level import WARM_UP
from probes.throughput.served.results import FLAT, SHARES, ServedSettings

_LONG_S = 120.0  # from here on minutes are named


@dataclass(frozen=True)
class Plan:
    """Levels and seconds, each at least and at most.

    At least: throughput doesn't grow from one caller on, the first rate is too much, and the first windows
    agree. At most: every level, with all windows; but see `slowest_per_s`.
    """

    callers: tuple[int, ...]
    rates: int
    levels: tuple[int, int]
    level_s: tuple[float, float]
    slowest_per_s: float  # answers: below it windows are made longer than planned, up to five times

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the least and the most seconds of the whole scan."""
        return self.levels[0] * self.level_s[0], self.levels[1] * self.level_s[1]


def planned(settings: ServedSettings) -> Plan:
    """The plan of a scan."""
    callers = tuple(2**power for power in range(int(math.log2(settings.most_callers)) + 1))
    rates = len(settings.rates_per_s or SHARES)
    windows = (settings.windows, settings.most_windows)
    return Plan(
        callers,
        rates,
        (min(FLAT + 1, len(callers)) + 1, len(callers) + rates),
        (settings.window_s * (WARM_UP + windows[0]), settings.window_s * (WARM_UP + windows[1])),
        FEWEST_ANSWERS / settings.window_s,
    )


def announcement(url: str, settings: ServedSettings, shorter: tuple[str, ServedSettings] | None) -> str:
    """One line: what is asked, for how long, and which option makes it shorter."""
    plan = planned(settings)
    options = "--most-callers N or one --rate N"
    if shorter:
        option, other = shorter
        options = f"{option} ({_range(planned(other).seconds)}), {options}"
    rates = f"up to {plan.rates} rates" if plan.rates > 1 else "one rate"
    levels = str(plan.levels[1]) if len(set(plan.levels)) == 1 else "{} to {}".format(*plan.levels)
    return (
        f"Asks {url} with {_named(plan.callers)} at once, until more bring no more answers, then at "
        f"{rates}: {levels} levels of {_range(plan.level_s)}, "
        f"{_range(plan.seconds)} in all, longer if fewer than "
        f"{plan.slowest_per_s:.2g} answers a second come. Shorter: {options}."
    )


def _named(callers: tuple[int, ...]) -> str:
    if len(callers) > 4:
        return f"{callers[0]}, {callers[1]}, {callers[2]} to {callers[-1]} callers"
    if len(callers) == 1:
        return "1 caller"
    return f"{', '.join(map(str, callers[:-1]))} and {callers[-1]} callers"


def _range(seconds: tuple[float, float]) -> str:
    """`42 s to 9 min`, `10 to 32 s`."""
    low, high = map(_time, seconds)
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"{low} to {high}"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < _LONG_S and seconds < 99.5 else f"{seconds / 60:.2g} min"
