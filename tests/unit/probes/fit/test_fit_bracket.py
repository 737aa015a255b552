"""The search for the largest size finds it exactly, from any guess, and reports what contradicts it."""

import pytest

from probes.fit.measured.bracket import search, summary


@pytest.mark.thorough
@pytest.mark.parametrize("edge", [0, 1, 2, 3, 7, 8, 100, 1000])
@pytest.mark.parametrize("guess", [1, 5, 64, 1000])
def test_the_largest_is_exact_whatever_the_guess_is(edge: int, guess: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= edge

    found = search(fits, guess, "batch", most=1000)
    assert (found.fits, found.exact, found.contradictions) == (edge, True, ())
    assert len(asked) == len(set(asked)), "no size costs two processes"
    assert len(asked) <= 24


def test_a_right_guess_takes_three_tries() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 40

    assert search(fits, 40, "batch", most=1000).fits == 40
    assert asked == [40, 41, 50]


def test_a_size_that_fits_above_one_that_fails_is_reported() -> None:
    found = search(lambda size: size <= 8 or size == 10, 8, "tokens", most=100)
    assert found.fits == 8
    assert found.contradictions == ((9, 10),)


def test_without_an_answer_the_bounds_found_so_far_are_kept() -> None:
    answers = {16: True, 17: True, 19: True, 23: True}
    found = search(answers.get, 16, "batch", most=1000)
    assert (found.fits, found.fails, found.exact) == (23, None, False)


def test_no_answer_at_all_is_not_a_size() -> None:
    assert summary({}, "batch", most=10).fits == 0
    assert not summary({}, "batch", most=10).exact
