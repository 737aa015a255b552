"""Which waiting rows are computed next, and when; and which requests the queue refuses (QueueFull: 429).
Values in, decisions out: the time is an argument.

A row is one text of one request; its length is its number of tokens. Rows of different requests share a batch
if they are for the same model and of similar length: a batch is as wide as its longest row, and the padding
of shorter rows costs as much as tokens do.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2

from service.settings import Limits

_DECAY = 0.8  # weight of earlier batches in the estimate of speed
_SLOWDOWN_DECAY = 0.5  # and in the slowdown, which must be noticed within a few batches
_MAX_SIZES = 256  # sizes of batches whose usual time is kept; models that are loaded again bring new ones


@dataclass(frozen=True)
class Policy:
    """What a batch may be and how long it is waited for; see `service.settings.Limits`."""

    max_batch_tokens: int = Limits.max_batch_tokens
    max_wait_s: float = Limits.max_wait_ms / 1000
    max_queue_tokens: int = Limits.max_queue_tokens
    max_padding: float = 0.15  # of a batch's tokens
    min_load_share: float = Limits.min_load_share


@dataclass(frozen=True)
class Row:
    """One row: its request's number, its index in the request, and its length in tokens."""

    request: int
    at: int
    tokens: int


@dataclass(frozen=True)
class Batch:
    """Rows of one group, to be computed together, sorted by length."""

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
        """Tokens with padding, as the device computes them."""
        return self.width * len(self.rows)

    @property
    def requests(self) -> set[int]:
        """The numbers of the requests that have rows in it."""
        return {row.request for row in self.rows}


@dataclass(frozen=True)
class Wait:
    """Nothing is to be computed before `until_s`, unless something is offered."""

    until_s: float = inf


class QueueFull(Exception):
    """Too many tokens are waiting. `drain_s`: how long those will take; None: unknown."""

    def __init__(self, drain_s: float | None) -> None:
        super().__init__("the queue is full")
        self.drain_s = drain_s


@dataclass
class _Request:
    group: Hashable
    deadline_s: float
    rows: list[Row]


@dataclass
class LoadShedding:
    """How many of the places may be taken while requests are refused.

    Refusing requests takes CPU time from computing those that were admitted. So fewer are admitted while some
    are refused, so that latency stays at its full-load value. The usual time of a batch is learnt for each
    size, in steps of the square root of 2: a token takes longer in a small batch.
    """

    min_share: float = Limits.min_load_share
    slowdown: float = 1.0  # seconds of recent batches over the usual ones; 1 while nothing is refused
    _usual: dict[tuple[Hashable, int], float] = field(default_factory=dict)  # seconds of a token

    @property
    def share(self) -> float:
        """The share of `max_in_flight` and of `max_queue_tokens` that may be used now."""
        return max(self.min_share, min(1.0, 1 / self.slowdown))

    def note(self, group: Hashable, tokens: int, seconds: float, *, refusing: bool) -> None:
        """Note the time of a batch of so many tokens, padding included; `refusing`: requests were refused."""
        key, token_s = (group, round(2 * log2(tokens))), seconds / tokens
        usual_s = self._usual.get(key)
        if refusing:
            if usual_s is not None:
                self.slowdown += (1 - _SLOWDOWN_DECAY) * (token_s / usual_s - self.slowdown)
            return
        self.slowdown = 1.0
        if len(self._usual) >= _MAX_SIZES:
            self._usual.clear()
        self._usual[key] = token_s if usual_s is None else _DECAY * usual_s + (1 - _DECAY) * token_s


@dataclass
class Batcher:
    """The queue of one device. Every time is a reading of one clock, in seconds."""

    policy: Policy
    _waiting: dict[int, _Request] = field(default_factory=dict)  # in order of arrival
    _running: Batch | None = None
    _started_s: float = 0.0
    _idle_since_s: float = -inf
    _expected: int = 0  # requests that were there when the last batch ended, its own included
    _spent_s: float = 0.0  # on `_spent_tokens`, both weighted towards recent batches
    _spent_tokens: float = 0.0
    _shedding: LoadShedding = field(init=False)
    _refusing: bool = False  # since the last batch ended

    def __post_init__(self) -> None:
        self._shedding = LoadShedding(self.policy.min_load_share)

    @property
    def load_share(self) -> float:
        """The share of all limits that may be used now: less than 1 while refusals slow the rest."""
        return self._shedding.share

    def note_refusal(self) -> None:
        """Note that a request was refused because a limit was reached, here or before the queue."""
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
        """Queue a request whose rows have `lengths` tokens. Raises QueueFull.

        A request that finds the queue empty and the device idle is taken whatever its size.
        """
        held = self.waiting_tokens + (self._running.tokens if self._running else 0)
        if held and held + sum(lengths) > self.load_share * self.policy.max_queue_tokens:
            self.note_refusal()
            raise QueueFull(self.drain_s(now_s))
        rows = [Row(request, at, tokens) for at, tokens in enumerate(lengths)]
        self._waiting[request] = _Request(group, deadline_s, rows)

    def withdraw(self, request: int) -> None:
        """Forget the rows of a request that haven't begun."""
        self._waiting.pop(request, None)

    def expire(self, now_s: float) -> tuple[int, ...]:
        """Forget requests whose deadline passed before all of their rows had begun; return their numbers."""
        late = tuple(number for number, each in self._waiting.items() if each.deadline_s <= now_s)
        for number in late:
            del self._waiting[number]
        return late

    def next(self, now_s: float) -> Batch | Wait:
        """Take a batch from the queue, or return how long to wait. The device must be idle."""
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
        """Note the end of the batch that `next` returned. The time of one that failed isn't counted."""
        batch = self._running
        if batch is None:
            return
        self._running = None
        self._idle_since_s = now_s
        self._expected = len(batch.requests | self._waiting.keys())
        if ok:
            self._spent_s = _DECAY * self._spent_s + (now_s - self._started_s)
            self._spent_tokens = _DECAY * self._spent_tokens + batch.padded
            self._shedding.note(batch.group, batch.padded, now_s - self._started_s, refusing=self._refusing)
        self._refusing = False

    def drain_s(self, now_s: float) -> float | None:
        """Seconds until the queue is computed, at the speed of recent batches; None before the first."""
        if not self._spent_tokens:
            return None
        token_s = self._spent_s / self._spent_tokens
        left_s = 0.0
        if self._running:
            left_s = max(0.0, self._started_s + self._running.padded * token_s - now_s)
        return left_s + self.waiting_tokens * token_s

    def _may_grow(self, batch: Batch) -> bool:
        """Whether the batch has room for callers who were here a moment ago and may come back."""
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
    """Return the largest slice of `rows` that includes `rows[anchor]` and fits one batch.

    `rows` are sorted by length. A slice fits within `max_batch_tokens` and `max_padding`, both counted with
    the width of its longest row. Of slices of equal length, the one with the fewest tokens is chosen. A row
    that is too long for any batch goes alone.
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
    """Return the start of the longest window that ends at `end`: adding shorter rows only adds padding."""

    def fits(start: int) -> bool:
        padded = (end - start) * width
        tokens = sums[end] - sums[start]
        return padded <= policy.max_batch_tokens and padded - tokens <= policy.max_padding * padded

    return bisect_left(range(end - 1), True, key=fits)
