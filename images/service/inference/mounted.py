"""A mounted model's weights, read into memory of our own.

A file that is mapped, as the library of safetensors does it, kills the process with SIGBUS when it is cut
meanwhile, by a copy over it for example.
"""

from pathlib import Path

import torch

from probes.placement import read_into
from service.inference import bert, checkpoint
from service.inference.architecture import BertShape, parameter_shapes


def weights(shape: BertShape, path: Path) -> bert.Weights:
    """The file's weights in float32. Raises ModelUnreadable, also where the file changes meanwhile."""
    with checkpoint.opened(path) as file:
        checkpoint.check(shape, checkpoint.stored_in(file), path)
        tensors = {
            name: torch.empty(file.tensors[name].shape, dtype=torch.float32)
            for name in parameter_shapes(shape)
        }
        read_into(file, tensors)
        return tensors
