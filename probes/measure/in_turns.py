"""Two processes that measure the same in turns: each waits at every pause and record until the other has come
as far. What slows a machine down for a while then slows both.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import probes
from probes.measure import supervisor
from probes.measure.supervisor import Command, Ended, Spare
from probes.measure.worker import Job, Told, Turn

SIDES = (0, 1)


def running_in(python: Path) -> Command:
    """The worker's command line with another Python: its own libraries, and of ours this program alone."""
    folder = Path(probes.__file__).parent
    start = (
        "import importlib.util as u, runpy, sys; "
        f"s = u.spec_from_file_location('probes', {str(folder / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(folder)!r}]); m = u.module_from_spec(s); "
        "sys.modules['probes'] = m; s.loader.exec_module(m); "
        "runpy.run_module('probes.measure.worker', None, '__main__', 1)"
    )

    def command(descriptor: int) -> list[str]:
        ours = supervisor.command(descriptor)
        return [str(python), "-P", "-c", start, *ours[-2:]]

    return command


class Baton:
    """Whose turn it is. Nobody measures before both have come to their first message.

    A side that has finished a row waits until the other has, too: one may take more samples, and more turns.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._turn: int | None = None
        self._rows = [0, 0]  # that each side has finished
        self._arrived: set[int] = set()
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def pass_on(self, side: int, *, row: bool = False) -> None:
        """Let the other side go on, and wait for this side's turn. `row`: this side has finished one."""
        with self._changed:
            self._arrived.add(side)
            self._rows[side] += row
            if self._turn == side:
                is_behind = self._rows[side] < self._rows[1 - side]
                self._give(side if is_behind else 1 - side)
            elif self._turn is None and self._arrived | self._gone == set(SIDES):
                self._give(self._first)
            self._changed.wait_for(lambda: self._turn == side)

    def leave(self, side: int) -> None:
        """This side has ended."""
        with self._changed:
            self._gone.add(side)
            if self._turn == side or (self._turn is None and self._arrived):
                self._give(1 - side)

    def _give(self, side: int) -> None:
        self._turn = side if side not in self._gone else 1 - side
        self._changed.notify_all()


@dataclass(frozen=True)
class Side:
    """The job of one of the two, and what is called with each of its messages."""

    job: Job
    command: Command
    heard: Callable[[Told], None]
    spare: Spare | None = None  # a worker that was started ahead


def both(sides: tuple[Side, Side], *, first: int, limit_s: float) -> tuple[Ended[Told], Ended[Told]]:
    """Run two jobs in turns, each for at most `limit_s` of its own; `first` begins.

    Raises KeyboardInterrupt when interrupted: what was measured of these two is lost.
    """
    baton = Baton(first)
    # here, not in the threads: the kernel ends a worker with the thread that has started it
    spares: list[Spare] = []
    try:
        for side in sides:
            spares.append(side.spare or supervisor.start(side.command))
    except BaseException:
        _kill(spares)
        raise

    def one(number: int) -> Ended[Told]:
        def heard(message: Told) -> None:
            is_row = not isinstance(message, Turn)
            if is_row:
                sides[number].heard(message)
            baton.pass_on(number, row=is_row)

        job = replace(sides[number].job, beside=spares[1 - number].process.pid)
        try:
            return supervisor.run(job, limit_s=2 * limit_s, heard=heard, spare=spares[number])
        finally:
            baton.leave(number)

    with ThreadPoolExecutor(len(SIDES)) as pool:
        running = [pool.submit(one, number) for number in SIDES]
        try:
            wait(running)
        except BaseException:
            _kill(spares)
            raise
    return running[0].result(), running[1].result()


def _kill(spares: Sequence[Spare]) -> None:
    for spare in spares:
        spare.process.kill()
