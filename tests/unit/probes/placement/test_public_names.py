"""`probes.placement` offers its names without importing torch before one of them needs it."""

import sys

import pytest

import probes.placement
from probes.core.errors import PlacementError
from probes.placement.types import Plan


def test_what_needs_no_torch_comes_without_it() -> None:
    assert probes.placement.PlacementError is PlacementError
    assert probes.placement.Plan is Plan
    assert callable(probes.placement.plan)
    assert callable(probes.placement.read_plan)
    assert "torch" not in sys.modules


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        _ = probes.placement.plann  # type: ignore[attr-defined]
