"""Levels in virtual time, against queues whose answer is known."""

import asyncio
from itertools import islice
from statistics import fmean

import pytest
from simulated import Doing, Queue, simulate

from probes.core.unknown import Unknown
from probes.throughput.served import results
from probes.throughput.served.http import Exchange
from probes.throughput.served.level import Load, measure_level, poisson
from probes.throughput.served.results import Level, ServedSettings


def settings(**other: object) -> ServedSettings:
    usual: dict[str, object] = {
        "rows": 1, "slo_s": None, "window_s": 2.0, "windows": 3, "most_windows": 10, "tolerance": 0.1,
        "limit_s": 30.0, "most_callers": 64, "most_connections": 512, "keep_alive": True, "rates_per_s": (),
        "seed": 1,
    }  # fmt: skip
    return ServedSettings(**{**usual, **other})  # type: ignore[arg-type]


def measured(load: Load, queue: object, how: ServedSettings | None = None) -> Level:
    return simulate(measure_level(load, lambda: queue, how or settings(), busy_s=lambda: 0.0))  # type: ignore[arg-type,return-value]


def lindley(rate: float, seed: int, service_s: float, count: int) -> list[float]:
    """The latencies of the very requests that a seed gives, first come, first served."""
    free, found = 0.0, []
    for at in islice(poisson(rate, seed=seed), count):
        free = max(at, free) + service_s
        found.append(free - at)
    return found


def test_a_closed_loop_of_one_reaches_what_a_lone_caller_can() -> None:
    level = measured(Load("closed", 1), Queue(0.01))
    assert results.throughput(level).value == pytest.approx(100, rel=0.01)
    assert level.latency_s == pytest.approx([0.01] * len(level.latency_s))
    assert not level.unstable
    assert len(level.windows) == 3


