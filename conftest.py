"""Draws samples of large parametrizations, and keeps what tests/groups.py wants to know of a run.

Not in tests/: pytest puts a conftest's folder on the path, where tests/torch would pass for a torch.
"""

import gc
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

WANTED = "WEIR_TEST_OUTCOME"
SLOWEST = 20  # tests whose seconds are kept, with those of their fixtures
ALL_CASES = bool(os.environ.get("ALL_CASES"))  # as `make thorough` has it

# a test leaves little behind: to look through it after every 700 objects takes longer than many a test
gc.set_threshold(1_000_000, 20, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Where to write it is for this process alone: tests run pytest too."""
    config.stash[_file] = os.environ.pop(WANTED, "")
    config.stash[_spent] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(N)` keep N of the cases with that mark, but for `make thorough`.

    Digests of the cases' ids choose, so tests of the same cases have the same sample, and a new case moves
    at most one other. A case that was asked for by its id is no sample.
    """
    if ALL_CASES or any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            cases[item.nodeid.removesuffix(f"[{item.callspec.id}]")].append(item)
    left = set()
    for each in cases.values():
        (kept,) = each[0].get_closest_marker("sampled").args
        left.update(sorted(each, key=lambda case: hashlib.sha256(case.callspec.id.encode()).digest())[kept:])
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """What was imported stays to the end: the garbage collector need not look through it again and again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Processor time of a test, its fixtures and the programs that it has waited for."""
    before = _processor_s()
    try:
        return (yield)
    finally:
        item.config.stash[_spent][item.nodeid] = _processor_s() - before


def _processor_s() -> float:
    return sum(os.times()[:4])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """After all other plugins have had their say. All that tests left is looked through once; pytest does it
    five times, but not with what is frozen.
    """
    gc.collect()
    gc.freeze()
    if file := session.config.stash[_file]:
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
        seconds: Counter[str] = Counter()
        for report in (report for reports in stats.values() for report in reports):
            seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0)
        found = {
            "tests": session.testscollected,
            "failed": list(dict.fromkeys(failed)),
            "slowest": _most(seconds),
            "busiest": _most(session.config.stash[_spent]),
        }
        Path(file).write_text(json.dumps(found))


def _most(seconds: Counter[str]) -> list[tuple[str, float]]:
    return [(name, round(took, 1)) for name, took in seconds.most_common(SLOWEST)]


_file = pytest.StashKey[str]()
_spent = pytest.StashKey[Counter[str]]()
