"""Reads the weights of a mounted model.safetensors.

They are read, not mapped: a mapped file, as the safetensors library has it, kills the process with SIGBUS
when it is truncated meanwhile, for example when another one is copied over it.
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
    """Return the file's weights in float32. Raises ModelUnreadable, also if the file changes meanwhile."""
    with checkpoint.open_weights(path) as file:
        checkpoint.check_tensors(shape, checkpoint.stored_tensors(file), path)
        buffers = Buffers()
        return {name: _tensor(file, name, buffers) for name in parameter_shapes(shape)}


def _tensor(file: Checkpoint, name: str, buffers: Buffers) -> torch.Tensor:
    stored = file.tensors[name]
    weight = torch.empty(stored.shape, dtype=torch.float32)
    stored_dtype = getattr(torch, DTYPES[stored.dtype])
    bring(partial(file.read_into, name), stored_dtype, weight, given=torch.float32, buffers=buffers)
    return weight
