"""Which rows share a batch, and when it starts: decided from values, with a clock of ours."""

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.batching.batcher import Batch, Batcher, Policy, QueueFull, Row, Wait, window
from service.batching.worker import retry_after_s

POLICY = Policy(max_batch_tokens=100, max_wait_s=0.005, max_queue_tokens=400, max_padding=0.15)


def offered(*lengths: int, policy: Policy = POLICY) -> Batcher:
    """One request of one row for each length, all at the time 0."""
    made = Batcher(policy)
    for number, tokens in enumerate(lengths):
        made.offer(number, [tokens], group="m", now_s=0)
    return made


def taken(decided: Batch | Wait) -> list[int]:
    assert isinstance(decided, Batch)
    return [row.request for row in decided.rows]


def test_a_lone_request_starts_at_once() -> None:
    batcher = offered(12)
    assert taken(batcher.next(0)) == [0]
    batcher.finished(1)
    batcher.offer(1, [12], group="m", now_s=1.001)
    assert taken(batcher.next(1.001)) == [1]


def test_requests_that_wait_together_share_a_batch() -> None:
    assert taken(offered(12, 12, 12).next(0)) == [0, 1, 2]


def test_a_batch_has_at_most_so_many_tokens() -> None:
    batcher = offered(*[30] * 5)
    assert taken(batcher.next(0)) == [0, 1, 2]
    batcher.finished(1)
    assert taken(batcher.next(1.1)) == [3, 4]


def test_lengths_that_would_pad_too_much_do_not_mix() -> None:
    batcher = offered(10, 40, 11, 39)
    assert taken(batcher.next(0)) == [0, 2]
    batcher.finished(1)
    assert taken(batcher.next(2)) == [3, 1]


def test_a_row_longer_than_a_batch_goes_alone() -> None:
    assert taken(offered(150, 12).next(0)) == [0]


def test_the_device_waits_a_moment_for_callers_who_were_just_answered() -> None:
    batcher = offered(12, 12)
    batcher.next(0)
    batcher.finished(1)
    batcher.offer(2, [12], group="m", now_s=1.001)
    assert batcher.next(1.001) == Wait(1.005)
    batcher.offer(3, [12], group="m", now_s=1.002)
    assert taken(batcher.next(1.002)) == [2, 3]  # all are back


def test_it_waits_no_longer_than_the_policy_says() -> None:
    batcher = offered(12, 12)
    batcher.next(0)
    batcher.finished(1)
    batcher.offer(2, [12], group="m", now_s=1.001)
    assert taken(batcher.next(1.005)) == [2]


def test_two_callers_who_take_turns_come_to_share() -> None:
    batcher = offered(12)
    batcher.next(0)
    batcher.offer(1, [12], group="m", now_s=0.5)
    batcher.finished(1)
    assert batcher.next(1) == Wait(1.005)
    batcher.offer(2, [12], group="m", now_s=1.001)
    assert taken(batcher.next(1.001)) == [1, 2]


def test_a_full_batch_waits_for_nobody() -> None:
    batcher = offered(12, 12)
    batcher.next(0)
    batcher.finished(1)
    batcher.offer(2, [60], group="m", now_s=1)
    assert taken(batcher.next(1)) == [2]


def test_models_do_not_mix_and_the_oldest_goes_first() -> None:
    batcher = Batcher(POLICY)
    for number, group in enumerate("abab"):
        batcher.offer(number, [10], group=group, now_s=0)
    assert taken(batcher.next(0)) == [0, 2]
    batcher.finished(1)
    assert taken(batcher.next(2)) == [1, 3]


