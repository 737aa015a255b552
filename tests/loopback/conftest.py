"""Tests over real sockets on the loopback: no engine, no network, no torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "images"))
