"""The GPU's time to compute one block, whose weights it reads from VRAM, packed or over the link. Pure.

Compute follows the roofline, with what keeps small products and many kernels above it
(docs/decisions/0055-terms-of-a-predicted-pass.md).
"""

import math
from typing import Final

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription
from probes.placement.packing.tiles import fused
from probes.placement.planner.costs.blockbytes import main_dtype
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.costs.option import Pass
from probes.placement.planner.costs.pythontime import operations

# Products, on an H100. For each number of an input row, over what the library's product takes for it: the
# fused one of one row, and of 2 to 16.
FUSED_STEP: Final = 0.75
MANY_ROWS_FUSED_STEP: Final = 2.1
WIDEST_TILE: Final = 32  # outputs that the fused product of several rows computes at once, in large matrices
ALIGNED: Final = 8  # outputs of 16 bits: the library has slow kernels for others
UNALIGNED: Final = 0.14  # of the rate of products, in whole tiles of TILE_ROWS rows: GPT-2's, H100 and H200
WIDE_ROWS: Final = 64  # of input, by which float32's products are computed
WIDE_PRODUCT_S: Final = 5e-6  # that such a product takes more
WIDE_READS: Final = 0.78  # of VRAM's rate, at which products read float32
EXPERT_TILE: Final = 64  # rows: half a tile, which is empty for each expert on average
EXPERTS_REACHED: Final = 0.75  # of the rate of products: nine resident passes on an H100 and an H200
# Input rows that a library's kernel multiplies with weights that it has read once, and those of more rows for
# which it reads them again: six matrices at 1 to 2,048 rows on an H200, by the link's rate.
ONCE_ROWS: Final = 32
TILE_ROWS: Final = 128
WIDE_TILE_ROWS: Final = 32  # likewise in float32, where more than one row is read again
# Of the GPU for each tensor that it reads over the link, beyond its bytes: a kernel waits for an answer
IN_PLACE_S: Final = 14e-6  # BERT's embeddings (five tensors), 768 x 768, on an H100
# How often what follows reads or writes an output, of a block that says nothing: two diffusion transformers
TOUCHED: Final = 3
MOST_BITS_OF_UNITS: Final = 16  # of numbers that matrix units multiply as they are


