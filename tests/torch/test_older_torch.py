"""What torch before 2.4 lacks isn't used: a card without newer builds (gfx803) has such a torch."""

import re
from pathlib import Path

import pytest
import torch

from probes.placement.runtime.packed_tables import autocast_dtype


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # this torch has a newer name for what is used
@pytest.mark.parametrize("older", [False, True])
def test_autocasts_dtype_is_known(older, monkeypatch):
    enabled = torch.is_autocast_enabled
    for wanted in (None, torch.bfloat16):
        with (
            torch.autocast("cpu", dtype=wanted, enabled=wanted is not None),
            monkeypatch.context() as patched,
        ):
            if older:
                patched.delattr(torch, "get_autocast_dtype")
                patched.setattr(torch, "is_autocast_enabled", lambda: enabled("cuda"))
            found = autocast_dtype("cpu"), autocast_dtype("cuda")
        assert found == (wanted, None)


def test_no_module_of_the_probes_uses_a_name_that_older_torch_lacks():
    lacking = re.compile(r"\btorch\.(OutOfMemoryError|get_autocast_dtype|accelerator|library\.custom_op)\b")
    for path in (Path(__file__).parents[2] / "probes").rglob("*.py"):
        if path.name != "packed_tables.py":
            assert not lacking.search(path.read_text(encoding="utf-8")), path
