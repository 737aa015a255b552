"""Runs two worker processes that measure the same cases in turns.

Each waits at every pause and record until the other has come as far: what slows a machine down for a while
then slows both.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import probes
from probes.measure import probe_worker, supervisor
from probes.measure.probe_worker import Job, ProbeMessage, Turn
from probes.measure.supervisor import Command, JobResult, WorkerProcess

SIDES = (0, 1)


def python_command(python: Path) -> Command:
    """The worker's command line with another Python: its own libraries, and of ours this program alone."""
    folder = Path(probes.__file__).parent
    start = (
        "import importlib.util as u, runpy, sys; "
        f"s = u.spec_from_file_location('probes', {str(folder / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(folder)!r}]); m = u.module_from_spec(s); "
        "sys.modules['probes'] = m; s.loader.exec_module(m); "
        f"runpy.run_module({probe_worker.MODULE!r}, None, '__main__', 1)"
    )

    def command(descriptor: int) -> list[str]:
        usual = probe_worker.worker_command(descriptor)
        return [str(python), "-P", "-c", start, *usual[-2:]]

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
        """Record that this side has ended."""
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
    on_record: Callable[[ProbeMessage], None]
    worker: WorkerProcess | None = None  # that was started ahead


def run_both(
    sides: tuple[Side, Side], *, first: int, limit_s: float
) -> tuple[JobResult[ProbeMessage], JobResult[ProbeMessage]]:
    """Run two jobs in turns, each for at most `limit_s` of its own; `first` begins.

    Raises KeyboardInterrupt when interrupted: what was measured of these two is lost.
    """
    baton = Baton(first)
    # here, not in the threads: the kernel ends a worker with the thread that has started it
    workers: list[WorkerProcess] = []
    try:
        for side in sides:
            workers.append(side.worker or supervisor.start(side.command))
    except BaseException:
        _kill(workers)
        raise

    def run_side(number: int) -> JobResult[ProbeMessage]:
        def on_record(message: ProbeMessage) -> None:
            is_row = not isinstance(message, Turn)
            if is_row:
                sides[number].on_record(message)
            baton.pass_on(number, row=is_row)

        job = replace(sides[number].job, beside=workers[1 - number].process.pid)
        try:
            return probe_worker.run_job(job, limit_s=2 * limit_s, on_record=on_record, worker=workers[number])
        finally:
            baton.leave(number)

    with ThreadPoolExecutor(len(SIDES)) as pool:
        running = [pool.submit(run_side, number) for number in SIDES]
        try:
            wait(running)
        except BaseException:
            _kill(workers)
            raise
    return running[0].result(), running[1].result()


def _kill(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.process.kill()
