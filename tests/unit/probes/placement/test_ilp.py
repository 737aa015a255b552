"""The integer program of a plan: its counts are the best there are, by trying every one."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from probes.placement.planner import ilp
from probes.placement.planner.ilp import LOOSE_GAP, Choice, Group, Program, Search, cost, repaired
from probes.placement.planner.simplex import maximise


def shares(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to put `count` blocks into `parts` choices."""
    if parts == 1:
        yield (count,)
        return
    for first in range(count + 1):
        for rest in shares(count - first, parts - 1):
            yield (first, *rest)


def brute_force(program: Program) -> float:
    every = itertools.product(*(list(shares(g.count, len(g.choices))) for g in program.groups))
    return min((found for counts in every if (found := cost(program, counts)) is not None), default=math.inf)


def drawn(rng: random.Random) -> Program:
    """Lanes of seconds and memories of bytes, some of them empty, as tiers have."""
    groups = tuple(
        Group(
            rng.randint(1, 4),
            tuple(
                Choice(
                    tuple(rng.random() * rng.choice((0, 1, 1)) for _ in range(4)),
                    tuple(float(rng.randint(0, 100)) for _ in range(2)),
                )
                for _ in range(rng.randint(1, 4))
            ),
        )
        for _ in range(rng.randint(1, 3))
    )
    return Program(groups, (0.1, 0.0, 0.0, 0.0), (float(rng.randint(50, 400)), float(rng.randint(50, 600))))


@pytest.mark.parametrize("seed", range(25))
def test_no_other_counts_are_better(seed: int) -> None:
    program = drawn(random.Random(seed))
    found, best = Search(program).run(), brute_force(program)
    if found is None:
        assert best == math.inf
    else:
        assert cost(program, found.counts) == found.cost
        assert found.cost <= best * (1 + LOOSE_GAP)
        assert found.gap <= LOOSE_GAP


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_no_other_counts_are_better_in_many_programs(seed: int) -> None:
    test_no_other_counts_are_better(seed)


def test_what_fits_nowhere_has_no_counts() -> None:
    assert Search(Program((Group(2, (Choice((1.0,), (60.0,)),)),), (0.0,), (100.0,))).run() is None
    assert Search(Program((Group(2, ()),), (0.0,), (100.0,))).run() is None


def test_counts_that_are_not_below_the_limit_are_not_given() -> None:
    program = Program((Group(2, (Choice((1.0,), (1.0,)),)),), (0.0,), (100.0,))
    assert Search(program).run(better_than=1.9) is None
    found = Search(program).run(better_than=3.0)
    assert found is not None
    assert found.counts == ((2,),)


@pytest.mark.parametrize(
    ("objective", "rows", "limits", "value"),
    [
        ([3, 5], [[1, 0], [0, 2], [3, 2]], [4, 12, 18], 36),
        ([1, 1], [[-1, -1], [1, 0], [0, 1]], [-3, 2, 2], 4),  # the origin doesn't fit
        ([-1], [[-1]], [-2], -2),
    ],
)
def test_linear_programs_have_their_known_values(
    objective: list[float], rows: list[list[float]], limits: list[float], value: float
) -> None:
    found = maximise(objective, rows, limits)
    assert found is not None
    assert found.value == pytest.approx(value)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_that_are_added_later_are_worth_what_rows_are(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randint(2, 5)
    objective = [rng.random() for _ in range(width)]
    rows = [[rng.random() for _ in range(width)] for _ in range(rng.randint(2, 5))]
    limits = [rng.uniform(1, 9) for _ in rows]
    solved = maximise(objective, rows, limits)
    for _ in range(4):  # one bound after the other, each on the point with those before
        assert solved is not None
        point = solved.point(width)
        place = max(range(width), key=lambda i: abs(point[i] - round(point[i])))
        if abs(point[place] - round(point[place])) < 1e-6:
            break
        most = rng.random() < 0.6
        number = math.floor(point[place]) if most else math.ceil(point[place])
        sign = 1.0 if most else -1.0
        rows.append([sign * (i == place) for i in range(width)])
        limits.append(sign * number)
        solved, wanted = (
            solved.bounded(place, number, most=most, worth=-math.inf),
            maximise(objective, rows, limits),
        )
        assert (solved is None) == (wanted is None)
        if solved is None or wanted is None:
            break
        assert solved.value == pytest.approx(wanted.value)
        found = solved.point(width)
        assert sum(a * b for a, b in zip(objective, found, strict=True)) == pytest.approx(solved.value)
        assert all(
            sum(a * b for a, b in zip(row, found, strict=True)) <= limit + 1e-6
            for row, limit in zip(rows, limits, strict=True)
        )


def test_linear_programs_without_a_point_or_a_limit_have_none() -> None:
    assert maximise([1], [[1], [-1]], [1, -2]) is None
    assert maximise([1], [[-1]], [0]) is None


def test_rounded_counts_that_do_not_fit_are_mended() -> None:
    """Nine kinds of a layer's parts: no rounded relaxation of 120 nodes fitted, so no plan was found."""
    quick, lean = Choice((0.0,), (10.0,)), Choice((1.0,), (1.0,))
    program = Program((Group(5, (quick, lean)), Group(4, (quick, lean))), (0.0,), (60.0,))
    fits = repaired(program, ((5, 0), (4, 0)))
    assert cost(program, fits) is not None
    assert sum(line[0] for line in fits) == 5


def test_a_hundred_thousand_blocks_are_not_moved_one_by_one_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiny blocks on a WX 4100: 33,335 moves of a billionth of the time each took 4 s."""
    sizes = ((8192, 6912, 3.9e-6, 3.7e-6), (16384, 13056, 5.1e-6, 4.6e-6), (24576, 19200, 6.2e-6, 5.5e-6))
    groups = []
    for nth, (plain, packed, copied, copied_packed) in enumerate(sizes):
        upkeep = 1.5e-6 + nth * 1.4e-7
        resident = Choice((3e-6 + nth * 2.7e-7, 0, 0, 1.8e-5, 0), (2 * plain, 0, 0))
        kept = Choice((9.5e-6 + nth * 6e-7, 0, 0, 3.474e-5, 0), (plain, 0, 0))
        streamed = Choice((9.5e-6 + nth * 6e-7, copied, 0, 5.814e-5, upkeep), (0, plain, plain))
        small = Choice((1.12e-5 + nth * 2.2e-6, 0, 0, 3.474e-5, upkeep), (packed, 0, 0))
        moved = Choice((1.12e-5 + nth * 2.2e-6, copied_packed, 0, 5.814e-5, upkeep), (0, packed, packed))
        groups.append(Group(33333 + (nth == 0), (resident, kept, streamed, small, moved)))
    moves = []
    best_move = ilp.with_best_move
    monkeypatch.setattr(ilp, "with_best_move", lambda *of: moves.append(of) or best_move(*of))
    limits = (886204416.0, 23733436416.0, 11866718208.0)
    assert Search(Program(tuple(groups), (0.0,) * 5, limits)).run()
    assert len(moves) < 1000
