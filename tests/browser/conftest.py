"""A headless browser for tests of pages: `browser.open(path.as_uri())` gives a page to look at.

Where Chromium is missing and we are root on Debian or Ubuntu, the distribution's package is installed.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_pipe import Browser

ROOT = Path(__file__).parents[2]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
sys.path.append(str(ROOT / "tests" / "unit" / "probes" / "reports"))  # made reports, in one place
sys.path.append(str(ROOT / "tests" / "docker"))

from debian_packages import apt_get  # noqa: E402


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def install_chromium() -> str:
    """Chromium's path, installed if need be and possible; fails with the next step otherwise."""
    found = find_chromium()
    if found:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.fail("no Chromium here; as root: apt-get install chromium (or your distribution's package)")
    for step in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        done = apt_get(*step)
        if done.returncode:
            pytest.fail(f"apt-get {' '.join(step)} failed; run it by hand:\n{done.stderr[-1500:]}")
    return find_chromium() or pytest.fail("apt-get installed chromium, but there is no such program")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser(install_chromium()) as started:
        yield started
