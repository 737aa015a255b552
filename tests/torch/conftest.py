"""Tests that need torch, on the CPU. Triton's kernels run in its interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before anything imports one
