"""What the end of a worker's process means for its probe."""

import signal

import pytest

from probes.measure import probe_worker, supervisor
from probes.records.schema import Failed


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (-signal.SIGSEGV, "the worker was killed by SIGSEGV"),
        (-(signal.SIGRTMIN + 1), f"the worker was killed by signal {signal.SIGRTMIN + 1}"),
        (7, "the worker exited with code 7 before it had finished"),
    ],
)
def test_a_worker_that_ends_early_fails_with_how_it_ended(code: int, reason: str) -> None:
    """Also by a signal without a name, which was a traceback."""
    outcome = supervisor._judge(supervisor._Output(lambda _: None, probe_worker.parse_message), code)
    assert isinstance(outcome, Failed)
    assert outcome.reason == reason


def test_only_a_kill_is_put_down_to_memory() -> None:
    ear = supervisor._Output(lambda _: None, probe_worker.parse_message)
    hints = [supervisor._judge(ear, -number).hint for number in (signal.SIGKILL, signal.SIGTERM)]  # type: ignore[union-attr]
    assert "for memory" in hints[0]
    assert hints[1] == ""