def test_callers_of_a_closed_loop_share_what_the_server_can() -> None:
    queue = Queue(0.01)
    level = measured(Load("closed", 8), queue)
    assert queue.most_inside == 8
    assert results.throughput(level).value == pytest.approx(100, rel=0.01)
    assert fmean(level.latency_s) == pytest.approx(0.08, rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("load_share", [0.3, 0.6, 0.9])
def test_an_open_loop_gives_the_latency_of_each_request_as_queueing_has_it(load_share: float) -> None:
    rate = load_share / 0.01
    level = measured(Load("open", 512, rate), Queue(0.01), settings(tolerance=0.0, window_s=5.0))
    end = 2.5 + sum(window.seconds for window in level.windows)
    expected = lindley(rate, 1, 0.01, int(rate * end * 1.5))
    due = list(islice(poisson(rate, seed=1), len(expected)))
    begin = end - level.seconds
    of_window = [late for at, late in zip(due, expected, strict=True) if begin < at <= end]
    assert level.latency_s == pytest.approx(of_window, abs=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("load_share", [0.3, pytest.param(0.6, marks=pytest.mark.sampled(0)), 0.8])
def test_the_mean_of_an_open_loop_is_that_of_an_m_d_1_queue(load_share: float) -> None:
    rate = load_share / 0.01
    level = measured(
        Load("open", 512, rate), Queue(0.01), settings(tolerance=0.0, window_s=300.0, most_windows=3)
    )
    formula = 0.01 * (1 + load_share / (2 * (1 - load_share)))  # Pollaczek and Khinchine
    assert fmean(level.latency_s) == pytest.approx(formula, rel=0.05)


@pytest.mark.thorough
def test_a_pause_of_the_server_shows_in_an_open_loop_and_hides_in_a_naive_one() -> None:
    """One connection, 50 requests a second, 1 s of pause in the 6 s that count: a sixth of them waited."""
    queue = Queue(0.001, pauses=((4.0, 5.0),))
    level = measured(Load("open", 1, 50.0), queue, settings(tolerance=0.0, most_windows=3))
    corrected, naive = results.latencies(level), results.naive_latencies(level)
    assert not isinstance(corrected, Unknown)
    assert not isinstance(naive, Unknown)
    assert corrected[1].value == pytest.approx(0.4, abs=0.15)  # p90: 1 s x (1 - 0.1 x 6)
    assert naive[1].value < 0.005
    assert corrected[2].value > 0.85
    assert level.client.queued > 40
    closed = measured(Load("closed", 1), Queue(0.001, pauses=((4.0, 5.0),)), settings(most_windows=3))
    found = results.latencies(closed)
    assert not isinstance(found, Unknown)
    assert found[2].value < 0.005  # the one slow answer is one of thousands


def test_requests_under_way_at_the_end_are_counted() -> None:
    """What isn't answered yet when the windows end are the slowest ones; leaving them out would flatter."""
    level = measured(Load("open", 512, 150.0), Queue(0.01), settings(tolerance=0.0, most_windows=3))
    arrived = sum(window.arrived for window in level.windows)
    assert level.asked == arrived == pytest.approx(900, rel=0.15)
    assert sum(window.answered for window in level.windows) < 0.75 * arrived
    assert max(level.latency_s) > 2.0
    assert "rises" in level.unstable


def test_what_is_never_answered_is_counted_as_failed() -> None:
    level = measured(
        Load("open", 512, 150.0), Queue(0.01), settings(tolerance=0.0, most_windows=3, limit_s=0.5)
    )
    assert [one.what for one in level.failed] == ["not answered before the level ended"]
    assert level.asked == sum(window.arrived for window in level.windows)


def test_refusals_are_counted_apart_and_do_not_flood() -> None:
    queue = Queue(0.01, refuse_beyond=4)
    level = measured(Load("closed", 8), queue)
    assert level.refused > 50
    assert level.refused < 8 * level.seconds / 0.05 + 8
    assert not level.failed
    assert max(level.latency_s) <= 0.0401


def test_a_server_that_always_fails_ends_the_level_soon() -> None:
    broken = Doing(lambda sent: Exchange(sent, sent + 0.01, "connection reset"))
    level = measured(Load("closed", 2), broken)
    assert level.answered == 0
    assert level.failed[0].what == "connection reset"
    assert len(level.windows) == 1


def test_a_late_client_is_said_to_be_the_bottleneck() -> None:
    slow = Doing(lambda sent: Exchange(sent + 0.005, sent + 0.01, "good"))
    level = measured(Load("closed", 2), slow)
    assert "sent 5 ms late" in level.client.bound_by
    assert not measured(Load("closed", 2), Queue(0.01)).client.bound_by
    busy = simulate(measure_level(Load("closed", 2), lambda: Queue(0.01), settings(), busy_s=_busy()))
    assert "busy 90%" in busy.client.bound_by


def _busy():
    return lambda: 0.9 * asyncio.get_running_loop().time()


def test_a_fault_of_the_driver_is_raised_and_not_awaited_for_ever() -> None:
    def broken(_sent: float) -> Exchange:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measured(Load("closed", 1), Doing(broken))


@pytest.mark.parametrize("load", [Load("closed", 1), Load("open", 512, 0.5)])
def test_a_server_slower_than_a_window_is_waited_for(load: Load) -> None:
    """No answer yet is no failure: on a slow service a level ended after one window, as if saturated."""
    level = measured(load, Queue(1.2), settings(window_s=0.5))
    assert len(level.windows) >= 3
    assert level.answered >= 3


def test_a_window_ends_at_a_good_answer_whatever_is_noted_after_it() -> None:
    """The one who answers and the one who refuses end in one turn of the loop, the refusal a little later."""
    from probes.throughput.served import level as levelrun
    from probes.throughput.served.load import RequestRecord

    async def bound() -> float:
        ledger = levelrun._Records()
        asking = asyncio.create_task(levelrun._boundary(Load("closed", 2), settings(), ledger))
        await asyncio.sleep(1.0)
        ledger.add(RequestRecord(0.0, 0.0, 1.0, "good", False))
        ledger.add(RequestRecord(0.0, 0.0, 1.75, "refused", False))
        return await asking

    assert simulate(bound()) == 1.0
