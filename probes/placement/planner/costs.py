"""One block on one machine in one kind of pass: what the costs of all its tiers are made of. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from probes.core.errors import PlacementError, UsageError
from probes.core.units import binary_bytes
from probes.placement.models.description import (
    DTYPE_BITS,
    BlockDescription,
    ModelDescription,
    TensorDescription,
)
from probes.placement.models.ranges import Ranges
from probes.placement.packing.format import DENSE_FROM, MOST_ROWS, aligned, estimate, fused, is_matrix
from probes.placement.types import Becomes, Objective, Tier

PROFILE_SPREAD = 0.40  # half the width of the interval around a time predicted from data sheets, relative
ASSUMED_HOST: Final = 64 << 30  # bytes of host memory of a machine of which nobody knows
REPORT_SPREAD = 0.15  # around one predicted from this machine's own measurements


@dataclass(frozen=True)
class Constants:
    """One machine: a GPU, its link and its host. Bytes, bytes a second, seconds, operations a second."""

    name: str
    origin: str  # "measured: report.json", "predicted: profile wx4100"
    vram_bytes: int
    vram_rate: float  # kernels reading VRAM
    unpack_rate: float  # packed bytes read plus unpacked bytes written, with 4-bit codes
    ranked_rate: float  # the same with 3-bit codes, whose escapes are counted
    activation_rate: float  # kernels besides products reading and writing activations, mostly in a cache
    operations_rate: float  # the same by torch operations, where no kernel writes the wanted dtype
    fused_rate: float  # packed bytes read by a product straight from them; 0: there is no such product
    experts_rate: float  # experts' products reading their weights, one kernel for all of them
    fused_rows_rate: float  # the same of several rows in matrices of few outputs: bound by their decoding
    link_rate: float  # copies of pinned memory to VRAM
    link_alpha_s: float  # and what each copy takes beyond its bytes
    pageable_rate: float
    zero_copy_rate: float  # kernels reading pinned host memory
    flops: Mapping[str, float]  # multiplications and additions, by dtype: float16, bfloat16, float32
    cpu_rate: float  # products on the CPU reading weights at batch 1
    cpu_flops: float
    disk_rate: float
    operation_s: float  # of the host, for each operation that torch launches
    kernel_s: float  # of the device, for each kernel besides products, beyond its bytes
    product_s: float  # likewise for each product
    product_step_s: float  # of a product of few rows, for each number of an input row: one multiplier's turn
    unpack_item_s: float  # of the device, for each tensor that is unpacked, beyond its bytes
    context_bytes: int  # of VRAM, by the driver
    workspace_bytes: int  # of VRAM, by the libraries that multiply
    bfloat16: bool  # has units for it
    triton: bool
    unified: bool = False  # VRAM and host memory are one
    pinned_share: float = 1.0  # of the host's memory that may be pinned
    host_bytes: int | None = None  # of memory, if known
    spread: float = PROFILE_SPREAD
    notes: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU at all: else everything is on the CPU."""
        return self.vram_bytes > 0

    @property
    def converts(self) -> bool:
        """Whether bfloat16 weights have to be converted: the GPU has no units for them."""
        return self.has_gpu and not self.bfloat16

    def rate_of_products(self, dtype: str) -> float:
        """Operations a second in a dtype; in one that isn't listed, those of float32."""
        return self.flops.get(dtype, self.flops["float32"])


def with_host(machine: Constants, host: int | None) -> tuple[Constants, int | None]:
    """The machine and its host's budget; where neither is known, one is assumed, and a note says so."""
    if host is not None or machine.host_bytes is not None:
        return machine, host
    note = f"{binary_bytes(ASSUMED_HOST)} of host memory are assumed: --host says how much there is"
    return replace(machine, notes=(*machine.notes, note)), ASSUMED_HOST


UPKEEP: Final = 0.5  # of its compute time: what a block that isn't resident must save in sum


@dataclass(frozen=True)
class Pass:
    """What the pass that is planned for does."""

    rows: int  # input rows of each block: batch x tokens, or the batch when tokens are generated one by one
    batch: int
    context: int  # tokens that attention looks back on
    objective: Objective
    captured: bool = False  # replayed as a graph: Python's time doesn't count
    generating: bool = False


