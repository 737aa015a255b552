"""What one block costs on one machine in one kind of pass: bytes, and seconds of GPU, Python and copies.

`tiers.py` combines these terms to the cost of each tier, an `Option`. Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

from probes.placement.models.description import (
    DTYPE_BITS,
    BlockDescription,
    ModelDescription,
    TensorDescription,
)
from probes.placement.models.operations import EXPERTS, Operation, OperationKind, host_units
from probes.placement.packing.format import DENSE_FROM, MOST_ROWS, aligned, estimate, fused, is_matrix
from probes.placement.planner.machine import Constants
from probes.placement.planner.rules import Pass, count_rule, main_dtype, work_of
from probes.placement.types import Tier

UPKEEP: Final = 0.5  # share of its compute time that a block which isn't resident is charged as a penalty


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
    dense: bool = False  # packed with 2-bit codes
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
BESIDE_CALLS: Final = 0.36  # of Python's own, for each module that is called; 11 families' layers, an H200
OF_TORCH: Final = (
    1.3  # and so much of what torch takes for the operations of a traced pass, by the same layers
)


def host_operations(block: BlockDescription, machine: Constants, work: Pass) -> float:
    """Python's time for a block in one pass, in operations of a plain layer (docs/decisions/0058).

    Of an operation that was measured, what Python takes beside it.
    """
    around = block.around + GENERATING * (work.generating and block.around > 0)
    if block.work is None:
        return count_rule(block).operations * block.calls + around
    launched = sum(beside_measured(o, machine) for o in block.work)
    return launched + BESIDE_CALLS * block.modules_called + around


def beside_measured(operation: Operation, machine: Constants) -> float:
    """Python's time for an operation, in operations of a plain layer; of a measured one, what is beside."""
    if operation.host_s is None:
        return OF_TORCH * _host_units(operation, machine)
    return (OF_TORCH - 1) * host_units(operation)


def _host_units(operation: Operation, machine: Constants) -> float:
    """What torch takes to launch an operation, as its class was measured there, else as on one host."""
    measured = machine.classes.get(operation.kind)
    return measured.host_s / machine.operation_s if measured else host_units(operation)


def measured_operation_s(model: ModelDescription, machine: Constants, work: Pass) -> float | None:
    """Python's seconds for each operation counted of this model, as its pass took; None: not measured."""
    whole_s = model.traced.host_s if model.traced else None
    if whole_s is None or work.captured:
        return None
    once = replace(work, generating=False)
    counted = sum(host_operations(block, machine, once) for block in model.blocks)
    return max(whole_s - sum(map(_launched_s, model.blocks)), 0.0) / counted if counted else None


def _launched_s(block: BlockDescription) -> float:
    """Seconds of the host for the operations of a block, as measured."""
    return sum(operation.host_s or 0.0 for operation in block.work or ())


class PythonTime:
    """Python's seconds for one block in one kind of pass; zero in a captured one, which runs no Python."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self._machine, self._work = machine, work
        self.resident = 0.0
        if not work.captured:
            each = machine.operation_s if work.operation_s is None else work.operation_s
            self.resident = each * host_operations(block, machine, work) + _launched_s(block)
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
    """Bytes of a tensor in a packed block; plain where packing saves nothing. `dense`: with 2-bit codes."""
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
    """Bytes of a block's part of the KV cache, as traced, else by its attention; 0 where none is kept."""
    if block.work is not None or block.attention is None or not work.generating:
        return block.cache_bytes
    width = DTYPE_BITS[main_dtype(block)] // 8
    return work.batch * block.attention.kept(work.context) * block.attention.numbers_per_token * width


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
MOST_BITS_OF_UNITS: Final = 16  # of numbers that matrix units multiply as they are
# Kernels besides products, in kernels of the profile (2.3 us): docs/decisions/0066's times on an H200 of
# operations on contiguous numbers, on strided ones, of norms, sums along rows, and torch's attention
KERNELS: Final[Mapping[OperationKind, float]] = MappingProxyType(
    {
        "attention": 2.1,
        "convolution": 1.2,
        "kernel": 1.0,
        "lookup": 1.25,
        "norm": 2.1,
        "plain": 0.8,
        "recurrent": 0.8,
        "reduction": 1.9,
        "scan": 1.25,
        "strided": 1.25,
        "view": 0.0,
    }
)
# Of a product between other kernels, more than of one between products: 19 resident passes, H100 and H200
BETWEEN_S: Final = 1e-6
CONVOLVED: Final = 0.5  # of the rate of products, which convolutions reach: assumed


