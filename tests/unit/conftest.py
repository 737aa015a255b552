"""Unit tests can't leave the process: no subprocess, no socket."""

import itertools
import os
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

FONTS = "fc-list"  # matplotlib asks for the system's fonts once, and keeps the answer in the account's cache


def pytest_configure(config: pytest.Config) -> None:
    """Random examples are the same in each run, and none fails because a busy machine is slow."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "steady",
        max_examples=100 if os.environ.get("ALL_CASES") else 25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("steady")
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):  # as `make check` has it
        config.pluginmanager.register(_NoDots())


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, which looks through the folders of all tests before it for each."""
    made = tmp_path_factory.getbasetemp() / f"{next(_folders)}"
    made.mkdir(mode=0o700)
    return made


_folders = itertools.count()


class _NoDots:
    """Writes nothing for a test that passed: of `make check` only the end is seen anyway."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if not report.passed:
            return None
        return "passed" if report.when == "call" else "", "", ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Around unit tests and their fixtures alone: others may run in the same process and come here too."""
    if not _is_unit(item):
        return (yield)
    if not _sandbox:
        _sandbox.append(_shut())
    try:
        return (yield)
    finally:
        if nextitem is None or not _is_unit(nextitem):
            _sandbox.pop().undo()


_sandbox: list[pytest.MonkeyPatch] = []  # one, while unit tests run


def _is_unit(item: pytest.Item) -> bool:
    return item.nodeid.startswith("tests/unit/")


def _shut() -> pytest.MonkeyPatch:
    start = subprocess.Popen

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a unit test tried to reach outside: {args!r}")

    def popen(*args: Any, **kwargs: Any) -> object:
        asks_for_fonts = args and isinstance(args[0], list) and args[0][:1] == [FONTS]
        return start(*args, **kwargs) if asks_for_fonts else refuse(*args, **kwargs)

    patched = pytest.MonkeyPatch()
    patched.setattr(subprocess, "Popen", popen)
    patched.setattr(socket.socket, "connect", refuse)
    for name, value in {"COLUMNS": "80", "LINES": "24", "LANGUAGE": "C"}.items():
        patched.setenv(name, value)  # help reads alike everywhere, and argparse need not search for it
    return patched