def test_the_queue_is_bounded_by_tokens_and_says_how_long_it_takes() -> None:
    batcher = offered(100, 100, 100, 100)
    with pytest.raises(QueueFull) as caught:
        batcher.offer(9, [1], group="m", now_s=0)
    assert caught.value.drain_s is None
    batcher.next(0)
    batcher.finished(2)  # 100 tokens in 2 s
    batcher.next(2.1)
    batcher.offer(9, [100], group="m", now_s=2.1)
    with pytest.raises(QueueFull) as caught:
        batcher.offer(10, [1], group="m", now_s=3.1)
    assert caught.value.drain_s == pytest.approx(1 + 3 * 2)  # what is left of one, and three more


def test_a_request_larger_than_the_queue_is_taken_when_nothing_else_is_there() -> None:
    batcher = Batcher(POLICY)
    batcher.offer(0, [100] * 9, group="m", now_s=0)
    assert len(taken(batcher.next(0))) == 1


def test_a_failed_batch_teaches_nothing_about_speed() -> None:
    batcher = offered(100)
    batcher.next(0)
    batcher.finished(9, ok=False)
    assert batcher.drain_s(9) is None


def test_a_request_whose_deadline_passed_is_never_computed() -> None:
    batcher = Batcher(POLICY)
    batcher.offer(0, [10], group="m", now_s=0, deadline_s=1)
    batcher.offer(1, [10], group="m", now_s=0)
    assert batcher.expire(0.9) == ()
    assert batcher.expire(1) == (0,)
    assert taken(batcher.next(1)) == [1]


def test_a_withdrawn_request_is_never_computed() -> None:
    batcher = offered(10, 10)
    batcher.withdraw(0)
    assert taken(batcher.next(0)) == [1]
    batcher.withdraw(1)
    batcher.finished(1)
    assert batcher.next(1) == Wait()


@pytest.mark.parametrize(
    ("drain_s", "said"), [(None, 1), (0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (29.5, 30)]
)
def test_retry_after_is_whole_seconds_and_never_too_short(drain_s: float | None, said: int) -> None:
    assert retry_after_s(drain_s) == said


def computed(batcher: Batcher, seconds: float, *, refusing: bool = False) -> None:
    """Ten rows of ten tokens arrive, are computed together and take so long."""
    for number in range(10):
        batcher.offer(number, [10], group="m", now_s=0)
    assert len(taken(batcher.next(0))) == 10
    if refusing:
        batcher.note_refusal()
    batcher.finished(seconds)


def test_fewer_are_let_in_while_refusals_slow_the_device_down() -> None:
    batcher = Batcher(Policy(max_batch_tokens=100, max_wait_s=0, max_queue_tokens=200))
    computed(batcher, 1)
    assert batcher.load_share == 1
    for _ in range(6):
        computed(batcher, 2, refusing=True)
    assert batcher.load_share == pytest.approx(0.5, abs=0.01)
    batcher.offer(1, [100], group="m", now_s=0)
    with pytest.raises(QueueFull):
        batcher.offer(2, [10], group="m", now_s=0)


def test_all_places_are_there_again_after_a_batch_without_refusals() -> None:
    batcher = Batcher(Policy(max_batch_tokens=100, max_wait_s=0))
    computed(batcher, 1)
    computed(batcher, 3, refusing=True)
    assert batcher.load_share < 0.7
    computed(batcher, 3)
    assert batcher.load_share == 1


def test_a_slow_device_that_nobody_is_refused_by_keeps_its_places() -> None:
    batcher = Batcher(Policy(max_batch_tokens=100, max_wait_s=0))
    for seconds in (1, 5, 5):
        computed(batcher, seconds)
    assert batcher.load_share == 1


def test_a_quarter_of_the_places_is_always_there() -> None:
    batcher = Batcher(Policy(max_batch_tokens=100, max_wait_s=0))
    computed(batcher, 1)
    for _ in range(9):
        computed(batcher, 100, refusing=True)
    assert batcher.load_share == 0.25


LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=40)


