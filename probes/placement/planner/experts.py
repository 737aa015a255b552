"""What a block of experts costs whose weights are placed one by one. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from probes.placement.models.description import BlockDescription, TensorDescription
from probes.placement.packing.format import MOST_ROWS, PACKED_PARTS, aligned, is_matrix, rows_of_expert
from probes.placement.planner.costs import BlockCosts, Option, is_packed, packed_bytes
from probes.placement.types import Workload

GATHERS: Final = 1  # kernels for each tensor, besides the products


@dataclass(frozen=True)
class ExpertSizes:
    """One expert of a block: bytes as it is kept, and unpacked; and how many of them a pass reads."""

    stored_bytes: int
    unpacked_bytes: int
    columns: int  # of the table of addresses
    read: float  # distinct ones, in a pass

    @staticmethod
    def of(block: BlockDescription, rows: int, *, packed: bool) -> "ExpertSizes":
        """Those of a block's experts, in a pass of so many input rows."""
        stored = unpacked = columns = 0
        for tensor in block.tensors:
            parts = packed and is_packed(tensor)
            each = tensor.n_bytes // _experts_in(block, tensor)
            kept = packed_bytes(tensor) // _experts_in(block, tensor) if parts else each
            stored += aligned(kept)
            unpacked += each
            columns += len(PACKED_PARTS) if parts else 1
        listed = sum(_experts_in(block, tensor) == 1 for tensor in block.tensors)
        if listed == len(block.tensors):
            stored, unpacked, columns = (n // max(block.experts, 1) for n in (stored, unpacked, columns))
        share = 1.0 - (1.0 - block.chosen / block.experts) ** rows
        return ExpertSizes(stored, unpacked, columns, block.experts * share)


def _experts_in(block: BlockDescription, tensor: TensorDescription) -> int:
    """How many experts a tensor holds: all of them, or one."""
    named = tensor.name[len(block.name) + 1 :]
    return 1 if "." in named else block.experts


def by_experts(costs: BlockCosts, *, cached: float = 0.0, cache: int = 0) -> Option:
    """A block of experts of which passes find the share `cached` in `cache` bytes of VRAM."""
    packed = packs(costs)
    cache = max(cache, table_bytes(costs.block, packed=packed))
    block, machine = costs.block, costs.machine
    rows = routed_rows(block, costs.work.rows)
    sizes = ExpertSizes.of(block, rows, packed=packed)
    stored, unpacked = sizes.read * sizes.stored_bytes, sizes.read * sizes.unpacked_bytes
    fused = packed and _fuses(costs)
    products = costs.gpu.from_packed(share=stored / unpacked) if fused else costs.gpu.from_vram()
    rate = machine.unpack_rate if packed else machine.vram_rate
    gathered = 0.0 if fused else (stored + unpacked) / rate + GATHERS * len(block.tensors) * machine.kernel_s
    missing = (1.0 - cached) * stored
    return Option(
        "experts_packed" if packed else "experts",
        compute_s=products + gathered + missing / machine.zero_copy_rate,
        shared_s=0.0 if machine.unified else missing / machine.link_rate,
        launch_s=costs.python.resident + costs.python.of(2 * len(block.tensors)),
        vram_bytes=cache,
        pinned_bytes=block.experts * sizes.stored_bytes,
        wire_bytes=int(missing),
    )


def routed_rows(block: BlockDescription, untraced: int) -> int:
    """Input rows that choose among a block's experts in a pass: by the products that a trace has."""
    each = 2 * sum(tensor.products for tensor in block.tensors)
    flops = sum(operation.flops for operation in block.work or () if operation.kind == "product")
    return max(round(flops / each), 1) if flops and each else untraced


def table_bytes(block: BlockDescription, *, packed: bool) -> int:
    """Bytes of a block's part of the table of addresses, of what it is written from, and of the counts."""
    return 8 * block.experts * (3 * ExpertSizes.of(block, 1, packed=packed).columns + 1)


def packs(costs: BlockCosts) -> bool:
    """Whether experts are kept packed: kernels unpack bfloat16 in whole rows of one expert."""
    return (
        costs.machine.triton
        and all(tensor.dtype == "bfloat16" for tensor in costs.block.tensors)
        and any(map(is_packed, costs.block.tensors))
        and all(
            rows_of_expert(tensor.shape, _experts_in(costs.block, tensor))
            for tensor in costs.block.tensors
            if is_packed(tensor)
        )
    )


def _fuses(costs: BlockCosts) -> bool:
    """Whether products are computed straight from packed experts: of few rows, where `fast` allows it."""
    machine, block = costs.machine, costs.block
    return (
        costs.work.objective == "fast"
        and machine.fused_rate > 0
        and routed_rows(block, costs.work.rows) <= MOST_ROWS
        and len(block.tensors) == 2
        and all(is_matrix(tensor.shape[1:]) for tensor in block.tensors if len(tensor.shape) == 3)
        and all(_experts_in(block, tensor) > 1 for tensor in block.tensors)
    )


def gathered_bytes(blocks: Iterable[BlockDescription], workload: Workload) -> int:
    """Bytes of the largest block's chosen experts, brought into memory of their own for its products."""
    steps = workload.batch
    largest = 0
    for block in blocks:
        if block.experts:
            prompt = max(workload.batch * workload.tokens, routed_rows(block, 1))
            each = ExpertSizes.of(block, 1, packed=False).unpacked_bytes
            largest = max(
                largest, max(min(block.experts, prompt * block.chosen), steps * block.chosen) * each
            )
    return largest
