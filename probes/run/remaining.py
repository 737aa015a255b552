"""How far a run is and how much time is left: planned costs, corrected by the pace seen so far. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

TRUST = 0.05  # of the planned cost: until about as much is done, the plan counts more than the pace
BEGINNING = ""  # the case that represents a probe's start; it is done with the first record


@dataclass(frozen=True)
class Planned:
    """One case of a probe and about how many seconds it takes on an ordinary machine."""

    probe: str
    case: str  # as in the journal
    cost_s: float
    round: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done: int
    total: int
    left_s: float


def progress(
    plan: Sequence[Planned],
    done: Collection[tuple[str, int, str]],
    ended: Collection[tuple[str, int]],
    *,
    elapsed_s: float,
) -> Progress:
    """Where a run stands `elapsed_s` after it was planned.

    Done are these (probe, round, case), ended the processes of these (probe, round).

    What is left costs its plan times the pace: seconds spent over seconds planned for what is done.
    """
    over = [
        one for one in plan if (one.probe, one.round) in ended or (one.probe, one.round, one.case) in done
    ]
    spent_s = sum(one.cost_s for one in over)
    whole_s = sum(one.cost_s for one in plan)
    trust_s = TRUST * whole_s
    pace = (elapsed_s + trust_s) / (spent_s + trust_s) if whole_s else 1.0
    cases = [one for one in plan if one.case != BEGINNING]
    finished = sum(one.case != BEGINNING for one in over)
    return Progress(finished, len(cases), (whole_s - spent_s) * pace)


def sentence(at: Progress, *, so_far_s: float) -> str:
    """`42 s so far, 61 of 141 cases done, about 55 s left`."""
    return f"{_span(so_far_s)} so far, {at.done} of {at.total} cases done, about {_about(at.left_s)} left"


def _span(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60:02} s"


def _about(seconds: float) -> str:
    """To five seconds below two minutes, to whole minutes above; never nothing."""
    return f"{max(5, 5 * round(seconds / 5))} s" if seconds < 100 else f"{math.ceil(seconds / 60)} min"
