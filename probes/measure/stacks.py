"""What is measured: models of equal layers with random weights, and checkpoints. No torch.

`plan_stack` says which of equal layers spill to host memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.core.errors import DeviceUnusable, ModelUnknown, UsageError
from probes.core.spelling import guess
from probes.core.units import binary_bytes
from probes.placement.models.description import most_bytes
from probes.placement.models.headers import DTYPES as STORED_DTYPES
from probes.placement.models.headers import read_checkpoint
from probes.placement.models.reading import config_of
from probes.placement.planner.pools import spread

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
DTYPES = tuple(DTYPE_BYTES)

MODELS = (
    "mlp",
    "transformer",
    "bert-base",
    "gpt2-xl",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
)

STREAM_BUFFERS = 2
BUDGET = 0.75  # of the weights, where no --vram says otherwise
FEWEST_LAYERS = 8
TOKENS = 128  # of each input of a language model


@dataclass(frozen=True)
class Shape:
    """A model as the plan sees it: layers of one size, and the rest, which stays in VRAM."""

    model: str
    dtype: str
    width: int  # of the activations
    layer_bytes: int  # weights of one layer
    fixed_bytes: int = 0  # weights outside the layers: embeddings
    layers: int | None = None  # None: as many as are wanted
    tokens: int = 1  # of each input


@dataclass(frozen=True)
class StackPlan:
    """A model and the split of its weights."""

    shape: Shape
    layers: int
    spilled: tuple[int, ...]  # indices of layers whose weights stay in host memory

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layers * self.shape.layer_bytes + self.shape.fixed_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the weights that cross the link in every pass."""
        return len(self.spilled) * self.shape.layer_bytes


def linear_shape(width: int, dtype: str = "float16") -> Shape:
    """Square linear layers with ReLU, as many as are wanted."""
    return Shape("mlp", dtype, width, width * width * DTYPE_BYTES[dtype])


def plan_stack(shape: Shape, *, weight_bytes: int, budget_bytes: int, room_bytes: int) -> StackPlan:
    """The split of about `weight_bytes`, of which `budget_bytes` hold resident layers and two buffers.

    `room_bytes`: VRAM for the reference, in which every layer is resident. A model of as many layers as are
    wanted is cut to it and the budget with it. Raises DeviceUnusable when too little is left to compare.
    """
    if shape.layers is not None:
        return _plan_whole(shape, shape.layers, budget_bytes=budget_bytes, room_bytes=room_bytes)
    layer = shape.layer_bytes
    total = min(weight_bytes, room_bytes)
    layers = total // layer
    if layers < FEWEST_LAYERS:
        raise DeviceUnusable(
            f"the scenarios need room for {FEWEST_LAYERS} layers of {binary_bytes(layer)} in VRAM, "
            f"there is {binary_bytes(room_bytes)}",
            "end other programs that use the GPU",
        )
    budget = budget_bytes * total // weight_bytes
    resident = min(max(budget // layer - STREAM_BUFFERS, 1), layers - 1)
    return StackPlan(shape, layers, spread(layers, layers - resident))


def _plan_whole(shape: Shape, layers: int, *, budget_bytes: int, room_bytes: int) -> StackPlan:
    """A model of fixed size; nothing of it is cut."""
    whole = StackPlan(shape, layers, ())
    if whole.weight_bytes > room_bytes:
        raise DeviceUnusable(
            f"{shape.model} of {binary_bytes(whole.weight_bytes)} is larger than the "
            f"{binary_bytes(room_bytes)} that the all-resident reference may take",
            "name a smaller model: --model",
        )
    resident = (budget_bytes - shape.fixed_bytes) // shape.layer_bytes - STREAM_BUFFERS
    return StackPlan(shape, layers, spread(layers, layers - min(max(resident, 0), layers - 1)))


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint's config and what its headers say."""

    path: Path
    config: Mapping[str, Any]  # the content of config.json
    names: tuple[str, ...]  # of the stored tensors
    dtype: str  # torch's name of the dtype that most bytes have


def read_folder(path: Path) -> CheckpointFolder:
    """The folder's config.json and the headers of its safetensors.

    Raises UsageError where the path isn't a folder or lacks a config.json, CheckpointUnreadable for files
    that can't be read or contradict themselves, ModelUnknown for quantised weights.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path} is neither a known model nor a folder with a checkpoint",
            f"{guess(path.name, MODELS)}known are {', '.join(MODELS)}; else give the folder that has "
            "config.json and *.safetensors",
        )
    files = read_checkpoint(path)
    config = config_of(str(path))
    dtype = most_bytes(
        (STORED_DTYPES[tensor.dtype], tensor.n_bytes) for file in files for tensor in file.tensors
    )
    if config.get("quantization_config") or dtype not in DTYPE_BYTES:
        raise ModelUnknown(
            f"{path} has quantised weights or others that aren't floating point: most are {dtype}",
            f"give a checkpoint in {', '.join(DTYPE_BYTES)}",
        )
    return CheckpointFolder(path, config, tuple(t.name for file in files for t in file.tensors), dtype)
