"""What runs of training come to: means, scaling efficiency, what an epoch's time went into, its bound. Pure.

A repetition is one run, and its figure the mean of its whole epochs after the first. The error is the
standard error of the mean (SEM) over repetitions: s / sqrt(n).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from probes.core.unknown import Unknown
from probes.training.report import Epoch, EpochsReport, RankReport, Run, Settings

Cause = Literal["compute", "data", "exchange", "straggler", "uneven", "checkpoint"]

SMALL: Final = 0.05  # of an epoch: what costs less isn't named beside the bound
VICTIM: Final = "no progress in the exchange"  # how a rank's cause begins that waited for another
INTERRUPTED: Final = (129, 130, 143)  # exit codes of ranks that were told to end
REPETITIONS: Final = 3  # that a mean with an error takes
NO_LATER: Final = Unknown("no run has a whole epoch after its first")


@dataclass(frozen=True)
class Mean:
    """A mean over repetitions, and its standard error; None for a single one."""

    value: float
    error: float | None
    n: int


@dataclass(frozen=True)
class Case:
    """Runs that repeat each other."""

    settings: Settings  # epochs left aside
    world: int
    nodes: int
    device_name: str
    torch: str
    library: str
    runs: tuple[Run, ...]  # that are done

    @property
    def rank(self) -> RankReport:
        """A rank that stands for all where they are alike."""
        return self.runs[0].ranks[0]


@dataclass(frozen=True)
class Parts:
    """Means over ranks of what an epoch's time went into, in seconds."""

    data: float
    compute: float
    exchange: float | Unknown
    waiting: float | Unknown
    checkpoint: float
    wall: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        known = (part for part in (self.exchange, self.waiting) if not isinstance(part, Unknown))
        return self.data + self.compute + self.checkpoint + sum(known)


@dataclass(frozen=True)
class Cost:
    """One cause of an epoch's length, as a share of it on its slowest rank; all shares add up to 1."""

    cause: Cause
    share: float
    rank: int | None = None  # of a straggler
    of: Literal["compute", "data"] | None = None  # what takes a straggler longer


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of repetitions with its SEM. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Mean(statistics.fmean(values), error, len(values))


def cases_of(report: EpochsReport) -> tuple[Case, ...]:
    """The runs that are done, by what they trained and where; in the order in which they came."""
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in report.runs:
        if run.state == "done":
            found.setdefault(_key(run), []).append(run)
    return tuple(_case(runs) for runs in found.values())


def _key(run: Run) -> tuple[object, ...]:
    rank = run.ranks[0]
    scaling = rank.settings.scaling if rank.world > 1 else "strong"  # for one process they are the same
    settings = replace(rank.settings, epochs=0, scaling=scaling)
    return settings, rank.world, _nodes(run), rank.device_name, rank.torch, rank.library


def _nodes(run: Run) -> int:
    return len({rank.node for rank in run.ranks})


def _case(runs: list[Run]) -> Case:
    rank = runs[0].ranks[0]
    return Case(
        rank.settings, rank.world, _nodes(runs[0]), rank.device_name, rank.torch, rank.library, tuple(runs)
    )


# ---- time ----------------------------------------------------------------------------------------------


def wall_s(run: Run, number: int) -> float:
    """How long an epoch took: on the rank where it took longest."""
    return max(epoch.wall_s for rank in run.ranks for epoch in rank.epochs if epoch.number == number)


def later(rank: RankReport) -> list[Epoch]:
    """The whole epochs after the first."""
    return [epoch for epoch in rank.epochs if epoch.is_whole and epoch.number]


def _over(case: Case, figure: Callable[[Run], float]) -> Mean | Unknown:
    runs = [run for run in case.runs if later(run.ranks[0])]
    return mean_of([figure(run) for run in runs]) if runs else NO_LATER


def _epoch_s(run: Run) -> float:
    return statistics.fmean(wall_s(run, epoch.number) for epoch in later(run.ranks[0]))


def epoch_s(case: Case) -> Mean | Unknown:
    """Time per epoch after the first."""
    return _over(case, _epoch_s)


def first_s(case: Case) -> Mean | Unknown:
    """Time of the first epoch."""
    times = [wall_s(run, 0) for run in case.runs if run.ranks[0].epochs[0].is_whole]
    return mean_of(times) if times else Unknown("no run has a whole first epoch")


def samples(case: Case) -> int:
    """Samples of an epoch on all ranks."""
    return sum(next((epoch.samples for epoch in later(rank)), 0) for rank in case.runs[0].ranks)


def rate(case: Case) -> Mean | Unknown:
    """Samples per second on all ranks together."""
    count = samples(case)
    return _over(case, lambda run: count / _epoch_s(run))


def efficiency(case: Case, cases: Sequence[Case]) -> Mean | Unknown:
    """T1 / (N TN), T being the time for as many samples: strong where all ranks share them, weak where each
    has as many. Errors are added by their squares.
    """
    if case.world == 1:
        return Unknown("one process is what others are compared with")
    mine = rate(case)
    alone = next((other for other in cases if _is_alone_of(other, case)), None)
    one = rate(alone) if alone else Unknown("no run with one process")
    if isinstance(mine, Unknown) or isinstance(one, Unknown):
        return mine if isinstance(mine, Unknown) else one
    value = mine.value / (case.world * one.value)
    if mine.error is None or one.error is None:
        return Mean(value, None, min(mine.n, one.n))
    error = value * math.hypot(mine.error / mine.value, one.error / one.value)
    return Mean(value, error, min(mine.n, one.n))


