"""Plans where a model's weights are placed, and runs a model placed that way.

The public names are imported when they are first used: `plan` and `read_plan` need no torch, `place` and
`load` do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.core.errors import PlacementError
    from probes.placement.loading import load
    from probes.placement.plan_file import read_plan
    from probes.placement.planner.api import plan, plan_cards
    from probes.placement.runtime.handle import Handle
    from probes.placement.runtime.multi_gpu import CardsHandle
    from probes.placement.runtime.place import place
    from probes.placement.types import CardsPlan, Plan

_HOMES = {
    "CardsHandle": "probes.placement.runtime.multi_gpu",
    "CardsPlan": "probes.placement.types",
    "Handle": "probes.placement.runtime.handle",
    "PlacementError": "probes.core.errors",
    "Plan": "probes.placement.types",
    "load": "probes.placement.loading",
    "place": "probes.placement.runtime.place",
    "plan": "probes.placement.planner.api",
    "plan_cards": "probes.placement.planner.api",
    "read_plan": "probes.placement.plan_file",
}

__all__ = [
    "CardsHandle",
    "CardsPlan",
    "Handle",
    "PlacementError",
    "Plan",
    "load",
    "place",
    "plan",
    "plan_cards",
    "read_plan",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a module, a function or a class
    """Import a public name, or a module of this package. Raises AttributeError for anything else."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
