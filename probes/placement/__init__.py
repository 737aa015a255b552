"""Plans where a model's weights are placed, and runs a model placed that way.

What others use is imported from here, at its first use: so `plan` and `read_plan` need no torch, while
`place`, `load` and `read_into` do. In this package:

- `types`: a plan, and what it consists of. `plan_file` reads plans and judges whether they can be followed.
- `models`: what a model consists of, read from its modules, its config or a checkpoint's headers.
- `trace`: a pass on tensors without numbers: its operations, and by `allocator` the bytes alive at its peak.
- `planner`: chooses a tier for each block and predicts the time of a pass. Without torch.
- `packing`: lossless packing of weights, and products with packed ones.
- `runtime`: places a model that is built (`place`) and runs it: streams, buffers, engine, hooks.
- `loading`: places a model from its checkpoint (`load`). `checkpoint` is the open files, `tensor_reading`
  brings a stored tensor into memory, and `read_ahead` reads the blocks of the tier `disk`.
- `training`: trains a model whose step takes more than VRAM (`plan_training`, `train`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.core.errors import CheckpointUnreadable, PlacementError, PlanImpossible, ProbeError
    from probes.hardware.host import available_bytes
    from probes.placement.checkpoint import Checkpoint, open_checkpoint
    from probes.placement.loading import load
    from probes.placement.plan_file import read_plan
    from probes.placement.planner.api import plan, plan_cards
    from probes.placement.runtime.handle import Handle
    from probes.placement.runtime.multi_gpu import CardsHandle
    from probes.placement.runtime.place import place
    from probes.placement.tensor_reading import read_into
    from probes.placement.training.handle import Training, train
    from probes.placement.training.plan import TrainingPlan, plan_training
    from probes.placement.types import CardsPlan, Plan

_NAMES = {  # of each module, what is public
    "probes.core.errors": "CheckpointUnreadable PlacementError PlanImpossible ProbeError",
    "probes.hardware.host": "available_bytes",
    "probes.placement.checkpoint": "Checkpoint open_checkpoint",
    "probes.placement.loading": "load",
    "probes.placement.plan_file": "read_plan",
    "probes.placement.planner.api": "plan plan_cards",
    "probes.placement.runtime.handle": "Handle",
    "probes.placement.runtime.multi_gpu": "CardsHandle",
    "probes.placement.runtime.place": "place",
    "probes.placement.tensor_reading": "read_into",
    "probes.placement.training.handle": "Training train",
    "probes.placement.training.plan": "TrainingPlan plan_training",
    "probes.placement.types": "CardsPlan Plan",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "CardsHandle",
    "CardsPlan",
    "Checkpoint",
    "CheckpointUnreadable",
    "Handle",
    "PlacementError",
    "Plan",
    "PlanImpossible",
    "ProbeError",
    "Training",
    "TrainingPlan",
    "available_bytes",
    "load",
    "open_checkpoint",
    "place",
    "plan",
    "plan_cards",
    "plan_training",
    "read_into",
    "read_plan",
    "train",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a module, a function or a class
    """Import a public name. Raises AttributeError for anything else."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
