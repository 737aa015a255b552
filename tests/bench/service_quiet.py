"""What other programs take of the CPUs while a bench measures, and whether that leaves anything to judge.

A model's pass uses all CPUs in step, so a program that takes a tenth of one delays all of them. Measurements
are made in turns, each of which has both sides of what is compared. Turns in which others took too much are
made again; where too few quiet ones are found, a bar of speed can't be judged, as held or as missed.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

from board import Board, tell

T = TypeVar("T")

MOST = 0.1  # of all CPUs, that others may take in a quiet turn
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turns(Generic[T]):
    """What was measured in each turn, and the share of all CPUs that others took meanwhile."""

    found: list[tuple[T, float]]
    wanted: int

    @property
    def quiet(self) -> list[T]:
        return [each for each, share in self.found if share <= MOST]

    @property
    def judged(self) -> bool:
        """Whether at least half of the turns that were wanted are quiet."""
        return 2 * len(self.quiet) >= self.wanted

    @property
    def best(self) -> list[T]:
        """The quiet turns, or all of them where those are too few."""
        return self.quiet if self.judged else [each for each, _ in self.found]

    def bar(
        self,
        board: Board,
        name: str,
        value: float,
        limit: float,
        unit: str,
        *,
        at_least: bool = False,
        **more: object,
    ) -> None:
        """The bar, if it can be judged; `value` is that of `best`."""
        others = round(median(share for _, share in self.found), 3)
        if self.judged:
            board.bar(name, value, limit, unit, at_least=at_least, others=others, **more)
        else:
            turns = f"{len(self.quiet)} of {len(self.found)} turns were quiet"
            taken = f"others took {others:.0%} of the CPUs in the median one"
            board.waive(name, f"can't be judged: {turns}; {taken}; with all of them, {value:.4g} {unit}")


@dataclass(frozen=True)
class Meter:
    """Reads how many seconds all programs have spent on CPUs, and this bench's own among them."""

    own: Callable[[], float]
    all: Callable[[], float] = lambda: spent_by_all(Path("/proc/stat").read_text())
    clock: Callable[[], float] = time.monotonic
    n_cpus: int = os.cpu_count() or 1

    def share_of_others(self, work: Callable[[], T]) -> tuple[T, float]:
        """What `work` returns, and the share of all CPUs that others took meanwhile."""
        begun, others = self.clock(), self.all() - self.own()
        done = work()
        took = (self.clock() - begun) * self.n_cpus
        return done, max(0.0, self.all() - self.own() - others) / took

    def turns(self, work: Callable[[int], T], wanted: int) -> Turns[T]:
        """So many quiet turns, or as many of them as three times as many turns have."""
        made: Turns[T] = Turns([], wanted)
        for number in range(3 * wanted):
            made.found.append(self.share_of_others(lambda number=number: work(number)))  # type: ignore[misc]
            if len(made.quiet) == wanted:
                break
        return made

    def first(self, board: Board, seconds: float = 3.0) -> None:
        """Say how quiet it is before anything is measured."""
        _, share = self.share_of_others(lambda: time.sleep(seconds))
        board.figure("others-before", share, "of all CPUs", quiet=share <= MOST)
        if share > MOST:
            tell(f"others take {share:.0%} of the CPUs: bars of speed may not be judged")


def spent_by_all(stat: str) -> float:
    """Seconds in programs and the kernel for them, by /proc/stat; not in interrupts, which traffic makes."""
    user, nice, system, _idle, _wait, _irq, _softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + steal) / _TICKS


def spent_by(pids: Iterable[int], *, and_this: bool = True) -> float:
    """Seconds of these processes, and of this one."""
    spent = time.process_time() if and_this else 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) / _TICKS
    return spent
