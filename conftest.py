"""What tests/groups.py wants to know of a run: how many tests there were, and which failed.

Not in tests/: pytest puts a conftest's folder on the path, where tests/torch would pass for a torch.
"""

import json
import os
from pathlib import Path

import pytest

WANTED = "WEIR_TEST_OUTCOME"


def pytest_configure(config: pytest.Config) -> None:
    """Where to write it is for this process alone: tests run pytest too."""
    config.stash[_file] = os.environ.pop(WANTED, "")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """After all other plugins have had their say."""
    if file := session.config.stash[_file]:
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
        found = {"tests": session.testscollected, "failed": list(dict.fromkeys(failed))}
        Path(file).write_text(json.dumps(found))


_file = pytest.StashKey[str]()
