"""A mounted model's weights, read into memory of our own.

A file that is mapped, as the library of safetensors does it, kills the process with SIGBUS when it is cut
meanwhile, by a copy over it for example.
"""

from functools import partial
from pathlib import Path

import torch

from probes.placement.loading.checkpoint import Checkpoint
from probes.placement.loading.tensorbytes import Staging
from probes.placement.models.headers import DTYPES
from service.model import bert, checkpoint
from service.model.architecture import BertShape, parameter_shapes


def weights(shape: BertShape, path: Path) -> bert.Weights:
    """The file's weights in float32. Raises ModelUnreadable, also where the file changes meanwhile."""
    with checkpoint.opened(path) as file:
        checkpoint.check(shape, checkpoint.stored_in(file), path)
        staging = Staging(pinned=False)
        return {name: _tensor(file, name, staging) for name in parameter_shapes(shape)}


def _tensor(file: Checkpoint, name: str, staging: Staging) -> torch.Tensor:
    stored = file.tensors[name]
    made = torch.empty(stored.shape, dtype=torch.float32)
    staging.bring(partial(file.read_into, name), getattr(torch, DTYPES[stored.dtype]), made)
    return made
