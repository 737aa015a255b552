"""What a block's pass does where nothing was traced: operations by one rule, from its tensors' shapes. Pure.

The rule knows layers of transformers: norms by their tensors, positions by whether a table holds them, and a
base for attention and what is around it. It has no constants of single architectures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription
from probes.placement.models.operations import Operation, OperationKind, WeightUse
from probes.placement.types import Objective


@dataclass(frozen=True)
class Pass:
    """The pass that is planned for."""

    rows: int  # input rows of each block: batch x tokens, or the batch when tokens are generated one by one
    batch: int
    context: int  # tokens that attention looks back on
    objective: Objective
    captured: bool = False  # replayed as a CUDA graph: Python's time doesn't count
    generating: bool = False
    operation_s: float | None = None  # of Python, for what it counts of this model; None: as on the machine


@dataclass(frozen=True)
class Counts:
    """What torch launches for one call of a block, besides its products on the device."""

    operations: float  # of the host, in operations of a plain layer
    kernels: float  # of the device


# Of a layer with attention, and more: where each layer turns queries and keys by their positions, for each
# RMS norm (single operations) and each layer norm, and to send rows to experts. The least squares of what
# decisions 58 and 64 counted for seven architectures, rounded; the most that one of them is off is a third.
LAYER: Final = Counts(17, 14)
ROTARY: Final = Counts(8, 14)
RMS_NORM: Final = Counts(6.5, 8)
LAYER_NORM: Final = Counts(1, 1)
ROUTED: Final = Counts(30, 35)
# How often what follows reads or writes an output of a product: two diffusion transformers; twice as often
# in layers of GPT-2, Phi and Llama
TOUCHED: Final = 3
LIVE: Final = 3  # times what goes into a layer's widest product and comes out of it is alive at its peak


def count_rule(block: BlockDescription) -> Counts:
    """The operations and kernels of one call of a block."""
    products = sum(tensor.use == "product" for tensor in block.tensors)
    if block.attention is None:
        tensors = len(block.tensors)
        if block.experts and len(block.tensors) >= block.experts:
            tensors, products = tensors // block.experts, products // block.experts
        operations = max(2 * tensors - 1, 0)  # one for each tensor, and one between each two
        return Counts(operations, max(operations - products, 0))
    names = {tensor.name for tensor in block.tensors}
    scales = [t.name for t in block.tensors if len(t.shape) == 1 and t.name.endswith(".weight")]
    shifted = sum(f"{name.removesuffix('.weight')}.bias" in names for name in scales)
    parts = [(1, LAYER), (len(scales) - shifted, RMS_NORM), (shifted, LAYER_NORM)]
    parts += [(1, ROTARY)] * block.attention.rotary
    parts += [(1, ROUTED)] * any(tensor.active < 1.0 for tensor in block.tensors)
    return Counts(sum(n * each.operations for n, each in parts), sum(n * each.kernels for n, each in parts))


def live_numbers(block: BlockDescription) -> int:
    """Activations alive at the block's peak, for each input row."""
    products = sum(tensor.use == "product" for tensor in block.tensors)
    times = 1 if block.looked_up else 2 if products < 2 else LIVE
    return times * max(map(_in_and_out, block.tensors))


def _in_and_out(tensor: TensorDescription) -> int:
    return tensor.shape[-1] if tensor.use == "lookup" else sum(tensor.shape[-2:])


def work_of(block: BlockDescription, work: Pass) -> tuple[Operation, ...]:
    """The operations of a block in one pass: as traced, else by the rule, for all of its calls."""
    return tuple(_once(block, work)) * block.calls if block.work is None else block.work


def _once(block: BlockDescription, work: Pass) -> Iterator[Operation]:
    for tensor in block.tensors:
        if tensor.numbers:
            yield _of_tensor(tensor, work.rows)
    kernels, touched = round(count_rule(block).kernels), _touched(block, work.rows)
    yield Operation("kernel", "kernels", "", "float32", launches=kernels, read=touched if kernels else 0)
    if block.attention is not None:
        kept = block.attention.kept(work.context)
        dtype = main_dtype(block)
        yield Operation(
            "attention",
            "attention",
            "",
            dtype,
            launches=0,  # they are among the block's kernels
            flops=4 * work.rows * block.attention.heads * block.attention.head_width * kept,
            read=work.batch * kept * block.attention.numbers_per_token * DTYPE_BITS[dtype] // 8,
        )


def _of_tensor(tensor: TensorDescription, rows: int) -> Operation:
    read = (WeightUse(tensor.name, tensor.bytes_read(rows)),)
    if tensor.use != "product":
        # a lookup or a bias takes what reading it takes: its kernel is among the block's
        kind: OperationKind = "lookup" if tensor.use == "lookup" else "kernel"
        return Operation(kind, tensor.use, "", tensor.dtype, launches=0, weights=read, rows=rows)
    experts = tensor.active < 1.0 and len(tensor.shape) > 2
    chosen = tensor.shape[0] * (1.0 - (1.0 - tensor.active) ** rows) if experts else 1
    return Operation(
        "product",
        "experts" if experts else "product",
        "",
        tensor.dtype,
        flops=int(2 * tensor.products * rows),
        rows=rows,
        outputs=tensor.outputs,
        inputs=tensor.inputs,
        groups=chosen,
        weights=read,
    )


def _touched(block: BlockDescription, rows: int) -> int:
    """Bytes of activations that one call reads and writes outside products."""
    products = [tensor for tensor in block.tensors if tensor.use == "product"]
    width = DTYPE_BITS[main_dtype(block)] / 8
    chosen = [tensor.active * (tensor.shape[0] if len(tensor.shape) > 2 else 1) for tensor in products]
    numbers = sum(tensor.outputs * count for tensor, count in zip(products, chosen, strict=True))
    return int(TOUCHED * (1 if block.attention is None else 2) * rows * numbers * width)


def main_dtype(block: BlockDescription) -> str:
    """The dtype of a block's largest tensor; float32 for a block without tensors."""
    if not block.tensors:
        return "float32"
    return max(block.tensors, key=lambda tensor: tensor.n_bytes).dtype
