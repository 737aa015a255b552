"""Which waiting rows are computed next, and when. Values in, decisions out: the time is an argument.

A row is one text of one request, as long as its tokens. Rows of different requests share a batch when they
are for the same model and of similar length: a batch is as wide as its longest row, and what shorter rows
leave empty is padding, which costs as much as tokens do.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2

_RECENT = 0.5  # and in the slowdown: it must be noticed within a few batches
_LEAST = 0.25  # of the places, however slow the device has become
_MOST_KINDS = 256  # of batches to remember; reloaded models bring new ones


@dataclass
class LoadShedding:
    """Refusals, and whoever sends what is refused, take CPUs from the computing of what was admitted.

    So fewer requests are let in while some are refused: as many as take no longer than a full house
    takes otherwise. What is usual is learnt for each size of batch, in steps of the square root of 2: a
    token of a small batch takes longer.
    """

    slowdown: float = 1.0  # seconds of recent batches over the usual ones; 1 while nothing is refused
    _usual: dict[tuple[Hashable, int], float] = field(default_factory=dict)  # seconds of a token

    @property
    def room(self) -> float:
        """The share of all places that may be taken now."""
        return max(_LEAST, min(1.0, 1 / self.slowdown))

    def note(self, group: Hashable, tokens: int, seconds: float, *, refusing: bool) -> None:
        """A batch of so many tokens, padding included, was computed. `refusing`: some had no place."""
        key, now = (group, round(2 * log2(tokens))), seconds / tokens
        usual = self._usual.get(key)
        if refusing:
            if usual is not None:
                self.slowdown += (1 - _RECENT) * (now / usual - self.slowdown)
            return
        self.slowdown = 1.0
        if len(self._usual) >= _MOST_KINDS:
            self._usual.clear()
        self._usual[key] = now if usual is None else _OLD * usual + (1 - _OLD) * now


_OLD = 0.8  # weight of the batches before the last one in the estimate of speed


@dataclass(frozen=True)
class Policy:
    """What a batch may be, and how long it is waited for."""

    max_batch_tokens: int = 512  # padding included; a single row may have more
    max_wait_s: float = 0.005  # how long the device idles at most, so that callers who come together share
    max_queue_tokens: int = 8192  # waiting and running; more are refused
    max_padding: float = 0.15  # of a batch's tokens


@dataclass(frozen=True)
class Row:
    """One row of one request: the request's number, the row's place in it, and its length in tokens."""

    request: int
    at: int
    tokens: int


@dataclass(frozen=True)
class Batch:
    """Rows of one group, to be computed together; the shortest first."""

    group: Hashable
    rows: tuple[Row, ...]

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.rows[-1].tokens

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(row.tokens for row in self.rows)

    @property
    def padded(self) -> int:
        """Tokens with padding: what the device computes."""
        return self.width * len(self.rows)

    @property
    def requests(self) -> set[int]:
        """The numbers of the requests that have rows in it."""
        return {row.request for row in self.rows}


@dataclass(frozen=True)
class Wait:
    """Nothing to compute now. Ask again at `until_s`, or when something was offered."""

    until_s: float = inf


class QueueFull(Exception):
    """More tokens are waiting than may; `drain_s` is how long those will take, where that is known."""

    def __init__(self, drain_s: float | None) -> None:
        super().__init__("the queue is full")
        self.drain_s = drain_s


@dataclass
class _Request:
    group: Hashable
    deadline_s: float
    rows: list[Row]


@dataclass
class Batcher:
    """The queue of one device. Every time is a reading of one clock, in seconds."""

    policy: Policy
    _waiting: dict[int, _Request] = field(default_factory=dict)  # in order of arrival
    _running: Batch | None = None
    _started_s: float = 0.0
    _idle_since_s: float = -inf
    _expected: int = 0  # requests that were there when the last batch ended, its own included
    _spent_s: float = 0.0  # on the `_done` tokens: recent batches weigh most
    _done: float = 0.0
    _speed: LoadShedding = field(default_factory=LoadShedding)
    _refusing: bool = False  # since the last batch ended

    @property
    def room(self) -> float:
        """The share of all places that may be taken now: less than 1 where refusals slow the rest."""
        return self._speed.room

    def refused(self) -> None:
        """A request was refused for want of a place, here or before it came here."""
        self._refusing = True

    @property
    def waiting_requests(self) -> int:
        """Requests with rows that haven't begun."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that haven't begun, without padding."""
        return sum(row.tokens for each in self._waiting.values() for row in each.rows)

    def offer(
        self,
        request: int,
        lengths: Sequence[int],
        *,
        group: Hashable,
        now_s: float,
        deadline_s: float = inf,
    ) -> None:
        """Queue a request's rows, `lengths` tokens each. Raises QueueFull.

        A request that finds nothing else there is always taken, however large it is.
        """
        held = self.waiting_tokens + (self._running.tokens if self._running else 0)
        if held and held + sum(lengths) > self.room * self.policy.max_queue_tokens:
            self.refused()
            raise QueueFull(self.drain_s(now_s))
        rows = [Row(request, at, tokens) for at, tokens in enumerate(lengths)]
        self._waiting[request] = _Request(group, deadline_s, rows)

    def withdraw(self, request: int) -> None:
        """Forget the rows of a request that haven't begun: nobody waits for them."""
        self._waiting.pop(request, None)

    def expire(self, now_s: float) -> tuple[int, ...]:
        """Forget the requests whose deadline passed before all of their rows had begun; their numbers."""
        late = tuple(number for number, each in self._waiting.items() if each.deadline_s <= now_s)
        for number in late:
            del self._waiting[number]
        return late

    def next(self, now_s: float) -> Batch | Wait:
        """The batch to compute now, which leaves the queue; or how long to wait. The device must be idle."""
        if not self._waiting:
            return Wait()
        oldest = next(iter(self._waiting.values()))
        batch = self._batch_with(oldest.rows[0], oldest.group)
        until_s = self._idle_since_s + self.policy.max_wait_s
        if now_s < until_s and self._may_grow(batch):
            return Wait(until_s)
        self._begin(batch, now_s)
        return batch

    def finished(self, now_s: float, *, ok: bool = True) -> None:
        """The batch that `next` gave is computed; where it failed (not `ok`), its time says nothing."""
        batch = self._running
        if batch is None:
            return
        self._running = None
        self._idle_since_s = now_s
        self._expected = len(batch.requests | self._waiting.keys())
        if ok:
            self._spent_s = _OLD * self._spent_s + (now_s - self._started_s)
            self._done = _OLD * self._done + batch.padded
            self._speed.note(batch.group, batch.padded, now_s - self._started_s, refusing=self._refusing)
        self._refusing = False

    def drain_s(self, now_s: float) -> float | None:
        """Seconds until all of this is computed, at the speed of recent batches; None before the first."""
        if not self._done:
            return None
        a_token_s = self._spent_s / self._done
        left_s = 0.0
        if self._running:
            left_s = max(0.0, self._started_s + self._running.padded * a_token_s - now_s)
        return left_s + self.waiting_tokens * a_token_s

    def _may_grow(self, batch: Batch) -> bool:
        """Whether callers who were here a moment ago may come back in time to share this batch."""
        full = (len(batch.rows) + 1) * batch.width > self.policy.max_batch_tokens
        return not full and len(self._waiting) < self._expected

    def _batch_with(self, anchor: Row, group: Hashable) -> Batch:
        rows = [row for each in self._waiting.values() if each.group == group for row in each.rows]
        rows.sort(key=lambda row: (row.tokens, row.request, row.at))
        return Batch(group, tuple(window(rows, rows.index(anchor), self.policy)))

    def _begin(self, batch: Batch, now_s: float) -> None:
        taken = set(batch.rows)
        for number in batch.requests:
            request = self._waiting[number]
            request.rows = [row for row in request.rows if row not in taken]
            if not request.rows:
                del self._waiting[number]
        self._running, self._started_s = batch, now_s


