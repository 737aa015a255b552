"""Reads the weights of a mounted model.safetensors.

They are read, not mapped: a mapped file, as the safetensors library has it, kills the process with SIGBUS
when it is truncated meanwhile, for example when another one is copied over it.
"""

from pathlib import Path

import torch

from probes.placement import read_into
from service.inference import bert, checkpoint
from service.inference.checkpoint import BertShape, parameter_shapes


def read_weights(shape: BertShape, path: Path) -> bert.Weights:
    """Return the file's weights in float32. Raises ModelUnreadable, also if the file changes meanwhile."""
    with checkpoint.open_weights(path) as file:
        checkpoint.check_tensors(shape, checkpoint.stored_tensors(file), path)
        tensors = {
            name: torch.empty(file.tensors[name].shape, dtype=torch.float32)
            for name in parameter_shapes(shape)
        }
        read_into(file, tensors)
        return tensors
