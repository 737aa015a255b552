"""The plan of the scenarios' model: how many layers, and which of them don't fit. Pure."""

from dataclasses import dataclass

from probes.errors import DeviceUnusable
from probes.units import binary_bytes

HALF_BYTES = 2  # float16, which every GPU here computes in, gfx803 included
STREAM_BUFFERS = 2
BUDGET = 0.75  # of the weights, where no --vram says otherwise
FEWEST_LAYERS = 8


@dataclass(frozen=True)
class StackPlan:
    """A stack of `layers` square linear layers with ReLU. Weights are `width` x `width`, float16."""

    width: int
    layers: int
    spilled: tuple[int, ...]  # indices of layers whose weights stay in host memory

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights."""
        return self.width * self.width * HALF_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layers * self.layer_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the weights that cross the link in every pass."""
        return len(self.spilled) * self.layer_bytes


def plan_stack(*, width: int, weight_bytes: int, budget_bytes: int, room_bytes: int) -> StackPlan:
    """The stack of about `weight_bytes`, of which `budget_bytes` hold resident layers and two buffers.

    `room_bytes`: VRAM for the reference, in which every layer is resident; a larger model is cut to it
    and the budget with it. Raises DeviceUnusable when that leaves too little to compare.
    """
    layer = width * width * HALF_BYTES
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
    return StackPlan(width, layers, spread(layers, layers - resident))


def spread(layers: int, spilled: int) -> tuple[int, ...]:
    """`spilled` indices out of `layers`, evenly apart, so that copies can run while resident layers do."""
    return tuple(i for i in range(layers) if (i + 1) * spilled // layers > i * spilled // layers)
