"""What an embedding takes that stays packed in VRAM: no scratch buffer has to hold a whole vocabulary. Pure.

Lookups unpack the rows that they need, products no more than a piece at a time.
"""

from dataclasses import replace
from typing import Final

from probes.placement.models.description import TensorDescription
from probes.placement.packing.forms import aligned
from probes.placement.packing.tiles import is_table, piece_bytes, piece_rows
from probes.placement.planner.costs.oneblock import OneBlock
from probes.placement.planner.costs.option import Option
from probes.placement.planner.costs.pythontime import PACKED_PRODUCT

LOOKUP_OPERATIONS: Final = 2  # of a lookup in a packed table, with a kernel for it and by torch operations
LOOKUP_OPERATIONS_WITHOUT_TRITON: Final = 25


def as_table(one: OneBlock) -> Option | None:
    """Packed in VRAM and never unpacked as a whole; None for a block that isn't looked up."""
    machine, (tensor, *more) = one.machine, one.block.tensors
    looked_up = one.block.looked_up or one.block.lookups_only
    if more or one.converts or not looked_up or not is_table(tensor.shape, tensor.dtype):
        return None
    operations = LOOKUP_OPERATIONS if machine.triton else LOOKUP_OPERATIONS_WITHOUT_TRITON
    looked = Option(
        "packed",
        compute_s=one.gpu.from_vram() + operations * machine.kernel_s,
        launch_s=one.python.resident + one.python.of_call(operations),
        vram_bytes=one.packed_bytes,
        table=True,
    )
    return looked if one.block.lookups_only else _multiplied(one, looked, tensor)


def _multiplied(one: OneBlock, looked: Option, tensor: TensorDescription) -> Option:
    """A table that products need as well: fused, or piece by piece.

    Exact ones are compared with those of the whole table, which is in host memory for that.
    """
    machine = one.machine
    roomy = replace(
        looked,
        vram_bytes=looked.vram_bytes + aligned(piece_bytes(tensor.shape)),
        pinned_bytes=0 if one.work.objective == "fast" else one.n_bytes,
    )
    if one.fuses():
        saved = one.gpu.from_vram() - one.gpu.from_packed(share=one.packed_bytes / one.n_bytes)
        launch = looked.launch_s + one.python.of(PACKED_PRODUCT)
        return replace(roomy, compute_s=looked.compute_s - saved, launch_s=launch)
    pieces = -(-tensor.shape[0] // piece_rows(tensor.shape))
    return replace(
        roomy,
        compute_s=looked.compute_s + (pieces - 1) * machine.product_s,
        unpack_s=(one.packed_bytes + one.n_bytes) / machine.unpack_rate + pieces * machine.unpack_item_s,
        launch_s=looked.launch_s + one.python.of(2 * pieces),
    )
