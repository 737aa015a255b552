"""Callers can't fill the log: a warning about them is logged once a minute, with a count."""

import logging

import pytest
from logged import Logged
from service.cli import main
from service.log import MAX_TEXTS, PERIOD_S, RepeatFilter


@pytest.fixture
def told(logged: Logged) -> tuple[logging.Logger, list[float]]:
    """A logger with the filter, and its clock."""
    clock = [0.0]
    log = logging.Logger("filtered")
    log.addHandler(logged)
    log.addFilter(RepeatFilter(lambda: clock[0]))
    return log, clock


def test_one_warning_for_each_request_does_not_flood_the_log(
    told: tuple[logging.Logger, list[float]], logged: Logged
) -> None:
    log, clock = told
    for clock[0] in (0.0, 1.0, PERIOD_S - 0.1, PERIOD_S, PERIOD_S + 1):
        log.warning("bad request of %s", "a caller")
    log.warning("another thing")
    assert logged.lines == [
        "bad request of a caller",
        "bad request of a caller (2 more like this in the 60 s before)",
        "another thing",
    ]


def test_warnings_that_differ_for_each_request_do_not_flood_the_log_either(
    told: tuple[logging.Logger, list[float]], logged: Logged
) -> None:
    log, clock = told
    for clock[0] in (0.0, PERIOD_S):
        for caller in range(3 * MAX_TEXTS):
            log.warning(f"bad request of {caller}")  # as other libraries log: the text has no arguments
    assert len(logged.lines) == 2 * MAX_TEXTS
    assert logged.lines[MAX_TEXTS] == f"bad request of 0 ({2 * MAX_TEXTS} more like this in the 60 s before)"


def test_a_fault_does_not_hide_another_one_or_its_own_end(
    told: tuple[logging.Logger, list[float]], logged: Logged
) -> None:
    log, _ = told
    for result in ("no memory", "illegal access", "passed", "passed"):
        log.warning("canary: %s", result)
    for name in ("finbert", "other", "other"):
        try:
            raise OSError(f"{name} can't be read")
        except OSError:
            log.exception("loading failed")
    assert [line.split("\n")[0] for line in logged.lines] == [
        "canary: no memory",
        "canary: illegal access",
        "canary: passed",
        "loading failed",
        "loading failed",
    ]


def test_a_line_that_can_not_be_formatted_raises_nothing(told: tuple[logging.Logger, list[float]]) -> None:
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "%d requests", ("many",), None)
    assert told[0].filter(record)


def test_no_plain_error_and_no_usual_line_is_left_out(
    told: tuple[logging.Logger, list[float]], logged: Logged
) -> None:
    for _ in range(3):
        told[0].error("broken")
        told[0].info("predicted")
    assert logged.lines == ["broken", "predicted"] * 3


def test_a_fault_that_callers_repeat_does_not_fill_the_log_with_tracebacks(
    told: tuple[logging.Logger, list[float]], logged: Logged
) -> None:
    log, clock = told

    def fail(how: str) -> None:
        try:
            int(how) if how == "x" else [].pop()
        except (ValueError, IndexError):
            log.exception("a request failed")

    for clock[0] in (0.0, 1.0, 2.0):
        fail("x")
        fail("another fault")
    clock[0] = PERIOD_S
    fail("x")
    assert [line.split("\n")[0] for line in logged.lines] == [
        "a request failed",
        "a request failed",
        "a request failed (2 more like this in the 60 s before)",
    ]


def test_whatever_is_logged_is_spared() -> None:
    """Of uvicorn, asyncio and OpenTelemetry as well: the filter is on what writes."""
    log = logging.getLogger()
    before = list(log.handlers)
    for each in before:
        log.removeHandler(each)
    try:
        main({"APP_PROFILE": "none-of-that-name"})
        (made,) = log.handlers
        assert [type(one) for one in made.filters] == [RepeatFilter]
    finally:
        log.handlers[:] = before
