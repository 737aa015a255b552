"""What one block costs on one machine in one kind of pass: bytes, and seconds of GPU, Python and copies.

`tiers.py` combines these terms to the cost of each tier, an `Option`. Pure.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from probes.placement.models.description import (
    DTYPE_BITS,
    BlockDescription,
    TensorDescription,
)
from probes.placement.packing.format import DENSE_FROM, MOST_ROWS, aligned, estimate, fused, is_matrix
from probes.placement.planner.machine import Constants
from probes.placement.types import Objective, Tier

UPKEEP: Final = 0.5  # share of its compute time that a block which isn't resident is charged as a penalty


@dataclass(frozen=True)
class Pass:
    """The pass that is planned for."""

    rows: int  # input rows of each block: batch x tokens, or the batch when tokens are generated one by one
    batch: int
    context: int  # tokens that attention looks back on
    objective: Objective
    captured: bool = False  # replayed as a CUDA graph: Python's time doesn't count
    generating: bool = False


@dataclass(frozen=True, eq=False)
class Option:
    """One tier for one block, or for all blocks of a kind, with its costs. Compared by identity."""

    tier: Tier
    compute_s: float = 0.0  # GPU
    unpack_s: float = 0.0  # GPU
    cpu_s: float = 0.0
    copy_s: float = 0.0  # copy engine, and so link
    shared_s: float = 0.0  # link, besides copies: kernels read in place, or the CPU reads the same memory
    disk_s: float = 0.0
    launch_s: float = 0.0  # Python
    vram_bytes: int = 0
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    disk_bytes: int = 0
    wire_bytes: int = 0
    slot_bytes: int = 0  # least size of the staging buffers ("slots") it is copied to; 0: it isn't copied
    scratch_bytes: int = 0  # likewise of the buffers it is unpacked to
    dense: bool = False  # packed with 3-bit codes
    kept: bool = False  # with the bits that the model has, and converted for each call
    table: bool = False  # packed and never unpacked as a whole
    pieces: int = 1  # in which it is copied and unpacked, each through a slot
    # seconds of each piece's copy and unpacking; empty: pieces are equal
    parts: tuple[tuple[float, float], ...] = ()

    @cached_property
    def gpu_s(self) -> float:
        """Seconds on the GPU."""
        return self.unpack_s + self.compute_s

    @cached_property
    def moves(self) -> bool:
        """Whether anything besides the GPU works on it: the link or the CPU."""
        return bool(self.copy_s or self.cpu_s or self.shared_s)

    @cached_property
    def way(self) -> tuple[Tier, bool, bool, bool, int]:
        """What identifies it among a block's options: the tier, the layout and the number of pieces."""
        return self.tier, self.dense, self.kept, self.table, self.pieces

    @cached_property
    def each(self) -> tuple[tuple[float, float], ...]:
        """For each piece, the seconds of its copy and of its unpacking."""
        return self.parts or ((self.copy_s / self.pieces, self.unpack_s / self.pieces),) * self.pieces

    @cached_property
    def lanes(self) -> tuple[float, ...]:
        """Seconds on each lane: GPU and CPU (one after the other), link, disk, Python.

        The last entry is a penalty that breaks ties in favour of resident blocks.
        """
        return (
            self.gpu_s + self.cpu_s,
            self.copy_s + self.shared_s,
            self.disk_s,
            self.launch_s + self.cpu_s,
            0.0 if self.tier == "resident" else UPKEEP * self.compute_s,
        )

    @cached_property
    def memories(self) -> tuple[float, ...]:
        """Bytes of VRAM, of all host memory, and of its pinned part."""
        return (self.vram_bytes, self.pinned_bytes + self.pageable_bytes, self.pinned_bytes)


# Python's time, in operations, for a call of a block whose weights come and go, for its copy, for its
# unpacking, and for a product with a packed tensor beyond one with a plain tensor.
CALL: Final = 0.2
CALL_TENSOR: Final = 0.13  # added for each of the block's tensors
COPY: Final = 1.3
UNPACK: Final = 0.6
PACKED_PRODUCT: Final = 1.1
BESIDE_COPY: Final = 0.07
GENERATING: Final = 35  # operations that `generate` adds around each token
GUESSED_OPERATIONS: Final = 2  # for each tensor of a block whose operations are unknown


def operations(block: BlockDescription) -> int:
    """How many operations torch launches for a block in one pass."""
    return (block.operations or GUESSED_OPERATIONS * len(block.tensors)) * block.calls