def window(rows: Sequence[Row], anchor: int, policy: Policy) -> Sequence[Row]:
    """The most neighbours of `rows[anchor]` that fit one batch with it; `rows` are sorted by length.

    They fit with at most `max_batch_tokens` and `max_padding`, both counted with the longest's width.
    Among as many, those with the fewest tokens. A row that is too long for a batch goes alone.
    """
    sums = [0, *accumulate(row.tokens for row in rows)]
    best = (1, -rows[anchor].tokens, anchor, anchor + 1)
    for end in range(anchor + 1, len(rows) + 1):
        width = rows[end - 1].tokens
        if (end - anchor) * width > policy.max_batch_tokens and end > anchor + 1:
            break
        start = _earliest(sums, end, width, policy)
        if start <= anchor:
            best = max(best, (end - start, -width * (end - start), start, end))
    return rows[best[2] : best[3]]


def _earliest(sums: Sequence[int], end: int, width: int, policy: Policy) -> int:
    """Where the longest window that ends before `end` starts: both limits only tighten with shorter rows."""

    def fits(start: int) -> bool:
        padded = (end - start) * width
        tokens = sums[end] - sums[start]
        return padded <= policy.max_batch_tokens and padded - tokens <= policy.max_padding * padded

    return bisect_left(range(end - 1), True, key=fits)
