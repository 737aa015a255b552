"""What somebody gets who asks a program to stop once, twice at once, and again when it doesn't end."""

import gc
import signal
import time
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import cast

import pytest

from probes.core.entry import PATIENCE_S, Interrupts, interruptible

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (*NUMBERS, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("second", NUMBERS)
def test_a_second_signal_does_not_end_the_clean_up_after_the_first(second: signal.Signals) -> None:
    done = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(second)
            done.append("cleaned up")

    with interruptible(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["cleaned up"]


def test_a_signal_behind_the_last_line_does_not_replace_the_exit_code() -> None:
    with interruptible():
        pass
    for number in NUMBERS:
        signal.raise_signal(number)


def test_a_clean_up_that_hangs_can_be_interrupted_after_a_while(capfd: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    interrupts = Interrupts(lambda: clock[0])
    with pytest.raises(KeyboardInterrupt):
        interrupts(2, None)
    for clock[0] in (0.005, 1.0, PATIENCE_S - 0.001):
        interrupts(2, None)
    assert capfd.readouterr().err.count("stopping") == 1
    clock[0] = PATIENCE_S
    with pytest.raises(KeyboardInterrupt):
        interrupts(2, None)


def test_an_interruption_that_falls_into_a_finaliser_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C between two levels of a scan, which begin with a garbage collection, was ignored."""

    class Finalised:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def collecting() -> None:
        Finalised()
        gc.collect(0)
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            time.sleep(0.001)

    with interruptible(), pytest.raises(KeyboardInterrupt):
        collecting()
    assert capfd.readouterr().err == ""


def test_an_interruption_that_comes_again_before_the_hook_has_returned_comes_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the timer went off within the hook that had set it, where what is raised is lost."""
    timers: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _which, seconds: timers.append(seconds))
    interrupts = Interrupts()
    hook = SimpleNamespace(f_code=Interrupts.ignored.__code__, f_back=None)
    interrupts(signal.SIGALRM, cast(FrameType, SimpleNamespace(f_code=None, f_back=hook)))
    assert len(timers) == 1
    with pytest.raises(KeyboardInterrupt):
        interrupts(signal.SIGALRM, cast(FrameType, SimpleNamespace(f_code=None, f_back=None)))


def test_signals_that_are_ignored_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        signal.raise_signal(signal.SIGHUP)
