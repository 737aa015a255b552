"""Watches over one rank: signals that ask it to stop, and steps that never end. Needs no torch.

A thread waits for signals and for the time-out, since the rank's own thread may be inside a collective that
never returns. It ends the process itself: nothing else could.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final, Protocol

from probes.core.errors import Exit

LOOK_S: Final = 1.0  # between two looks at the clock
OTHERS_S: Final = 5.0  # that a rank which gives up waits for the others to say where they are
LOADING: Final = "data loading"  # a phase
STUCK: Final = "stuck"  # in the store: a rank has given up; below it, where each rank is
ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALLED: Final = 128


class Store(Protocol):
    """What all ranks share: torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""


class Guard:
    """One rank's state, as its own thread says it, and the thread that watches it.

    `end` is called with the step, the cause and the exit code; it reports them and ends the process.
    """

    def __init__(self, rank: int, world: int, timeout_s: float, end: Callable[[int, str, int], None]) -> None:
        self.rank, self.world, self._timeout_s, self._end = rank, world, timeout_s, end
        self.step, self.phase = 0, "start"
        self.asked = False  # for a checkpoint, by SIGUSR1
        self.store: Store | None = None
        self._moved_s = time.monotonic()
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def start(self) -> None:
        """Take over the signals, and begin to watch. In the main thread, once."""
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, self._note)
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays
                signal.signal(number, self._note)
        threading.Thread(target=self._watch, name="weir-guard", daemon=True).start()
        threading.Thread(target=self._answer, name="weir-guard-answers", daemon=True).start()

    def moved(self, phase: str, step: int | None = None) -> None:
        """The rank goes on with this phase: the time-out begins anew."""
        self.phase, self._moved_s = phase, time.monotonic()
        if step is not None:
            self.step = step

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked |= number == signal.SIGUSR1

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._wake], [], [], min(LOOK_S, self._timeout_s / 4))
            for number in os.read(self._wake, 4096) if ready else b"":
                if number in ENDING:
                    name = signal.Signals(number).name
                    self._end(self.step, f"ended by {name} in {self.phase}", _SIGNALLED + number)
            still_s = time.monotonic() - self._moved_s
            if still_s > self._timeout_s:
                others = self._others()
                self._end(
                    self.step, f"no progress in {self.phase} for {still_s:.0f} s{others}", int(Exit.BROKEN)
                )

    def _answer(self) -> None:
        """Say where this rank is as soon as another one gives up, whether its own time is over or not.

        A thread of its own: a store that doesn't answer holds up nothing else.
        """
        with suppress(Exception):  # the store is gone, with the rank that has it
            while self.store is None or self.world == 1 or not self.store.check([STUCK]):
                time.sleep(LOOK_S)
            self._say_where()

    def _say_where(self) -> None:
        assert self.store is not None
        self.store.set(f"{STUCK}/{self.rank}", f"{self.phase} of step {self.step}")

    def _others(self) -> str:
        """What the other ranks say; a store that doesn't answer isn't waited for."""
        found: list[str] = []
        asking = threading.Thread(target=self._ask, args=(found,), daemon=True)
        asking.start()
        asking.join(OTHERS_S + LOOK_S)
        return found[0] if found else "; rank 0, which knows of the others, doesn't answer"

    def _ask(self, found: list[str]) -> None:
        if self.store is None or self.world == 1:
            found.append("")
            return
        self._say_where()
        self.store.set(STUCK, str(self.rank))
        others = {rank: "" for rank in range(self.world) if rank != self.rank}
        until_s = time.monotonic() + OTHERS_S
        while time.monotonic() < until_s and not all(others.values()):
            for rank in (rank for rank, place in others.items() if not place):
                if self.store.check([f"{STUCK}/{rank}"]):
                    others[rank] = self.store.get(f"{STUCK}/{rank}").decode()
            time.sleep(0.05)
        elsewhere = [
            f"rank {rank} is in {place}" if place else f"rank {rank} doesn't say where it is"
            for rank, place in others.items()
            if not place.startswith(self.phase)
        ]
        found.append("".join(f"; {text}" for text in elsewhere[:8]))


class StopAgreement:
    """At which step all ranks stop, once one of them was asked to.

    A rank that is asked names a later boundary in the store, and all look there at it: none can be past
    that boundary, because every step ends with an exchange in which all ranks take part.
    """

    KEY: Final = "stop"
    SETTLED: Final = 8  # steps after which it is known how long one takes
    EVERY_S: Final = 1.0  # between two looks into the store: rank 0 answers them for all ranks
    MOST_STEPS: Final = 64

    def __init__(self, guard: Guard, store: Store) -> None:
        self._guard, self._store = guard, store
        self._every, self._steps, self._begun_s = 1, 0, time.monotonic()

    def here(self, step: int) -> bool:
        """Whether all ranks stop now, `step` steps being done. Every rank asks after every step."""
        if self._guard.world == 1:
            return self._guard.asked
        self._steps += 1
        if self._steps == self.SETTLED:
            self._settle()
        if step % self._every:
            return False
        if self._store.check([self.KEY]):
            return int(self._store.get(self.KEY)) <= step
        if self._guard.asked:
            self._store.set(self.KEY, str(step + self._every))
        return False

    def _settle(self) -> None:
        if self._guard.rank == 0:
            each_s = (time.monotonic() - self._begun_s) / self.SETTLED
            every = min(max(int(self.EVERY_S / max(each_s, 1e-6)), 1), self.MOST_STEPS)
            self._store.set("every", str(every))
        self._every = int(self._store.get("every"))