class PythonTime:
    """Python's seconds for one block in one kind of pass; zero in a captured one, which runs no Python."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self._machine, self._work = machine, work
        around = block.around + GENERATING * (work.generating and block.around > 0)
        self.resident = self.of(operations(block) + around)
        self._call = CALL + CALL_TENSOR * len(block.tensors)

    def of(self, count: float) -> float:
        """For launching `count` operations."""
        return 0.0 if self._work.captured else count * self._machine.operation_s

    def beside(self, copy_s: float) -> float:
        """What a copy of `copy_s` seconds adds to the operations that run beside it."""
        return 0.0 if self._work.captured else BESIDE_COPY * copy_s

    def of_call(self, added: float = 0.0) -> float:
        """For a call whose weights are brought in first, with `added` operations."""
        return self.of(self._call + added)


def packed_bytes(tensor: TensorDescription, *, dense: bool = False) -> int:
    """Bytes of a tensor in a packed block; plain where packing saves nothing. `dense`: with 3-bit codes."""
    dense = dense and tensor.numbers >= DENSE_FROM
    return aligned(estimate(tensor.given_dtype, tensor.numbers, dense=dense))


def is_packed(tensor: TensorDescription) -> bool:
    """Whether packing makes the tensor smaller."""
    return packed_bytes(tensor) < tensor.given_bytes


def unpacked_bytes(block: BlockDescription) -> int:
    """Bytes of a block's tensors in an arena, in the dtype that they compute in."""
    return sum(aligned(tensor.n_bytes) for tensor in block.tensors)


def given_bytes(block: BlockDescription) -> int:
    """Bytes of a block's tensors in an arena, in the dtype that the model has."""
    return sum(aligned(tensor.given_bytes) for tensor in block.tensors)


def cache_bytes(block: BlockDescription, work: Pass) -> int:
    """Bytes of a block's part of the KV cache; 0 unless tokens are generated."""
    if block.attention is None or not work.generating:
        return 0
    width = DTYPE_BITS[main_dtype(block)] // 8
    return work.batch * block.attention.kept(work.context) * block.attention.numbers_per_token * width


def main_dtype(block: BlockDescription) -> str:
    """The dtype of a block's largest tensor; float32 for a block without tensors."""
    if not block.tensors:
        return "float32"
    return max(block.tensors, key=lambda tensor: tensor.n_bytes).dtype


