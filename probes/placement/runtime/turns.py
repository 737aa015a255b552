"""Whose turn it is to run a placed model: one thread's at a time, until its outermost call ends."""

import threading
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


def _nothing() -> None:
    """There is nothing to put in order."""


class Turns:
    """A lock that a thread takes in its outermost call and in none within it, so nothing is counted.

    Who takes it asks `mine()` first, and ends the turn only where it wasn't its own already. So what an
    interruption at any moment leaves is known: `give_back` is right whether or not the turn has begun.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        self.mine: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # as conditions ask
        self.wait: Callable[[], object] = lock.acquire
        self.end: Callable[[], None] = lock.release
        self._acquire = lock.acquire

    def begin(self) -> bool:
        """Take the turn unless another thread has it."""
        return self._acquire(blocking=False)

    def give_back(self, mine: bool) -> None:
        """End the turn, if it is this thread's and was not before."""
        if not mine and self.mine():
            self.end()

    def taken(self, work: Callable[[], Made], failed: Callable[[], None] = _nothing) -> Made:
        """What `work` returns in a turn of this thread, which is waited for.

        `failed` is called before the turn ends where `work` failed, or was interrupted.
        """
        mine = self.mine()
        try:
            if not mine:
                self.wait()
            made = work()
            if not mine:
                self.end()
        except BaseException:
            try:
                if not mine and self.mine():
                    failed()
            finally:
                self.give_back(mine)
            raise
        return made
