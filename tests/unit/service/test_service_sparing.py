"""Callers can't fill the log: a warning about them is logged once a minute, with a count."""

import logging

import pytest
from logged import Logged
from service.cli import main
from service.sparing import PERIOD_S, Sparing


@pytest.fixture
def told(logged: Logged) -> tuple[logging.Logger, list[float]]:
    """A logger with the filter, and its clock."""
    clock = [0.0]
    log = logging.Logger("sparing")
    log.addHandler(logged)
    log.addFilter(Sparing(lambda: clock[0]))
    return log, clock


def test_one_warning_for_each_request_does_not_flood_the_log(
    told: tuple[logging.Logger, list[float]], logged: Logged
) -> None:
    log, clock = told
    for clock[0] in (0.0, 1.0, PERIOD_S - 0.1, PERIOD_S, PERIOD_S + 1):
        log.warning("bad request of %s", clock[0])
    log.warning("another thing")
    assert logged.lines == [
        "bad request of 0.0",
        "bad request of 60.0 (2 more like this in the 60 s before)",
        "another thing",
    ]


def test_no_error_is_left_out(told: tuple[logging.Logger, list[float]], logged: Logged) -> None:
    for _ in range(3):
        told[0].error("broken")
    assert logged.lines == ["broken"] * 3


def test_the_service_spares_its_log_of_what_uvicorn_says_of_callers() -> None:
    log = logging.getLogger("uvicorn.error")
    before = list(log.filters)
    main({"APP_PROFILE": "none-of-that-name"})
    (added,) = [one for one in log.filters if one not in before]
    log.removeFilter(added)
    assert isinstance(added, Sparing)