class GpuTime:
    """Seconds that the GPU computes for one block in one kind of pass."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self._block, self._machine, self._work = block, machine, work
        products = sum(tensor.use == "product" for tensor in block.tensors)
        self._kernels = block.kernels * block.calls or max(operations(block) - products * block.calls, 0)
        self._dtype = main_dtype(block)
        self.without_weights = self._kernels * machine.kernel_s + self._attention()

    def from_vram(self) -> float:
        """With weights in VRAM, as they are."""
        return self._compute(self._machine.vram_rate)

    def from_packed(self, share: float) -> float:
        """With packed weights in VRAM, which take this share of their bytes and are never unpacked."""
        rows, machine = self._work.rows, self._machine
        main = max(self._block.tensors, key=lambda tensor: tensor.n_bytes)
        tile = fused(rows, main.shape)
        narrow = rows > 1 and tile is not None and tile.rows < WIDEST_TILE
        rate = machine.fused_rows_rate if narrow else machine.fused_rate
        step = MANY_ROWS_FUSED_STEP if rows > 1 else FUSED_STEP
        return self._compute(rate, share=share, step=step)

    def in_place(self) -> float:
        """With weights in pinned memory, which kernels read over the link."""
        waits = IN_PLACE_S * len(self._block.tensors) * self._block.calls
        return max(self.bytes_in_place() / self._machine.zero_copy_rate, self.from_vram()) + waits

    def bytes_in_place(self) -> int:
        """Bytes that kernels then read: all of them once for a few rows, else for each tile and once more."""
        rows, wide = self._work.rows, self._dtype == "float32"
        read = self.bytes_read()
        if self._block.lookups_only or rows <= (1 if wide else ONCE_ROWS):
            return read
        return read * (1 + -(-rows // (WIDE_TILE_ROWS if wide else TILE_ROWS)))

    def bytes_read(self) -> int:
        """Bytes of weights that one pass needs."""
        rows = self._work.rows
        return self._block.calls * sum(tensor.bytes_read(rows) for tensor in self._block.tensors)

    def _compute(self, rate: float, *, share: float = 1.0, step: float = 1.0) -> float:
        """The GPU's time: weights are read at a rate, and take a share of their bytes."""
        each = (self._read_s(tensor, rate, share=share, step=step) for tensor in self._block.tensors)
        touched = self._touched() / self._machine.activation_rate
        return self.without_weights + self._block.calls * (sum(each) + touched)

    def _read_s(self, tensor: TensorDescription, rate: float, *, share: float, step: float) -> float:
        """The GPU's time for one tensor in one call.

        A product waits for its weights, for its multiplications, and for the turns that one multiplier takes
        through an input row. They overlap in part, the first two nearly whole: 164 products of 16 bits on an
        H100 are within 21 % of this, 7.6 % on average.
        """
        machine, rows = self._machine, self._work.rows
        if not tensor.numbers:
            return 0.0
        if _is_experts(tensor):
            rate = min(rate, machine.experts_rate)
        reads = tensor.bytes_read(rows) * share / rate
        if tensor.use != "product":
            return reads
        wide = DTYPE_BITS[tensor.dtype] > MOST_BITS_OF_UNITS
        if wide:
            reads /= WIDE_READS
            if rows == 1:
                return machine.product_s + reads
            products = self._products_s(tensor, -(-rows // WIDE_ROWS) * WIDE_ROWS)
            return machine.product_s + WIDE_PRODUCT_S + math.hypot(reads, products)
        turns = tensor.inputs * machine.product_step_s * step
        overlapped = math.cbrt(reads**3 + self._products_s(tensor, rows) ** 3)
        return machine.product_s + math.hypot(overlapped, turns)

    def _products_s(self, tensor: TensorDescription, rows: int) -> float:
        """Seconds of multiplications. Each expert's rows fill whole tiles."""
        work = tensor.products * rows
        rate = self._machine.rate_of_products(tensor.dtype)
        if _is_experts(tensor):
            experts = tensor.shape[0] * (1.0 - (1.0 - tensor.active) ** rows)
            work += EXPERT_TILE * experts * tensor.numbers / tensor.shape[0]
            rate *= EXPERTS_REACHED
        if rows > 1 and len(tensor.shape) == 2 and tensor.outputs % ALIGNED:
            rate *= UNALIGNED
            work = tensor.products * -(-rows // TILE_ROWS) * TILE_ROWS
        return 2 * work / rate

    def _touched(self) -> float:
        """Bytes of activations that one call reads and writes besides products."""
        width = DTYPE_BITS[self._dtype] / 8
        if self._block.touched_numbers or not self._kernels:
            return self._work.rows * self._block.touched_numbers * width
        return sum(
            TOUCHED * self._work.rows * tensor.shape[0] * DTYPE_BITS[tensor.dtype] / 8 * tensor.active
            for tensor in self._block.tensors
            if tensor.use == "product"
        )

    def _attention(self) -> float:
        """The GPU's time for scores and sums over the context, by bytes of keys and values or by products."""
        attention, work, machine = self._block.attention, self._work, self._machine
        if attention is None or not machine.has_gpu:
            return 0.0
        dtype = main_dtype(self._block)
        kept = attention.kept(work.context)
        moved = work.batch * kept * attention.numbers_per_token * DTYPE_BITS[dtype] / 8
        products = 2 * work.rows * attention.heads * attention.head_width * kept
        rate = machine.rate_of_products(dtype)
        return max(moved / machine.vram_rate, 2 * products / rate)


def _is_experts(tensor: TensorDescription) -> bool:
    """Whether it holds the matrices of several experts, of which each row needs some."""
    return tensor.use == "product" and tensor.active < 1.0 and len(tensor.shape) > 2
