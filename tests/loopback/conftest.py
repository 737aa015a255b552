"""Tests over real sockets on the loopback: no engine, no torch, and no network but for
Debian's package of zsh where there is none.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "images"))


@pytest.fixture(autouse=True)
def kept_signals() -> Iterator[None]:
    """A service that has ended ignores signals until its process ends, and here it goes on."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
