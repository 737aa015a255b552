"""The two sides of a run in turns never measure at the same time, and neither waits for one that is gone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from probes.measure.in_turns import SIDES, Baton


def run(first: int, messages: tuple[int, int], *, to_a_row: tuple[int, int] = (1, 1)) -> list[int]:
    """The order in which two sides work, each until it has sent its messages; so many belong to a row."""
    baton, worked, alone = Baton(first), [], threading.Lock()

    def one(side: int) -> None:
        try:
            for number in range(messages[side]):
                baton.pass_on(side, row=number % to_a_row[side] == 0)
                assert alone.acquire(blocking=False), "both at once"
                worked.append(side)
                alone.release()
        finally:
            baton.leave(side)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one, side) for side in SIDES]:
            done.result()
    return worked


@pytest.mark.parametrize("first", SIDES)
def test_two_sides_take_turns_and_the_one_asked_for_begins(first: int) -> None:
    assert run(first, (4, 4)) == [first, 1 - first] * 4


@pytest.mark.parametrize("first", SIDES)
def test_a_side_that_has_ended_keeps_nobody_waiting(first: int) -> None:
    for messages in ((0, 3), (3, 0), (1, 5), (5, 2)):
        worked = run(first, messages)
        assert [worked.count(side) for side in SIDES] == list(messages)


def test_the_side_that_takes_fewer_turns_for_a_row_waits_for_the_other_at_its_end() -> None:
    """Else they would soon measure other rows at the same time."""
    to_a_row = (4, 2)
    done = [0, 0]
    for side in run(0, (12, 6), to_a_row=to_a_row):
        row = done[side] // to_a_row[side]
        assert done[1 - side] >= row * to_a_row[1 - side], "the other hasn't finished the row before"
        done[side] += 1
    assert done == [12, 6]
