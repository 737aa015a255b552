"""How many blocks of each kind go to each tier: a small integer program, and what counts of it cost. Pure.

Blocks of equal cost form a group. A choice takes time on several lanes and bytes of several memories; lanes
run at the same time, so a pass takes as long as the busiest lane. Sought are whole counts for each group and
choice with the least such time, within every memory's limit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MOST_REPAIRS: Final = 40  # blocks moved to make rounded counts fit
SECOND: Final = 1e-3  # weight of the sum of all lanes: of two equal times, the one with less work is taken

Numbers: TypeAlias = tuple[tuple[int, ...], ...]  # blocks by group and choice


@dataclass(frozen=True)
class Choice:
    """What one block takes when it goes to one tier: seconds on each lane, bytes of each memory."""

    lanes: tuple[float, ...]
    memories: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """Blocks of equal cost, and the choices each of them has."""

    count: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Program:
    """The groups, what each lane is busy with anyway (seconds), and the limit of each memory (bytes)."""

    groups: tuple[Group, ...]
    busy: tuple[float, ...]
    limits: tuple[float, ...]


@dataclass(frozen=True)
class Counts:
    """Blocks by group and choice, their cost, and the share of it that a better choice can save at most."""

    counts: Numbers
    cost: float
    gap: float


def cost(program: Program, counts: Numbers) -> float | None:
    """The time of the busiest lane and a small part of the sum of all; None where a memory is too small."""
    chosen = [
        (number, choice)
        for group, numbers in zip(program.groups, counts, strict=True)
        for number, choice in zip(numbers, group.choices, strict=True)
        if number
    ]
    for m, limit in enumerate(program.limits):
        if math.fsum([number * choice.memories[m] for number, choice in chosen]) > limit:
            return None
    return _total(
        [
            busy + math.fsum([number * choice.lanes[lane] for number, choice in chosen])
            for lane, busy in enumerate(program.busy)
        ]
    )


def repaired(program: Program, counts: Numbers, *, steps: int = MOST_REPAIRS) -> Numbers:
    """Counts that fit, if moving a few blocks is enough: each time the one that frees most for its cost."""
    for _ in range(steps):
        lanes, memories = _sums(program, counts)
        over = _over(program, memories)
        if not over:
            break
        moves = []
        for move, was, then in _moves(program, counts):
            freed = over - _over(program, _moved(memories, was.memories, then.memories))
            if freed > 0:
                moves.append((_total(_moved(lanes, was.lanes, then.lanes)) / freed, move))
        if not moves:
            break
        counts = _with_move(counts, min(moves)[1])
    return counts


def with_best_move(program: Program, counts: Numbers, below: float) -> Numbers | None:
    """The counts with that block moved to another choice which then cost least; None if not below this."""
    lanes, memories = _sums(program, counts)
    time, busiest = max(zip(lanes, range(len(lanes)), strict=True))
    best = None
    for move, was, then in _moves(program, counts):
        if time - was.lanes[busiest] + then.lanes[busiest] >= below:
            continue
        total = _total(_moved(lanes, was.lanes, then.lanes))
        if total < below and not _over(program, _moved(memories, was.memories, then.memories)):
            best, below = move, total
    return _with_move(counts, best) if best else None


def _sums(program: Program, counts: Numbers) -> tuple[list[float], list[float]]:
    """Seconds of each lane, bytes of each memory."""
    lanes, memories = list(program.busy), [0.0] * len(program.limits)
    for group, numbers in zip(program.groups, counts, strict=True):
        for number, choice in zip(numbers, group.choices, strict=True):
            if number:
                lanes = [total + number * one for total, one in zip(lanes, choice.lanes, strict=True)]
                memories = [
                    total + number * one for total, one in zip(memories, choice.memories, strict=True)
                ]
    return lanes, memories


def _over(program: Program, memories: Sequence[float]) -> float:
    """By how much memories are too small, in shares of their limits."""
    return sum(
        [
            (taken - limit) / max(limit, 1.0)
            for taken, limit in zip(memories, program.limits, strict=True)
            if taken > limit
        ]
    )


def _moved(sums: Sequence[float], was: Sequence[float], then: Sequence[float]) -> list[float]:
    return [n - a + b for n, a, b in zip(sums, was, then, strict=True)]


def _total(lanes: Sequence[float]) -> float:
    return max(lanes) + SECOND * math.fsum(lanes)


def _moves(program: Program, counts: Numbers) -> Iterator[tuple[tuple[int, int, int], Choice, Choice]]:
    """Each group, choice that has a block, and other choice, by their places, and the two choices."""
    for g, (group, line) in enumerate(zip(program.groups, counts, strict=True)):
        for i, was in enumerate(group.choices):
            if line[i]:
                yield from (((g, i, j), was, then) for j, then in enumerate(group.choices) if j != i)


def _with_move(counts: Numbers, move: tuple[int, int, int]) -> Numbers:
    """One block of a group moved from one choice to another."""
    g, i, j = move
    moved = tuple(n - (k == i) + (k == j) for k, n in enumerate(counts[g]))
    return (*counts[:g], moved, *counts[g + 1 :])
