"""A bench's bars of speed are judged where the machine was quiet, and nowhere else."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "tests" / "bench"))

from board import Board
from service_quiet import MOST, Meter, Turns, spent_by_all


class Machine:
    """A clock of ours, on which every turn takes a second; `others`: what they take of its two CPUs."""

    def __init__(self, others: list[float]) -> None:
        self._others = others
        self._now = self._own = self._spent = 0.0
        self.meter = Meter(lambda: self._own, lambda: self._spent, lambda: self._now, n_cpus=2)

    def turn(self, number: int) -> int:
        self._now += 1
        self._own += 1.5
        self._spent += 1.5 + 2 * self._others[number % len(self._others)]
        return number


def rows(turns: Turns[int], tmp_path: Path, value: float) -> tuple[list[dict[str, object]], bool]:
    board = Board("x", results=tmp_path)
    turns.bar(board, "speed", value, 1.0, "x")
    return board._rows, board.missed


def test_on_a_quiet_machine_each_turn_counts_once() -> None:
    turns = (machine := Machine([0.0, MOST / 2])).meter.turns(machine.turn, 4)
    assert (turns.best, turns.judged) == ([0, 1, 2, 3], True)


def test_turns_that_others_disturb_are_made_again() -> None:
    turns = (machine := Machine([0.0, 2 * MOST])).meter.turns(machine.turn, 4)
    assert (turns.best, turns.judged) == ([0, 2, 4, 6], True)


@pytest.mark.parametrize("value", [0.5, 2.0])
def test_on_a_busy_machine_a_bar_is_neither_held_nor_missed(tmp_path: Path, value: float) -> None:
    turns = (machine := Machine([0.0, *[5 * MOST] * 8])).meter.turns(machine.turn, 6)
    assert len(turns.found) == 18
    ((row,), missed) = rows(turns, tmp_path, value)
    assert (row["value"], missed) == (None, False)
    assert str(row["waived"]).startswith("can't be judged: 2 of 18 turns were quiet; others took 50% ")
    assert str(row["waived"]).endswith(f" {value:.4g} x")


def test_on_a_quiet_machine_a_bar_is_held_or_missed(tmp_path: Path) -> None:
    turns = (machine := Machine([0.0])).meter.turns(machine.turn, 2)
    for value, ok in ((0.5, True), (2.0, False)):
        ((row,), missed) = rows(turns, tmp_path, value)
        assert (row["ok"], missed) == (ok, not ok)


def test_what_a_bench_spends_itself_and_on_its_traffic_is_not_of_others() -> None:
    stat: dict[str, Any] = {
        "user": 100,
        "nice": 1,
        "system": 20,
        "idle": 900,
        "wait": 5,
        "irq": 7,
        "soft": 70,
        "steal": 3,
    }
    text = "cpu  " + " ".join(map(str, stat.values())) + " 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert spent_by_all(text) == pytest.approx(1.24)