def _is_alone_of(other: Case, case: Case) -> bool:
    plain = replace(case.settings, scaling="strong", strategy="ddp", epochs=0)  # alone, nothing is divided
    return (
        other.world == 1
        and replace(other.settings, scaling="strong", strategy="ddp", epochs=0) == plain
        and (other.device_name, other.torch, other.library) == (case.device_name, case.torch, case.library)
    )


def energy_j(case: Case) -> Mean | Unknown:
    """Energy of all cards that were watched, per epoch after the first: mean power times the epoch's time."""
    found = []
    for run in case.runs:
        if isinstance(run.watched, Unknown):
            return run.watched
        joules = []
        for at, epoch in enumerate(run.ranks[0].epochs):
            if epoch in later(run.ranks[0]):
                each = [card.epochs[at] for card in run.watched]
                known = [energy for energy in each if not isinstance(energy, Unknown)]
                if len(known) < len(each):
                    return next(energy for energy in each if isinstance(energy, Unknown))
                joules.append(sum(energy.joules / energy.covers_s for energy in known) * epoch.wall_s)
        if joules:
            found.append(statistics.fmean(joules))
    return mean_of(found) if found else NO_LATER


# ---- what the time went into ---------------------------------------------------------------------------


def parts(case: Case) -> Parts | Unknown:
    """Means over ranks, runs and whole epochs after the first."""
    each = [parts_of(rank) for run in case.runs for rank in run.ranks if later(rank)]
    return _mean_parts(each) if each else NO_LATER


def parts_of(rank: RankReport) -> Parts:
    """Means over one rank's whole epochs after the first. Raises ValueError where there are none."""
    return _mean_parts(
        [
            Parts(e.data_s, e.compute_s, e.exchange_s, e.waiting_s, e.checkpoint_s, e.wall_s)
            for e in later(rank)
        ]
    )


def _mean_parts(each: Sequence[Parts]) -> Parts:
    return Parts(
        statistics.fmean(part.data for part in each),
        statistics.fmean(part.compute for part in each),
        _mean_known([part.exchange for part in each]),
        _mean_known([part.waiting for part in each]),
        statistics.fmean(part.checkpoint for part in each),
        statistics.fmean(part.wall for part in each),
    )


def _mean_known(values: Sequence[float | Unknown]) -> float | Unknown:
    unknown = next((value for value in values if isinstance(value, Unknown)), None)
    return unknown or statistics.fmean(value for value in values if not isinstance(value, Unknown))


def costs(case: Case) -> tuple[Cost, ...]:
    """Why an epoch took as long as it did on its slowest rank, the largest cause first; that is its bound.

    The slowest rank K is the one that loads and computes longest. What the others take (the median rank) is
    data and compute; what K takes beyond it makes K a straggler; what even K waits is unevenness between
    steps. Empty where no run has an epoch after its first.
    """
    ranks = [
        _mean_parts([parts_of(run.ranks[at]) for run in case.runs if later(run.ranks[at])])
        for at in range(case.world)
        if any(later(run.ranks[at]) for run in case.runs)
    ]
    if len(ranks) < case.world:
        return ()
    own = [rank.data + rank.compute for rank in ranks]
    slowest = max(range(case.world), key=own.__getitem__)
    others = [rank for at, rank in enumerate(ranks) if at != slowest] or ranks
    data = statistics.median(rank.data for rank in others)
    compute = statistics.median(rank.compute for rank in others)
    it = ranks[slowest]
    seconds = {"data": min(data, it.data), "compute": min(compute, it.compute)}
    longer = {"data": it.data - seconds["data"], "compute": it.compute - seconds["compute"]}
    whole = it.total
    of: Literal["data", "compute"] = "data" if longer["data"] > longer["compute"] else "compute"
    found = [
        Cost("data", seconds["data"] / whole),
        Cost("compute", seconds["compute"] / whole),
        Cost("checkpoint", it.checkpoint / whole),
        Cost("straggler", sum(longer.values()) / whole, slowest, of),
    ]
    if not isinstance(it.exchange, Unknown) and not isinstance(it.waiting, Unknown):
        found += [Cost("exchange", it.exchange / whole), Cost("uneven", it.waiting / whole)]
    return tuple(sorted(found, key=lambda cost: -cost.share))


def bound_of(case: Case) -> Cost | Unknown:
    """The largest cause of an epoch's length."""
    return next(iter(costs(case)), NO_LATER)


# ---- runs that failed ----------------------------------------------------------------------------------


def cause_of(run: Run) -> str:
    """Why a run isn't done, in a sentence: the rank, the step and the cause that explain the others."""
    faults = [(rank.rank, rank.fault) for rank in run.ranks if rank.fault]
    own = [
        (rank, fault)
        for rank, fault in faults
        if not fault.cause.startswith(("another rank is gone", "ended by"))
    ]
    if run.silent and not own:
        step = max((fault.step for _, fault in faults), default=0)
        who = " and ".join(str(rank) for rank in run.silent[:8])
        return (
            f"rank {who} left no report, in step {step} or later: killed, perhaps for memory, or out of reach"
        )
    hanging = [(rank, fault) for rank, fault in own if not fault.cause.startswith(VICTIM)]
    told_to = [(rank, fault) for rank, fault in faults if fault.cause.startswith("ended by")]
    for rank, fault in hanging or own or told_to or faults:
        return f"rank {rank}, step {fault.step}: {fault.cause}"
    return "it was checkpointed, and goes on with --resume" if run.state == "checkpointed" else ""


def was_interrupted(run: Run) -> bool:
    """Whether somebody ended it on purpose, and no rank failed before that."""
    faults = [rank.fault for rank in run.ranks if rank.fault]
    return bool(faults) and not run.silent and all(fault.exit_code in INTERRUPTED for fault in faults)
