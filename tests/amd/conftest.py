"""Tests here share a stand-in for Triton's driver, and how children are started, with tests/torch/packing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "torch" / "packing"))
