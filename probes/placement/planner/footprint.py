"""What a pass takes in VRAM besides the weights: activations, keys and values, workspace, rounding. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription
from probes.placement.planner.costs.constants import Constants
from probes.placement.values import Workload

SEGMENT: Final = 2 << 20  # torch's allocator takes large blocks in multiples of this
LOOSE_SEGMENTS: Final = 4  # for the arena's end, small blocks, activations, what libraries keep
POOL_SEGMENTS: Final = 4  # likewise of a graph's own pool; without them Qwen2.5-3B lacked 7 MB of 4 GiB
# torch's allocator serves 1 to 10 MiB from buffers of 20 (kLargeBuffer, kMinLargeAlloc), and those of one
# stream don't serve another: GPT-2 XL's logits of 100 MiB, next to hidden states of 3, lacked 2 MiB.
LARGE_BUFFER: Final = 20 << 20
LARGE_ACTIVATIONS: Final = 10 << 20  # from where on there are such buffers beside the largest tensor's own


@dataclass(frozen=True)
class Surroundings:
    """Bytes of VRAM that the weights, their buffers and the keys and values must leave free."""

    activations: int
    workspace: int
    context: int
    segments: int = LOOSE_SEGMENTS

    @property
    def loose_rounding(self) -> int:
        """Bytes lost to the allocator's rounding outside the arenas."""
        return self.segments * SEGMENT

    def left(self, vram: int, machine: Constants) -> int:
        """Bytes for everything else, under a budget of torch's allocator and on this card."""
        budget = min(vram, machine.vram_bytes - self.context)
        return budget - self.activations - self.workspace - self.loose_rounding


def surroundings(
    blocks: Sequence[BlockDescription], machine: Constants, workload: Workload, *, captured: bool = False
) -> Surroundings:
    """What one pass of this workload takes besides weights.

    A library keeps a workspace for each stream. A captured pass is recorded on a stream of its own.
    """
    if not machine.has_gpu:
        return Surroundings(0, 0, 0)
    rows = workload.batch * workload.tokens
    peak = max((_live_bytes(block) for block in blocks), default=0)
    workspace = machine.workspace_bytes * (2 if captured else 1)
    segments = LOOSE_SEGMENTS
    if captured:
        segments += POOL_SEGMENTS + (LARGE_BUFFER // SEGMENT if rows * peak > LARGE_ACTIVATIONS else 0)
    return Surroundings(rows * peak, workspace, machine.context_bytes, segments)


def _live_bytes(block: BlockDescription) -> int:
    """Bytes of activations for each input row."""
    if not block.tensors:
        return 0
    width = max(min(DTYPE_BITS[tensor.dtype], 32) for tensor in block.tensors) // 8
    live = block.live_numbers or 2 * max(_in_and_out(tensor) for tensor in block.tensors)
    return live * max(width, 2)


def _in_and_out(tensor: TensorDescription) -> int:
    """Numbers that go into a tensor's operation and come out, for a row; a lookup gives one of its rows."""
    return tensor.shape[-1] if tensor.use == "lookup" else sum(tensor.shape[-2:])


def rounded(n_bytes: int) -> int:
    """Bytes of the arena of weights and rings, one allocation, as torch's allocator takes it."""
    return -(-n_bytes // SEGMENT) * SEGMENT
