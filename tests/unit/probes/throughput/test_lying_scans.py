"""Throughput reports that lie: each is refused with its place, and no verb ends in a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_scans
import pytest
from test_scan_shown import whole

from probes.cli.program import main
from probes.core.codec import to_json
from probes.core.errors import ReportError, ServerUnusable, UsageError
from probes.throughput.report import from_json
from probes.throughput.served.protocol import parse_url
from probes.throughput.served.scan import _resolve

Report = dict[str, Any]


def _ceiling(found: Report) -> Report:
    rate: Report = found["ceilings"]["devices"][0]["memory"]
    return rate


def _row(found: Report) -> Report:
    row: Report = found["direct"]["series"][0]["rows"][0]
    return row


def _level(found: Report, loop: str) -> Report:
    return next(level for level in found["served"]["levels"] if level["loop"] == loop)


HONEST = to_json(whole())
LIES: list[Callable[[Report], object]] = [
    lambda found: found.update(started="soon"),
    lambda found: found.update(started="0001-01-01"),
    lambda found: _ceiling(found).update(work=0),
    lambda found: _ceiling(found).update(work=5e-324),
    lambda found: _ceiling(found).update(work=1e308),
    lambda found: _ceiling(found).update(seconds=[]),
    lambda found: _row(found).update(batch=0),
    lambda found: _row(found).update(wall_s=[]),
    lambda found: _row(found).update(wall_s=[1.0, 0.0]),
    lambda found: _row(found).update(wall_s=[1e308, 1e308]),
    lambda found: _row(found).update(peak_bytes=10**300),
    lambda found: _level(found, "closed").update(seconds=0),
    lambda found: _level(found, "closed").update(callers=-1),
    lambda found: _level(found, "closed")["due_s"].pop(),
    lambda found: _level(found, "open").update(rate_per_s=None),
    lambda found: _level(found, "open").update(waited_s=[]),
    lambda found: _level(found, "open")["windows"][0].update(seconds=0),
]


@pytest.mark.thorough
@pytest.mark.parametrize("lie", LIES)
def test_a_scan_that_lies_is_refused_instead_of_ending_in_a_traceback(
    lie: Callable[[Report], object], tmp_path: Path
) -> None:
    found = json.loads(HONEST)
    lie(found)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(found))
    for verb in ("show", "prometheus"):
        assert main([verb, str(file)]) == 5


def test_an_honest_scan_is_still_read() -> None:
    assert from_json(to_json(whole())) == whole()
    assert from_json(to_json(made_scans.report())) == made_scans.report()
    with pytest.raises(ReportError):
        from_json("[]")


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".example"])
def test_a_host_that_no_name_server_could_know_is_an_error_and_no_traceback(host: str) -> None:
    with pytest.raises(ServerUnusable, match="can't find"):
        _resolve(parse_url(f"http://{host}:1"))


def test_port_0_does_not_silently_become_port_80() -> None:
    with pytest.raises(UsageError, match="port 0"):
        parse_url("http://127.0.0.1:0")
