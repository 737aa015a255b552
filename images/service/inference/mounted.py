"""A mounted model's weights, read into memory of our own.

A file that is mapped, as the library of safetensors does it, kills the process with SIGBUS when it is cut
meanwhile, by a copy over it for example.
"""

from functools import partial
from pathlib import Path

import torch

from probes.placement.checkpoint import Checkpoint
from probes.placement.models.headers import DTYPES
from probes.placement.packing.staging import Buffers
from probes.placement.read_ahead import bring
from service.inference import bert, checkpoint
from service.inference.checkpoint import BertShape, parameter_shapes


def read_weights(shape: BertShape, path: Path) -> bert.Weights:
    """The file's weights in float32. Raises ModelUnreadable, also where the file changes meanwhile."""
    with checkpoint.open_weights(path) as file:
        checkpoint.check_tensors(shape, checkpoint.stored_tensors(file), path)
        buffers = Buffers()
        return {name: _tensor(file, name, buffers) for name in parameter_shapes(shape)}


def _tensor(file: Checkpoint, name: str, buffers: Buffers) -> torch.Tensor:
    stored = file.tensors[name]
    made = torch.empty(stored.shape, dtype=torch.float32)
    own = getattr(torch, DTYPES[stored.dtype])
    bring(partial(file.read_into, name), own, made, given=torch.float32, buffers=buffers)
    return made
