"""A mounted model's weights, read into memory of our own.

A file that is mapped, as the library of safetensors does it, kills the process with SIGBUS when it is cut
meanwhile, by a copy over it for example.
"""

from functools import partial
from pathlib import Path

import torch

from probes.placement.checkpoint import Checkpoint
from probes.placement.models.headers import DTYPES
from probes.placement.packing.staging import HostBuffers
from probes.placement.tensor_reading import convert_into
from service.inference import bert, checkpoint
from service.inference.architecture import BertShape, parameter_shapes


def weights(shape: BertShape, path: Path) -> bert.Weights:
    """The file's weights in float32. Raises ModelUnreadable, also where the file changes meanwhile."""
    with checkpoint.opened(path) as file:
        checkpoint.check(shape, checkpoint.stored_in(file), path)
        buffers = HostBuffers()
        return {name: _tensor(file, name, buffers) for name in parameter_shapes(shape)}


def _tensor(file: Checkpoint, name: str, buffers: HostBuffers) -> torch.Tensor:
    stored = file.tensors[name]
    made = torch.empty(stored.shape, dtype=torch.float32)
    own = getattr(torch, DTYPES[stored.dtype])
    convert_into(partial(file.read_into, name), own, made, given=torch.float32, buffers=buffers)
    return made
