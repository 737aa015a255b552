"""The calls of a placed model: threads take turns, and the next block is predicted from the passes before.

`Lookahead` is how far ahead of the calls copies have got.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def _nothing() -> None:
    """The default of `Turns.taken`: nothing has to be put in order after a failure."""


class Turns:
    """The lock of a placed model, which one thread runs at a time.

    A thread takes the turn in its outermost call and in none within it: the caller asks `mine()` first, and
    ends only a turn that it has begun. So `give_back` is right at whatever moment a call was interrupted.
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

    def give_back(self, had_turn: bool) -> None:
        """End the turn, if it is this thread's and was not before."""
        if not had_turn and self.mine():
            self.end()

    def taken(self, work: Callable[[], Result], failed: Callable[[], None] = _nothing) -> Result:
        """Call `work` in a turn of this thread, which is waited for, and return its result.

        `failed` is called before the turn ends where `work` failed, or was interrupted.
        """
        had_turn = self.mine()
        try:
            if not had_turn:
                self.wait()
            result = work()
            if not had_turn:
                self.end()
        except BaseException:
            try:
                if not had_turn and self.mine():
                    failed()
            finally:
                self.give_back(had_turn)
            raise
        return result


class CallOrder:
    """Predicts which block is called next: the order of definition until calls show another.

    A successor that has just changed isn't believed until it has come twice: blocks that are called in a new
    order in each pass, such as experts, would otherwise be fetched for nothing.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._next: dict[tuple[int, int], int] = {}
        self._doubted: set[tuple[int, int]] = set()
        self.before, self.last = -1, count - 1  # as if a pass had just ended
        self.surprises = 0  # calls that came in another order than expected

    def after(self, pair: tuple[int, int]) -> int | None:
        """The block after two that came one after the other; None when that isn't known."""
        if pair in self._doubted:
            return None
        return self._next.get(pair, (pair[1] + 1) % self._count)

    def learn(self, block: int) -> bool:
        """Note that a block is called. Returns whether it was the expected one."""
        pair = (self.before, self.last)
        known = self._next.get(pair)
        if known == block and not self._doubted:  # as in the pass before
            self.before, self.last = self.last, block
            return True
        expected = known if known is not None else (self.last + 1) % self._count
        if known is not None and known != block:
            self._doubted.add(pair)
        else:
            self._doubted.discard(pair)
        self._next[pair] = block
        self.before, self.last = self.last, block
        self.surprises += expected != block
        return expected == block


LookaheadState = tuple[tuple[int, int], int, int, frozenset[int]]


class Lookahead:
    """How far ahead of the calls copies to the staging buffers have got.

    `due`: indices of pieces of blocks that were fetched ahead and aren't used yet. `begun`: how many pieces
    of the next block were fetched. `stuck`: nothing can be begun before one of `due` is used,
    or a call ends; asking again would only cost the host.
    """

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self.at = (order.before, order.last)  # the last two blocks that it came to
        self.lead = 0  # calls
        self.begun = 0
        self.due: set[int] = set()
        self.stuck = False

    def follow(self, *, expected: bool) -> None:
        """Advance to the called block; after an unexpected call, start again from it."""
        self.lead -= 1
        if not expected:
            self.due.clear()
        if not expected or self.lead < 0:
            self.at, self.lead, self.begun = (self._order.before, self._order.last), 0, 0
            self.stuck = False

    def used(self, index: int) -> None:
        """The piece that was fetched ahead is no longer needed in its buffer."""
        self.due.discard(index)
        self.stuck = False

    def state(self) -> "LookaheadState":
        """The present position, for `resume`."""
        return self.at, self.lead, self.begun, frozenset(self.due)

    def resume(self, state: "LookaheadState") -> None:
        """Return to an earlier position."""
        self.at, self.lead, self.begun = state[:3]
        self.due, self.stuck = set(state[3]), False

    def step(self, index: int) -> None:
        """Go on to the next block."""
        self.at = (self.at[1], index)
        self.lead += 1
        self.begun = 0