# Products on an H100: the fused product's time for each number of an input row, relative to the library's,
# for one row and for 2 to 16.
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
        """With unpacked weights in VRAM."""
        return self._compute(self._machine.vram_rate)

    def from_packed(self, share: float) -> float:
        """With packed weights in VRAM that are never unpacked; they take `share` of their unpacked bytes."""
        rows, machine = self._work.rows, self._machine
        main = max(self._block.tensors, key=lambda tensor: tensor.n_bytes)
        tile = fused(rows, main.shape)
        narrow = rows > 1 and tile is not None and tile.rows < WIDEST_TILE
        rate = machine.fused_rows_rate if narrow else machine.fused_rate
        step = MANY_ROWS_FUSED_STEP if rows > 1 else FUSED_STEP
        return self._compute(rate, share=share, step=step)

    def in_place(self) -> float:
        """With weights in pinned memory that kernels read over the link."""
        waits = IN_PLACE_S * len(self._block.tensors) * self._block.calls
        return max(self.bytes_in_place() / self._machine.zero_copy_rate, self.from_vram()) + waits

    def bytes_in_place(self) -> int:
        """Bytes that kernels read over the link: once for a few rows, else for each tile and once more."""
        rows, wide = self._work.rows, self._dtype == "float32"
        read = self.bytes_read()
        if self._block.lookups_only or rows <= (1 if wide else ONCE_ROWS):
            return read
        return read * (1 + -(-rows // (WIDE_TILE_ROWS if wide else TILE_ROWS)))

    def bytes_read(self) -> int:
        """Bytes of weights that one pass reads."""
        rows = self._work.rows
        return self._block.calls * sum(tensor.bytes_read(rows) for tensor in self._block.tensors)

    def _compute(self, rate: float, *, share: float = 1.0, step: float = 1.0) -> float:
        """With weights that take `share` of their bytes and are read at `rate`."""
        each = (self._tensor_s(tensor, rate, share=share, step=step) for tensor in self._block.tensors)
        activations = self._activation_bytes() / self._machine.activation_rate
        return self.without_weights + self._block.calls * (sum(each) + activations)

    def _tensor_s(self, tensor: TensorDescription, rate: float, *, share: float, step: float) -> float:
        """Seconds for one tensor in one call.

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
        """Seconds of a product's multiplications. Each expert's rows fill whole tiles."""
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

    def _activation_bytes(self) -> float:
        """Bytes of activations that one call reads and writes outside products."""
        width = DTYPE_BITS[self._dtype] / 8
        if self._block.touched_numbers or not self._kernels:
            return self._work.rows * self._block.touched_numbers * width
        return sum(
            TOUCHED * self._work.rows * tensor.shape[0] * DTYPE_BITS[tensor.dtype] / 8 * tensor.active
            for tensor in self._block.tensors
            if tensor.use == "product"
        )

    def _attention(self) -> float:
        """Seconds of attention: the longer of reading the context's keys and values, and multiplying."""
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
    """Whether the tensor holds the matrices of several experts, of which each row needs some."""
    return tensor.use == "product" and tensor.active < 1.0 and len(tensor.shape) > 2


FUSED_DTYPES: Final = ("bfloat16", "float16")
# GPU idle time before an eager unpacking: 14 layers took 1.65 ms, captured 1.59, H100
UNPACK_GAP_S: Final = 5e-6


class BlockCosts:
    """The terms of one block's costs: its bytes, and the times of the GPU and of Python for it."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self.block, self.machine, self.work = block, machine, work
        self.gpu, self.python = GpuTime(block, machine, work), PythonTime(block, machine, work)
        self.n_bytes, self.given_bytes = unpacked_bytes(block), given_bytes(block)
        self.packed_bytes = sum(map(packed_bytes, block.tensors))
        self.cache_bytes = cache_bytes(block, work)
        self.converts = any(tensor.given for tensor in block.tensors)
        self.unpack_gap_s = 0.0 if work.captured else UNPACK_GAP_S

    @property
    def may_be_dense(self) -> bool:
        """Whether it can be packed with 3-bit codes, which only the Triton kernels unpack fast enough."""
        return self.machine.triton and main_dtype(self.block) == "bfloat16"

    def copied_s(self, n_bytes: float) -> float:
        """Seconds of copies in a pass, where each fetch of the block copies `n_bytes`."""
        return self.block.fetches * (self.machine.link_alpha_s + n_bytes / self.machine.link_rate)

    def fuses(self) -> bool:
        """Whether products are computed straight from the packed weights, which `fast` allows."""
        dtypes = {tensor.dtype for tensor in self.block.tensors if tensor.use == "product"}
        return (
            all(is_matrix(tensor.shape) for tensor in self.block.tensors if is_packed(tensor))
            and self.work.objective == "fast"
            and not self.converts
            and self.machine.fused_rate > 0
            and self.work.rows <= MOST_ROWS
            and dtypes <= set(FUSED_DTYPES)
        )


def unpack_s(costs: BlockCosts, tensor: TensorDescription, *, dense: bool, parts: int = 1) -> float:
    """Seconds of unpacking one tensor in `parts` parts, or of copying it where it isn't packed.

    The kernels write the dtype that was packed; where it is converted as well, torch operations unpack it.
    """
    machine = costs.machine
    packed = packed_bytes(tensor, dense=dense)
    moved = packed + tensor.n_bytes
    items = parts * machine.unpack_item_s
    if packed >= tensor.given_bytes:
        return items + moved / machine.vram_rate
    if costs.converts:
        return items + moved / machine.operations_rate
    ranked = (dense and tensor.numbers >= DENSE_FROM) or tensor.dtype == "float16"
    return items + moved / (machine.ranked_rate if ranked else machine.unpack_rate)


def pieces_of(costs: BlockCosts, slot_bytes: int, *, dense: bool) -> list[tuple[float, float]]:
    """The pieces in which a packed block is copied: bytes of each, and seconds of its unpacking.

    As the runtime cuts it: a tensor that is larger than a slot is cut into equal parts, and neighbours that
    fit a slot together are one piece. So a piece may be much smaller than a slot.
    """
    pieces: list[tuple[float, float]] = []
    for tensor in costs.block.tensors:
        packed = packed_bytes(tensor, dense=dense)
        count = -(-packed // slot_bytes)
        unpack = unpack_s(costs, tensor, dense=dense, parts=count)
        for _ in range(count):
            if pieces and pieces[-1][0] + packed / count <= slot_bytes:
                before = pieces.pop()
                pieces.append((before[0] + packed / count, before[1] + unpack / count))
            else:
                pieces.append((packed / count, unpack / count))
    return pieces