@pytest.mark.thorough
@given(LENGTHS, st.data())
def test_a_window_holds_its_anchor_and_both_limits(lengths: list[int], data: st.DataObject) -> None:
    rows = [Row(number, 0, tokens) for number, tokens in enumerate(sorted(lengths))]
    anchor = data.draw(st.integers(0, len(rows) - 1))
    chosen = Batch("m", tuple(window(rows, anchor, POLICY)))
    assert rows[anchor] in chosen.rows
    assert list(chosen.rows) == rows[rows.index(chosen.rows[0]) :][: len(chosen.rows)]
    if len(chosen.rows) > 1:
        assert chosen.padded <= POLICY.max_batch_tokens
        assert chosen.padded - chosen.tokens <= POLICY.max_padding * chosen.padded


@pytest.mark.thorough
@given(LENGTHS, st.data())
@settings(max_examples=50)
def test_no_larger_window_would_have_fitted(lengths: list[int], data: st.DataObject) -> None:
    rows = [Row(number, 0, tokens) for number, tokens in enumerate(sorted(lengths))]
    anchor = data.draw(st.integers(0, len(rows) - 1))
    n_chosen = len(window(rows, anchor, POLICY))
    for start in range(anchor + 1):
        for end in range(max(anchor + 1, start + n_chosen + 1), len(rows) + 1):
            other = Batch("m", tuple(rows[start:end]))
            too_much = other.padded - other.tokens > POLICY.max_padding * other.padded
            assert other.padded > POLICY.max_batch_tokens or too_much


def test_among_windows_of_as_many_rows_the_one_with_the_fewest_tokens_is_computed() -> None:
    rows = [Row(number, 0, tokens) for number, tokens in enumerate((30, 31, 32, 33))]
    for anchor, first in ((0, 0), (1, 0), (2, 0), (3, 1)):
        assert window(rows, anchor, POLICY) == rows[first : first + 3]


@dataclass
class Model:
    """A simulated device: callers come, leave and lose patience, and every row's fate is written down."""

    batcher: Batcher
    now_s: float = 0.0
    offered: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # withdrawn or expired
    running: Batch | None = None

    def step(self) -> None:
        for number in self.batcher.expire(self.now_s):
            self.ended.add(number)
        decided = self.batcher.next(self.now_s)
        if isinstance(decided, Batch):
            assert not decided.requests & self.ended
            self.running = decided
            for row in decided.rows:
                self.computed[row.request] = self.computed.get(row.request, 0) + 1

    def finish(self, seconds: float) -> None:
        self.now_s += seconds
        if self.running:
            self.batcher.finished(self.now_s)
            self.running = None


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.lists(st.integers(1, 120), min_size=1, max_size=5)),
        st.tuples(st.just("withdraw"), st.integers(0, 30)),
        st.tuples(st.just("run"), st.floats(0.001, 2)),
    ),
    max_size=60,
)


@pytest.mark.thorough
@given(EVENTS, st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_row_is_computed_once_or_given_up_once(
    events: list[tuple[str, object]], with_deadlines: bool
) -> None:
    model = Model(Batcher(POLICY))
    for number, (kind, value) in enumerate(events):
        if kind == "offer":
            assert isinstance(value, list)
            deadline_s = model.now_s + 1.5 if with_deadlines else inf
            try:
                model.batcher.offer(number, value, group=number % 2, now_s=model.now_s, deadline_s=deadline_s)
                model.offered[number] = len(value)
            except QueueFull:
                continue
        elif kind == "withdraw":
            if value in model.offered:  # numbers are given out once
                model.batcher.withdraw(int(str(value)))
                model.ended.add(int(str(value)))
        else:
            model.step()
            model.finish(float(str(value)))
    for _ in range(400):
        if not model.batcher.waiting_requests:
            break
        model.step()
        model.finish(0.01)
    assert model.batcher.waiting_requests == 0, "somebody starves"
    for request, n_rows in model.offered.items():
        done = model.computed.get(request, 0)
        assert done == n_rows or (request in model.ended and done < n_rows) or request in model.ended
        assert done <= n_rows