@dataclass(frozen=True, eq=False)
class Option:
    """One tier for one block, or for all blocks of a kind. Two are equal if they are the same one."""

    tier: Tier
    compute_s: float = 0.0  # of the GPU
    unpack_s: float = 0.0  # of the GPU
    cpu_s: float = 0.0
    copy_s: float = 0.0  # of the copy engine, and so of the link
    shared_s: float = 0.0  # of the link: kernels read in place, or the CPU reads the same memory
    disk_s: float = 0.0
    launch_s: float = 0.0  # of Python
    vram_bytes: int = 0
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    disk_bytes: int = 0
    wire_bytes: int = 0
    slot_bytes: int = 0  # that a buffer for moving blocks must have
    scratch_bytes: int = 0  # likewise for unpacked blocks
    dense: bool = False  # packed with 3-bit codes
    kept: bool = False  # with the bits that the model has, and converted for each call
    table: bool = False  # packed and never unpacked as a whole
    pieces: int = 1  # in which it is copied and unpacked, each by way of a slot
    parts: tuple[
        tuple[float, float], ...
    ] = ()  # seconds of each piece's copy and unpacking; none: equal ones

    @cached_property
    def gpu_s(self) -> float:
        """Seconds of the GPU."""
        return self.unpack_s + self.compute_s

    @cached_property
    def moves(self) -> bool:
        """Whether something besides the GPU works for it."""
        return bool(self.copy_s or self.cpu_s or self.shared_s)

    @cached_property
    def way(self) -> tuple[Tier, bool, bool, bool, int]:
        """What distinguishes it among a block's options: the tier, the layout there, and the pieces."""
        return self.tier, self.dense, self.kept, self.table, self.pieces

    @cached_property
    def each(self) -> tuple[tuple[float, float], ...]:
        """Seconds of each piece's copy and of its unpacking."""
        return self.parts or ((self.copy_s / self.pieces, self.unpack_s / self.pieces),) * self.pieces

    @cached_property
    def lanes(self) -> tuple[float, ...]:
        """Seconds of what runs one after the other in call order, of the link, of the disk, and of Python.

        The last lane isn't one: it makes a resident block the choice where it costs no time.
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
        """Bytes of VRAM, of host memory in all, and of it pinned."""
        return (self.vram_bytes, self.pinned_bytes + self.pageable_bytes, self.pinned_bytes)


# For a call of a block whose weights come and go, for its copy, its unpacking, and a product with a packed
# tensor beyond one with a plain tensor.
CALL: Final = 0.2
CALL_TENSOR: Final = 0.13  # more, for each of its tensors
COPY: Final = 1.3
UNPACK: Final = 0.6
PACKED_PRODUCT: Final = 1.1
# Of a copy's time: operations take that much longer while the link is busy. Layers of Qwen2.5-3B took 456 us
# of Python each, and 487 beside copies of another stream, H200 (docs/decisions/0073).
BESIDE_COPY: Final = 0.07
GENERATING: Final = 35  # operations of `generate` around a token, more than around a pass
GUESSED_OPERATIONS: Final = 2  # for each tensor of a block that says nothing


def operations(block: BlockDescription) -> int:
    """How many operations torch launches for a block in one pass."""
    return (block.operations or GUESSED_OPERATIONS * len(block.tensors)) * block.calls


class PythonTime:
    """Seconds of Python for one block in one kind of pass."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self._machine, self._work = machine, work
        around = block.around + GENERATING * (work.generating and block.around > 0)
        self.resident = self.of(operations(block) + around)
        self._call = CALL + CALL_TENSOR * len(block.tensors)

    def of(self, count: float) -> float:
        """For so many operations, which a graph doesn't take."""
        return 0.0 if self._work.captured else count * self._machine.operation_s

    def beside(self, copy_s: float) -> float:
        """More for everything that Python does while the link carries something for so many seconds."""
        return 0.0 if self._work.captured else BESIDE_COPY * copy_s

    def of_call(self, more: float = 0.0) -> float:
        """For a call that weights are brought for, with so many operations more."""
        return self.of(self._call + more)


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


FUSED_DTYPES: Final = ("bfloat16", "float16")
# Of the GPU before an eager unpacking: 14 layers took 1.65 ms, captured 1.59, H100
UNPACK_GAP_S: Final = 5e-6


class OneBlock:
    """A block with its bytes and with what the GPU and Python take for it."""

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
        """Whether there are 3-bit codes for it, which only kernels unpack in time."""
        return self.machine.triton and main_dtype(self.block) == "bfloat16"

    def copied_s(self, n_bytes: float) -> float:
        """Seconds of the link for so many bytes, in all calls of a pass."""
        return self.block.fetches * (self.machine.link_alpha_s + n_bytes / self.machine.link_rate)

    def fuses(self) -> bool:
        """Whether products are computed straight from the packed weights."""
        dtypes = {tensor.dtype for tensor in self.block.tensors if tensor.use == "product"}
        return (
            all(is_matrix(tensor.shape) for tensor in self.block.tensors if is_packed(tensor))
            and self.work.objective == "fast"
            and not self.converts
            and self.machine.fused_rate > 0
            and self.work.rows <= MOST_ROWS
            and dtypes <= set(FUSED_DTYPES)
        )


