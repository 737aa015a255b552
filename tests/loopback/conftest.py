"""Tests over real sockets on the loopback: no engine, no torch, and no network but for
Debian's package of zsh where there is none.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "images"))
