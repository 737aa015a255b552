"""What tests/groups.py wants to know of a run: how many tests there were, which failed, which took longest.

Not in tests/: pytest puts a conftest's folder on the path, where tests/torch would pass for a torch.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

WANTED = "WEIR_TEST_OUTCOME"
SLOWEST = 20  # tests whose seconds are kept, with those of their fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Where to write it is for this process alone: tests run pytest too."""
    config.stash[_file] = os.environ.pop(WANTED, "")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """After all other plugins have had their say."""
    if file := session.config.stash[_file]:
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
        seconds: Counter[str] = Counter()
        for report in (report for reports in stats.values() for report in reports):
            seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0)
        found = {
            "tests": session.testscollected,
            "failed": list(dict.fromkeys(failed)),
            "slowest": [(name, round(took, 1)) for name, took in seconds.most_common(SLOWEST)],
        }
        Path(file).write_text(json.dumps(found))


_file = pytest.StashKey[str]()