def unpack_s(one: OneBlock, tensor: TensorDescription, *, dense: bool, parts: int = 1) -> float:
    """Seconds for one tensor in so many parts, or for its copy where it isn't packed.

    Kernels write the dtype that was packed; operations convert.
    """
    machine = one.machine
    packed = packed_bytes(tensor, dense=dense)
    moved = packed + tensor.n_bytes
    items = parts * machine.unpack_item_s
    if packed >= tensor.given_bytes:
        return items + moved / machine.vram_rate
    if one.converts:
        return items + moved / machine.operations_rate
    ranked = (dense and tensor.numbers >= DENSE_FROM) or tensor.dtype == "float16"
    return items + moved / (machine.ranked_rate if ranked else machine.unpack_rate)


def cut(one: OneBlock, room: int, *, dense: bool) -> list[tuple[float, float]]:
    """Bytes of each piece and seconds of its unpacking, as the runtime cuts it for slots of `room`.

    A tensor that is larger than a slot is cut into equal parts. Neighbours that fit a slot together are
    one piece, so a piece may be much smaller than a slot.
    """
    made: list[tuple[float, float]] = []
    for tensor in one.block.tensors:
        packed = packed_bytes(tensor, dense=dense)
        count = -(-packed // room)
        unpack = unpack_s(one, tensor, dense=dense, parts=count)
        for _ in range(count):
            if made and made[-1][0] + packed / count <= room:
                before = made.pop()
                made.append((before[0] + packed / count, before[1] + unpack / count))
            else:
                made.append((packed / count, unpack / count))
    return made


Compute = Literal["auto", "float16", "float32"]


def reads_weights(
    model: ModelDescription, machine: Constants, *, objective: Objective, compute: Compute
) -> bool:
    """Whether the choice depends on the weights' values: float16 doesn't hold every bfloat16 number."""
    wanted = compute == "float16" or (compute == "auto" and objective == "fast")
    return wanted and machine.converts and _has_bfloat16(model)


def ready(
    model: ModelDescription,
    machine: Constants,
    *,
    objective: Objective,
    compute: Compute = "auto",
    ranges: Ranges | None = None,
) -> ModelDescription:
    """The model with what its bfloat16 weights become on the machine, and a note that says why.

    `auto` is float32 for the objective `exact`, because that holds every bfloat16 number, and float16 for
    `fast` unless `ranges` say that a number is too large for it. Raises PlacementError for such a number
    where float16 is asked for, and UsageError where nothing has to be converted. A model that is ready stays
    as it is.
    """
    if model.becomes:
        return model
    if not machine.converts or not _has_bfloat16(model):
        if compute != "auto":
            why = "has bfloat16 units" if machine.bfloat16 else "has no bfloat16 weights to convert"
            who = machine.name if machine.bfloat16 or not machine.has_gpu else model.name
            raise UsageError(f"nothing is computed in {compute}: {who} {why}", "leave --compute out")
        return model
    dtype, note = _chosen(machine, objective=objective, compute=compute, ranges=ranges)
    note = f"{machine.name} has no bfloat16 units: {note}"
    return replace(model, becomes=dtype, notes=(*model.notes, note))


def _has_bfloat16(model: ModelDescription) -> bool:
    return any(t.dtype == "bfloat16" for block in model.blocks for t in block.tensors)


def _chosen(
    machine: Constants, *, objective: Objective, compute: Compute, ranges: Ranges | None
) -> tuple[Becomes, str]:
    """The dtype, and a note."""
    whole = "its weights become float32, which holds every number and takes twice the bytes"
    if compute == "float32" or (compute == "auto" and objective == "exact"):
        return "float32", f"{whole}; where the plan keeps them as bfloat16, each pass converts them"
    if ranges is None:
        unread = "the weights weren't read: a number beyond 65504 is refused when it is loaded, by name"
        return "float16", f"its weights become float16, {_lost()}; {unread}"
    if not ranges.beyond:
        return "float16", (
            f"its weights become float16, {_lost()}; of {ranges.numbers:,} numbers {ranges.rounded:,} may "
            f"lose low bits, {ranges.vanished:,} become zero and none is too large"
        )
    why = f"{ranges.beyond} has a number beyond 65504, the largest of float16"
    if compute == "float16":
        raise PlacementError(f"{why}, and {machine.name} has no bfloat16 units", "--compute float32")
    return "float32", f"{why}, so {whole}"


def _lost() -> str:
    return "in which numbers below 8e-6 lose low bits and those below 3e-8 become zero"
