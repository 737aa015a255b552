"""The search for the largest size finds it exactly, in few tries, and reports what contradicts it."""

import random

import pytest

from probes.fit.report import Largest
from probes.fit.search import Hint, Tried, search, summary

RISE, WEIGHTS = 1000, 100_000  # bytes: what a size takes is a straight line


def tried(edge: int, hint: Hint, *, peaks: bool = True, most: int = 10**6) -> tuple[Largest, list[int]]:
    asked: list[int] = []

    def fits(size: int) -> Tried:
        asked.append(size)
        return Tried(size <= edge, (WEIGHTS + RISE * size - 300,) if peaks and size <= edge else ())

    budget = WEIGHTS + RISE * edge + RISE // 2
    return search(fits, hint, "batch", most=most, budget=budget), asked


@pytest.mark.parametrize("peaks", [True, False])
@pytest.mark.parametrize("edge", [0, 1, 2, 3, 7, 8, 100, 1000])
@pytest.mark.parametrize("guess", [None, 1, 5, 64, 1000, 10**5])
def test_the_largest_is_exact_whatever_the_guess_is(edge: int, guess: int | None, peaks: bool) -> None:
    found, asked = tried(edge, Hint(guess, RISE if guess and peaks else None), peaks=peaks)
    assert (found.fits, found.exact, found.contradictions) == (edge, True, ())
    twice = {size for size in asked if asked.count(size) > 1}
    assert twice <= {edge, edge + 1}, "no other size costs two processes"
    assert len(asked) <= 34


@pytest.mark.parametrize("wrong", [0.5, 0.8, 0.95, 1.0, 1.05, 1.2, 2.0, 5.0])
def test_a_wrong_guess_costs_at_most_three_failing_trials_before_one_that_fits(wrong: float) -> None:
    found, asked = tried(40, Hint(int(40 * wrong), RISE))
    assert found.fits == 40
    failing = next(number for number, size in enumerate(asked) if size <= 40)
    assert failing <= 3
    assert len(asked) <= 11


def test_a_right_guess_takes_three_tries_and_each_side_of_the_edge_is_tried_twice_more() -> None:
    found, asked = tried(40, Hint(40, RISE))
    assert found.fits == 40
    assert asked == [40, 41, 50, 40, 41, 40, 41]


@pytest.mark.thorough
@pytest.mark.parametrize("guess", [10, 11, 12, 13])
def test_an_edge_that_moves_between_trials_is_not_called_exact(guess: int) -> None:
    """Of one question, 11 and 12 were both called exact. Here chance decides for each trial."""
    draw = random.Random(guess)
    found = [
        search(lambda n: Tried(n <= draw.choice((11, 12))), Hint(guess), "batch", most=10**6, budget=1)
        for _ in range(200)
    ]
    moved = [one for one in found if not one.exact]
    assert len(moved) >= 130
    assert {(one.fits, one.top) for one in moved} == {(11, 12)}
    assert all(one.ended for one in found)


def test_where_a_size_below_the_largest_fails_the_answer_lies_below_it_and_says_by_how_much() -> None:
    """Brute force refused 924 where the search had said 927."""
    found = search(lambda n: Tried(n <= 927 and n != 924), Hint(900, 1), "tokens", most=10**6, budget=1)
    assert (found.fits, found.fails, found.top, found.exact) == (923, 924, 927, False)
    assert (924, 927) in found.contradictions


def test_trials_that_never_agree_end_the_search() -> None:
    asked: list[int] = []

    def fits(size: int) -> Tried:
        asked.append(size)
        return Tried(len(asked) % 2 == 0)

    assert not search(fits, Hint(1000), "tokens", most=10**6, budget=1).exact
    assert len(asked) < 60


def test_without_a_guess_two_small_trials_say_where_the_limit_is() -> None:
    found, asked = tried(900, Hint())
    assert found.fits == 900
    assert asked == [1, 2, 900, 901, 1125, 900, 901, 900, 901, 899, 897, 886]


def test_a_phase_that_is_the_highest_only_in_small_sizes_does_not_mislead_the_search() -> None:
    asked: list[int] = []

    def fits(size: int) -> Tried:
        asked.append(size)
        phases = (10 * size, 300 + size)  # the optimizer's is the higher one up to size 33
        return Tried(max(phases) <= 1000, phases if max(phases) <= 1000 else ())

    assert search(fits, Hint(), "batch", most=10**6, budget=1000).fits == 100
    assert asked[:5] == [1, 2, 100, 101, 125]


def test_a_step_that_takes_more_than_the_line_says_is_still_found() -> None:
    asked: list[int] = []

    def fits(size: int) -> Tried:
        asked.append(size)
        taken = 50 * size * size
        return Tried(taken <= 500_000, (taken,) if taken <= 500_000 else ())

    assert search(fits, Hint(), "tokens", most=10**6, budget=500_000).fits == 100
    assert len(asked) <= 21


def test_a_size_that_fits_above_one_that_fails_is_reported() -> None:
    found = search(lambda size: Tried(size <= 8 or size == 10), Hint(8), "tokens", most=100, budget=1)
    assert found.fits == 8
    assert found.contradictions == ((9, 10),)


def test_without_an_answer_the_bounds_found_so_far_are_kept() -> None:
    answers = {size: Tried(fits=True) for size in (16, 17, 19)}
    found = search(answers.get, Hint(16), "batch", most=1000, budget=1)
    assert (found.fits, found.fails, found.exact) == (19, None, False)


def test_no_answer_at_all_is_not_a_size() -> None:
    assert summary([], "batch", most=10).fits == 0
    assert not summary([], "batch", most=10).exact
