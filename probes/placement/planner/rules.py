"""What a block's pass does where nothing was traced: operations by rules, from its tensors' shapes. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription
from probes.placement.models.operations import Operation, OperationKind, WeightUse
from probes.placement.types import Objective

GUESSED_OPERATIONS: Final = 2  # for each tensor of a block whose operations are unknown
# How often what follows reads or writes an output, of a block that says nothing: two diffusion transformers
TOUCHED: Final = 3


@dataclass(frozen=True)
class Pass:
    """The pass that is planned for."""

    rows: int  # input rows of each block: batch x tokens, or the batch when tokens are generated one by one
    batch: int
    context: int  # tokens that attention looks back on
    objective: Objective
    captured: bool = False  # replayed as a CUDA graph: Python's time doesn't count
    generating: bool = False


def rule_operations(block: BlockDescription) -> int:
    """How many operations torch launches for a block in one pass."""
    return (block.operations or GUESSED_OPERATIONS * len(block.tensors)) * block.calls


def work_of(block: BlockDescription, work: Pass) -> tuple[Operation, ...]:
    """The operations of a block in one pass: as traced, else by rules."""
    return rules_work(block, work) if block.work is None else block.work


def rules_work(block: BlockDescription, work: Pass) -> tuple[Operation, ...]:
    """The operations of all the block's calls in one pass."""
    once = tuple(_once(block, work))
    return once * block.calls


def _once(block: BlockDescription, work: Pass) -> Iterator[Operation]:
    products = [tensor for tensor in block.tensors if tensor.use == "product"]
    for tensor in block.tensors:
        if tensor.numbers:
            yield _of_tensor(tensor, work.rows)
    launched = block.operations or GUESSED_OPERATIONS * len(block.tensors)
    kernels = block.kernels or max(launched - len(products), 0)
    yield Operation(
        "kernel", "kernels", "", "float32", launches=kernels, read=_touched(block, products, kernels, work)
    )
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


def _touched(block: BlockDescription, products: list[TensorDescription], kernels: int, work: Pass) -> int:
    """Bytes of activations that one call reads and writes outside products."""
    width = DTYPE_BITS[main_dtype(block)] // 8
    if block.touched_numbers or not kernels:
        return work.rows * block.touched_numbers * width
    return int(
        sum(
            TOUCHED * work.rows * tensor.shape[0] * DTYPE_BITS[tensor.dtype] / 8 * tensor.active
            for tensor in products
        )
    )


def main_dtype(block: BlockDescription) -> str:
    """The dtype of a block's largest tensor; float32 for a block without tensors."""
    if not block.tensors:
        return "float32"
    return max(block.tensors, key=lambda tensor: tensor.n_bytes).dtype
