"""Every limit is stated once, in settings.py; docs, compose and nginx say the same.

WEIR_GOLDEN=write writes the table of docs/service.md anew.
"""

import asyncio
import os
import re
from pathlib import Path

import pytest
import yaml
from logged import Logged
from service import health, server
from service.errors import ServiceError, SettingsError
from service.settings import (
    DERIVED_LIMITS,
    LIMITS,
    SETTABLE_LIMITS,
    Limit,
    Limits,
    Settings,
    build_settings,
    variable_of,
)
from test_service_settings import SOURCE

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "service.md"
TABLE = re.compile(r"(?<=<!-- limits -->\n).*?(?=<!-- /limits -->)", re.DOTALL)
API = yaml.safe_load((ROOT / "compose" / "base.yaml").read_text())["services"]["api"]


def shown(value: float, unit: str) -> str:
    return f"{value:,} {unit}".strip()


def row(name: str, limit: Limit) -> str:
    allowed = "fixed"
    if limit.within:
        low, high = limit.within
        allowed = f"{low:,} to {high:,}; `{variable_of(name)}`"
    elif name in DERIVED_LIMITS:
        allowed = "derived"
    default = shown(getattr(Limits(), name), limit.unit)
    return f"| `{name}` | {default} | {allowed} | {limit.exceeded} | {limit.why} |"


def table() -> str:
    head = ["| limit | default | range and variable | over it | what it protects, and what it follows from |"]
    head += ["|---|---|---|---|---|"]
    rows = [row(name, limit) for name, limit in (LIMITS | DERIVED_LIMITS).items()]
    return "\n".join([*head, *rows]) + "\n"


def test_the_docs_have_every_limit_as_settings_has_it() -> None:
    text = DOCS.read_text()
    (found,) = TABLE.findall(text)
    if os.environ.get("WEIR_GOLDEN") == "write":
        DOCS.write_text(TABLE.sub(lambda _: table(), text))
        return
    assert found == table()


def test_compose_passes_on_the_variable_of_every_limit() -> None:
    passed = {name for name, value in API["environment"].items() if value is None}
    assert {variable_of(name) for name in SETTABLE_LIMITS} <= passed


def test_compose_waits_for_the_end_longer_than_the_service_takes() -> None:
    limits = Limits()
    grace_s = int(API["stop_grace_period"].removesuffix("s"))
    assert limits.drain_s + limits.close_s + limits.flush_s < grace_s
    assert f"({grace_s} s)" in LIMITS["drain_s"].why


def test_compose_waits_for_health_longer_than_its_check_does() -> None:
    assert int(API["healthcheck"]["timeout"].removesuffix("s")) > health.TIMEOUT_S


def test_nginx_takes_what_the_service_takes() -> None:
    rules = (ROOT / "compose" / "nginx.conf").read_text()
    limits = Limits()
    assert f"client_max_body_size {limits.max_body_bytes >> 20}m;" in rules
    assert f"client_header_timeout {limits.header_timeout_s}s;" in rules
    assert f"client_body_timeout {limits.body_timeout_s}s;" in rules


def test_what_a_start_lowers_or_finds_contradictory_is_logged(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Limits] = []

    def make_service(settings: Settings) -> None:
        started.append(settings.limits)
        raise ServiceError("far enough")

    monkeypatch.setattr(server, "make_service", make_service)
    monkeypatch.setattr(server.resource, "getrlimit", lambda _which: (256, 256))
    limits = Limits(max_in_flight=128, max_batch_tokens=16384)
    settings = Settings("t", "cpu", Path("/models"), "random", "127.0.0.1", 1, limits)
    with pytest.raises(ServiceError, match="far enough"):
        asyncio.run(server.serve(settings))
    assert (started[0].max_connections, started[0].max_in_flight) == (96, 95)
    assert logged.lines == [
        "max_queue_tokens is 8192: batches don't reach max_batch_tokens (16384)",
        "256 open files allow 96 connections, not the 512 of max_connections",
        "96 connections allow 95 requests at a time, not the 128 of max_in_flight",
    ]


def test_the_environment_wins_over_the_profile() -> None:
    profile = {"device": "cpu", "max_in_flight": 8}
    assert build_settings({"WEIR_MAX_IN_FLIGHT": ""}, profile, SOURCE).limits.max_in_flight == 8
    assert build_settings({"WEIR_MAX_IN_FLIGHT": "16"}, profile, SOURCE).limits.max_in_flight == 16


@pytest.mark.parametrize("text", ["0", "-1", "1025", "1e3", "²", " 8", "8.0", "9" * 5000])
def test_a_wrong_limit_in_the_environment_names_the_variable(text: str) -> None:
    with pytest.raises(SettingsError, match="WEIR_MAX_IN_FLIGHT is ") as caught:
        build_settings({"WEIR_MAX_IN_FLIGHT": text}, {"device": "cpu"}, SOURCE)
    assert caught.value.hint == "write a whole number from 1 to 1024"


def test_a_limit_beyond_another_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(SettingsError, match="max_connections is 512, max_in_flight 600") as caught:
        build_settings({"WEIR_MAX_IN_FLIGHT": "600"}, {"device": "cpu"}, SOURCE)
    assert caught.value.hint == "write max_connections: 1200 or more"


def test_every_default_is_within_its_range() -> None:
    for name, (low, high) in SETTABLE_LIMITS.items():
        assert low <= getattr(Limits(), name) <= high