class GpuTime:
    """Seconds that the GPU computes for one block in one kind of pass."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self._block, self._machine, self._work = block, machine, work
        self._dtype = main_dtype(block)
        self._operations = work_of(block, work)
        self.flops = sum(operation.flops for operation in self._operations)
        self._least_product_s = machine.product_s + BETWEEN_S * block.mixed
        self.without_weights = sum(
            self._seconds(o, machine.vram_rate) for o in self._operations if not o.weights
        )

    def from_vram(self) -> float:
        """Return the seconds to compute with unpacked weights in VRAM."""
        return self._compute(self._machine.vram_rate)

    def from_packed(self, share: float) -> float:
        """With packed weights in VRAM that are never unpacked; they take `share` of their unpacked bytes."""
        rows, machine = self.product_rows, self._machine
        main = max(self._block.tensors, key=lambda tensor: tensor.n_bytes)
        tile = fused(rows, main.shape)
        narrow = rows > 1 and tile is not None and tile.rows < WIDEST_TILE
        rate = machine.fused_rows_rate if narrow else machine.fused_rate
        step = MANY_ROWS_FUSED_STEP if rows > 1 else FUSED_STEP
        return self._compute(rate, share=share, step=step)

    @property
    def product_rows(self) -> int:
        """The most rows that a weight of the block is multiplied with in one product."""
        return max(
            (o.rows for o in self._operations if o.weights and o.kind == "product"), default=self._work.rows
        )

    def in_place(self) -> float:
        """With weights in pinned memory that kernels read over the link."""
        waits = IN_PLACE_S * sum(len(operation.weights) for operation in self._operations)
        return max(self.bytes_in_place() / self._machine.zero_copy_rate, self.from_vram()) + waits

    def bytes_in_place(self) -> int:
        """Bytes that kernels read over the link: once for a few rows, else for each tile and once more.

        A loop over time reads half of its weights, those of its states, at every step.
        """
        return sum(map(self._read_in_place, self._operations))

    def _read_in_place(self, operation: Operation) -> int:
        wide = self._dtype == "float32"
        read = operation.weight_bytes
        if operation.kind == "recurrent":
            return read * (1 + operation.steps) // 2
        if operation.kind == "lookup" or operation.rows <= (1 if wide else ONCE_ROWS):
            return read
        return read * (1 + -(-operation.rows // (WIDE_TILE_ROWS if wide else TILE_ROWS)))

    def bytes_read(self) -> int:
        """Bytes of weights that one pass reads."""
        return sum(operation.weight_bytes * operation.steps for operation in self._operations)

    def _compute(self, rate: float, *, share: float = 1.0, step: float = 1.0) -> float:
        """With weights that take `share` of their bytes and are read at `rate`."""
        weighted = (o for o in self._operations if o.weights)
        return self.without_weights + sum(self._seconds(o, rate, share=share, step=step) for o in weighted)

    def of(self, operation: Operation) -> float:
        """Seconds of one operation, its weights in VRAM."""
        return self._seconds(operation, self._machine.vram_rate)

    def _seconds(self, operation: Operation, rate: float, *, share: float = 1.0, step: float = 1.0) -> float:
        """Seconds of one operation, its weights read at `rate`: as measured, else by its kind.

        One that was measured with its weights in VRAM takes longer elsewhere by the ratio for its kind.
        """
        counted = self._counted_s(operation, rate, share=share, step=step)
        if operation.device_s is None:
            return counted
        usual = self._counted_s(operation, self._machine.vram_rate)
        return operation.device_s * (counted / usual if usual else 1.0)

    def _counted_s(
        self, operation: Operation, rate: float, *, share: float = 1.0, step: float = 1.0
    ) -> float:
        machine, kind = self._machine, operation.kind
        weights = operation.weight_bytes * share
        measured = machine.classes.get(kind)
        multiplies = kind in ("attention", "convolution")
        moving = measured.rate if measured and not multiplies else machine.activation_rate
        activations = (operation.read + operation.written) / moving
        if kind == "product":
            return self._product_s(operation, weights, rate, activations, step=step)
        each = measured.kernel_s if measured else KERNELS[kind] * machine.kernel_s
        own = each * operation.launches
        work = operation.flops / machine.rate_of_products(operation.dtype)
        if measured and multiplies:  # in 16 bits; others are as much slower as products are
            work *= machine.rate_of_products("float16") / measured.rate
        if kind == "convolution":
            reached = 1.0 if measured else CONVOLVED
            turned = 2 * operation.workspace / machine.activation_rate
            return own + turned + math.hypot(weights / rate + activations, work / reached)
        if kind == "attention":
            moved = operation.read / machine.vram_rate + operation.written / machine.activation_rate
            kept = 0 if self._fuses(operation) else operation.scores
            return own + max(moved + kept / machine.vram_rate, work)
        if kind == "recurrent":
            # of each gate's two matrices, the states' is read again at every step
            copied = 2 * weights / machine.vram_rate
            return own + copied + max(weights / 2 * (1 + operation.steps) / rate, work) + activations
        return own + weights / rate + activations

    def _fuses(self, operation: Operation) -> bool:
        return self._machine.fuses_attention(halves=operation.dtype != "float32", grouped=False)

    def _product_s(
        self, operation: Operation, weights: float, rate: float, activations: float, *, step: float
    ) -> float:
        """Seconds for one product.

        It waits for its weights, for its multiplications, and for the turns that one multiplier takes
        through an input row. They overlap in part, the first two nearly whole: 164 products of 16 bits on an
        H100 are within 21 % of this, 7.6 % on average.
        """
        machine, rows = self._machine, operation.rows
        experts = operation.name in EXPERTS
        if experts:
            rate = min(rate, machine.experts_rate)
        reads = weights / rate + activations
        wide = DTYPE_BITS[operation.dtype] > MOST_BITS_OF_UNITS
        if wide:
            reads /= WIDE_READS
            if rows <= 1:
                return self._least_product_s + reads
            work = operation.flops / rows * -(-rows // WIDE_ROWS) * WIDE_ROWS
            return (
                self._least_product_s
                + WIDE_PRODUCT_S
                + math.hypot(reads, work / machine.rate_of_products(operation.dtype))
            )
        turns = operation.inputs * machine.product_step_s * step
        work = self._multiplied(operation, experts=experts)
        overlapped = math.cbrt(reads**3 + work**3)
        return self._least_product_s + math.hypot(overlapped, turns)

    def _multiplied(self, operation: Operation, *, experts: bool) -> float:
        """Seconds of a product's multiplications. Each expert's rows fill whole tiles."""
        work, rows = float(operation.flops), operation.rows
        rate = self._machine.rate_of_products(operation.dtype)
        if experts:
            work += 2 * EXPERT_TILE * operation.groups * operation.outputs * operation.inputs
            rate *= EXPERTS_REACHED
        elif rows > 1 and operation.weights and operation.groups == 1 and operation.outputs % ALIGNED:
            rate *= UNALIGNED
            work = work / rows * -(-rows // TILE_ROWS) * TILE_ROWS
        return work / rate


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
            and self.gpu.product_rows <= MOST_ROWS
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
