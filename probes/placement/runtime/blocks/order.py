"""Which moving block is called after which, as learned from the passes so far. Pure: blocks are numbers.

What comes next depends on the last two blocks: a tied embedding is called at both ends of a pass.
"""


class Order:
    """The order of definition until calls show another.

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

    def learn(self, one: int) -> bool:
        """A block is called. Whether it was the expected one."""
        pair = (self.before, self.last)
        known = self._next.get(pair)
        if known == one and not self._doubted:  # as in the pass before
            self.before, self.last = self.last, one
            return True
        expected = known if known is not None else (self.last + 1) % self._count
        if known is not None and known != one:
            self._doubted.add(pair)
        else:
            self._doubted.discard(pair)
        self._next[pair] = one
        self.before, self.last = self.last, one
        self.surprises += expected != one
        return expected == one


WalkState = tuple[tuple[int, int], int, int, frozenset[int]]


class Walk:
    """How far ahead of the calls one ring has got. `due` was fetched ahead and isn't used yet.

    That are blocks, or pieces of blocks, of which `begun` were fetched of the next block. `stuck`: nothing
    can be begun before one of `due` is used, or a call ends; asking again would only cost the host.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self.at = (order.before, order.last)  # the last two blocks that it came to
        self.lead = 0  # calls
        self.begun = 0
        self.due: set[int] = set()
        self.stuck = False

    def follow(self, *, expected: bool) -> None:
        """A block has been called: the walk is never behind it, and begins there after a surprise."""
        self.lead -= 1
        if not expected:
            self.due.clear()
        if not expected or self.lead < 0:
            self.at, self.lead, self.begun = (self._order.before, self._order.last), 0, 0
            self.stuck = False

    def used(self, one: int) -> None:
        """It is no longer needed."""
        self.due.discard(one)
        self.stuck = False

    def state(self) -> "WalkState":
        """Where it is, to `resume` there later."""
        return self.at, self.lead, self.begun, frozenset(self.due)

    def resume(self, state: "WalkState") -> None:
        """Be where it was."""
        self.at, self.lead, self.begun = state[:3]
        self.due, self.stuck = set(state[3]), False

    def step(self, one: int) -> None:
        """Go on to the next block."""
        self.at = (self.at[1], one)
        self.lead += 1
        self.begun = 0
