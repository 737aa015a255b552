"""Models of equal layers with random weights, and which of their layers spill to host memory. No torch."""

from dataclasses import dataclass

from probes.core.errors import DeviceUnusable
from probes.core.units import binary_bytes

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


def spread(layers: int, spilled: int) -> tuple[int, ...]:
    """`spilled` indices out of `layers`, evenly apart, so that copies can run while resident layers do."""
    if spilled >= layers:
        return tuple(range(layers))
    return tuple(-(-nth * layers // spilled) - 1 for nth in range(1, spilled + 1))
