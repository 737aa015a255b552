"""Bytes of a block's weights, in an arena and packed, and of its keys and values. Pure."""

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription
from probes.placement.packing.estimate import DENSE_FROM, estimate
from probes.placement.packing.forms import aligned
from probes.placement.planner.costs.option import Pass


def packed_bytes(tensor: TensorDescription, *, dense: bool = False) -> int:
    """Bytes of a tensor in a packed block, as it is where packing saves nothing. `dense`: 3-bit codes."""
    dense = dense and tensor.numbers >= DENSE_FROM
    return aligned(estimate(tensor.given_dtype, tensor.numbers, dense=dense))


def is_packed(tensor: TensorDescription) -> bool:
    """Whether packing saves bytes of it."""
    return packed_bytes(tensor) < tensor.given_bytes


def unpacked_bytes(block: BlockDescription) -> int:
    """Bytes of a block's tensors in an arena, in the dtype that they compute in."""
    return sum(aligned(tensor.n_bytes) for tensor in block.tensors)


def given_bytes(block: BlockDescription) -> int:
    """Bytes of a block's tensors in an arena, in the dtype that the model has."""
    return sum(aligned(tensor.given_bytes) for tensor in block.tensors)


def cache_bytes(block: BlockDescription, work: Pass) -> int:
    """Bytes of a block's keys and values."""
    if block.attention is None or not work.generating:
        return 0
    width = DTYPE_BITS[main_dtype(block)] // 8
    return work.batch * block.attention.kept(work.context) * block.attention.numbers_per_token * width


def main_dtype(block: BlockDescription) -> str:
    """The dtype of its largest tensor; float32 where it has none."""
    if not block.tensors:
        return "float32"
    return max(block.tensors, key=lambda tensor: tensor.n_bytes).dtype
