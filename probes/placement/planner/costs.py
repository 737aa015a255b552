"""What one block takes in each tier: seconds on each lane, bytes of each memory. Pure.

Compute follows the roofline, with what keeps small products and many kernels above it
(docs/decisions/0055-terms-of-a-predicted-pass.md). Unpacking and multiplying share the GPU, so their times
add up, as they did when measured (docs/decisions/0025-packed-weights.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription
from probes.placement.packing.estimate import DENSE_FROM, estimate
from probes.placement.packing.forms import aligned
from probes.placement.packing.grid import is_matrix
from probes.placement.packing.tiles import MOST_ROWS, fused, is_table, piece_bytes, piece_rows
from probes.placement.planner.constants import Constants
from probes.placement.values import Objective, Tier

FUSED_DTYPES: Final = ("bfloat16", "float16")
# Products, on an H100 (docs/decisions/0055-terms-of-a-predicted-pass.md). For each number of an input row,
# over what the library's product takes for it: the fused one of one row, and of 2 to 16.
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
# Of the GPU for each tensor that is unpacked from 3-bit codes, at least (H100)
RANKED_LEAST_S: Final = 10e-6
# Python's time in eager passes, in operations (docs/decisions/0058-time-of-eager-passes.md): for a call of a
# block whose weights come and go, for its copy, its unpacking, and a product with a packed tensor beyond one
# with a plain tensor.
CALL: Final = 0.2
CALL_TENSOR: Final = 0.13  # more, for each of its tensors
COPY: Final = 1.3
UNPACK: Final = 0.6
PACKED_PRODUCT: Final = 1.1
GENERATING: Final = 35  # operations of `generate` around a token, more than around a pass
# Of the GPU before an eager unpacking: 14 layers took 1.65 ms, captured 1.59, H100
UNPACK_GAP_S: Final = 5e-6
# A packed block that streams may be copied in so many pieces. A ring of 3 of 8 pieces of 29 MB cost the link
# 1.8 %, of 2 of 4 1.5 %, of 6 of 16 2.6 %: four float32 layers of 235 MB among sixteen that are packed, H200.
PIECES: Final = 8
LEAST_PIECE: Final = 2 << 20  # bytes
PIECE_SPARE: Final = 0.01  # of a piece: rows are packed to slightly different sizes
# Of the GPU for each tensor that it reads over the link, beyond its bytes: a kernel waits for an answer
IN_PLACE_S: Final = 14e-6  # BERT's embeddings (five tensors), 768 x 768, on an H100
HOST_SHARE: Final = (
    0.2  # of the CPU's time that copies lose: 64 layers with 10 on the CPU took 34.6 ms, not 29.5
)
SYNC_S: Final = 30e-6  # the CPU waits for the GPU and the GPU for the CPU
UPKEEP: Final = 0.5  # of its compute time: what a block that isn't resident must save in sum
GUESSED_OPERATIONS: Final = 2  # for each tensor of a block that says nothing
TOUCHED: Final = (
    3  # likewise how often an output is read or written by what follows: two diffusion transformers
)
LOOKUP_OPERATIONS: Final = 2  # of a lookup in a packed table, with a kernel for it and by torch operations
LOOKUP_OPERATIONS_WITHOUT_TRITON: Final = 25
MOST_BITS_OF_UNITS: Final = 16  # of numbers that matrix units multiply as they are


@dataclass(frozen=True)
class Pass:
    """What the pass that is planned for does."""

    rows: int  # input rows of each block: batch x tokens, or the batch when tokens are generated one by one
    batch: int
    context: int  # tokens that attention looks back on
    objective: Objective
    captured: bool = False  # replayed as a graph: Python's time doesn't count
    generating: bool = False


@dataclass(frozen=True)
class Option:
    """One tier for one block."""

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

    @property
    def way(self) -> tuple[Tier, bool, bool, bool, int]:
        """What distinguishes it among a block's options: the tier, the layout there, and the pieces."""
        return self.tier, self.dense, self.kept, self.table, self.pieces

    def part(self, nth: int) -> tuple[float, float]:
        """Seconds of a piece's copy and of its unpacking."""
        return self.parts[nth] if self.parts else (self.copy_s / self.pieces, self.unpack_s / self.pieces)

    @property
    def lanes(self) -> tuple[float, ...]:
        """Seconds of what runs one after the other in call order, of the link, of the disk, and of Python.

        The last lane isn't one: it makes a resident block the choice where it costs no time.
        """
        return (
            self.compute_s + self.unpack_s + self.cpu_s,
            self.copy_s + self.shared_s,
            self.disk_s,
            self.launch_s + self.cpu_s,
            0.0 if self.tier == "resident" else UPKEEP * self.compute_s,
        )

    @property
    def memories(self) -> tuple[float, ...]:
        """Bytes of VRAM, of host memory in all, and of it pinned."""
        return (self.vram_bytes, self.pinned_bytes + self.pageable_bytes, self.pinned_bytes)


def packed_bytes(tensor: TensorDescription, *, dense: bool = False) -> int:
    """Bytes of a tensor in a packed block, as it is where packing saves nothing. `dense`: 3-bit codes."""
    dense = dense and tensor.numbers >= DENSE_FROM
    return aligned(estimate(tensor.given_dtype, tensor.numbers, dense=dense))


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
    width = DTYPE_BITS[_main_dtype(block)] // 8
    return work.batch * block.attention.kept(work.context) * block.attention.numbers_per_token * width


def options(block: BlockDescription, machine: Constants, work: Pass) -> tuple[Option, ...]:
    """Every tier that a block can go to."""
    return tuple(_Block(block, machine, work).options())


def _is_experts(tensor: TensorDescription) -> bool:
    """Whether it holds the matrices of several experts, of which each row needs some."""
    return tensor.use == "product" and tensor.active < 1.0 and len(tensor.shape) > 2


def _main_dtype(block: BlockDescription) -> str:
    return max(block.tensors, key=lambda tensor: tensor.n_bytes).dtype


class _Block:
    """One block on one machine in one kind of pass."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self._block, self._machine, self._work = block, machine, work
        self._bytes, self._given = unpacked_bytes(block), given_bytes(block)
        self._converts = any(tensor.given for tensor in block.tensors)
        self._packed = sum(map(packed_bytes, block.tensors))
        self._cache = cache_bytes(block, work)
        self._lookup_only = all(tensor.use == "lookup" for tensor in block.tensors)
        operations = (block.operations or GUESSED_OPERATIONS * len(block.tensors)) * block.calls
        around = block.around + GENERATING * (work.generating and block.around > 0)
        self._launch = self._python(operations + around)
        self._call = CALL + CALL_TENSOR * len(block.tensors)
        products = sum(tensor.use == "product" for tensor in block.tensors)
        self._kernels = block.kernels * block.calls or max(operations - products * block.calls, 0)
        self._fixed = self._kernels * machine.kernel_s + self._attention()
        self._dtype = _main_dtype(block) if block.tensors else "float32"

    def _python(self, operations: float) -> float:
        """Python's time for so many operations, which a graph doesn't take."""
        return 0.0 if self._work.captured else operations * self._machine.operation_s

    def options(self) -> Iterator[Option]:
        """All tiers, the plain ones first. A graph holds neither the CPU's work nor reading from disk."""
        machine, work = self._machine, self._work
        if not self._block.tensors:
            yield Option("resident", compute_s=self._fixed, launch_s=self._launch, vram_bytes=self._cache)
            return
        if machine.has_gpu:
            graph = ("disk",) if work.captured else ()
            yield from (option for option in self._on_gpu() if option.tier not in graph)
        if machine.has_gpu and (self._block.anytime or work.captured):
            return
        if not machine.has_gpu or self._lookup_only or work.objective == "fast":
            yield self._on_cpu()

    def _on_gpu(self) -> Iterator[Option]:
        machine = self._machine
        yield Option(
            "resident",
            compute_s=self._compute(machine.vram_rate),
            launch_s=self._launch,
            vram_bytes=self._bytes + self._cache,
        )
        if self._block.anytime or not self._bytes:
            return
        if self._given < self._bytes:
            yield replace(self._converted("resident"), vram_bytes=self._given + self._cache)
        yield Option(
            "in_place",
            compute_s=self._in_place(),
            shared_s=0.0 if machine.unified else self._read() * self._rereads() / machine.link_rate,
            launch_s=self._launch,
            vram_bytes=self._cache,
            pinned_bytes=self._bytes,
            wire_bytes=self._read() * self._rereads(),
        )
        yield self._moving("streamed", kept=self._given < self._bytes)
        read = self._moving("disk", kept=self._converts)
        yield replace(
            read,
            disk_s=read.wire_bytes / machine.disk_rate,
            disk_bytes=read.slot_bytes,
            pinned_bytes=0,
        )
        if self._packed < 0.97 * self._given:
            if tables := tuple(self._as_table()):  # no scratch buffer as large as a vocabulary is of use then
                yield from tables
                return
            yield from self._when_packed(dense=False)
            if self._dtype == "bfloat16" and machine.triton and self._work.captured:
                yield from self._when_packed(dense=True)

    def _converted(self, tier: Tier) -> Option:
        """Kept with the bits that the model has: one operation a tensor converts them before each call."""
        machine, fetches = self._machine, self._block.fetches
        gap = 0.0 if self._work.captured else UNPACK_GAP_S
        items = machine.unpack_item_s * len(self._block.tensors) + gap
        return Option(
            tier,
            compute_s=self._compute(machine.vram_rate),
            unpack_s=fetches * ((self._given + self._bytes) / machine.vram_rate + items),
            launch_s=self._launch + fetches * self._python(self._call + UNPACK),
            scratch_bytes=self._bytes,
            kept=True,
        )

    def _moving(self, tier: Tier, *, kept: bool) -> Option:
        """Copied from pinned memory to a slot."""
        machine, fetches = self._machine, self._block.fetches
        called = self._launch + fetches * self._python(self._call)
        plain = Option(tier, compute_s=self._compute(machine.vram_rate), launch_s=called)
        how, n_bytes = (self._converted(tier), self._given) if kept else (plain, self._bytes)
        return replace(
            how,
            copy_s=fetches * (machine.link_alpha_s + n_bytes / machine.link_rate),
            launch_s=how.launch_s + fetches * self._python(COPY),
            vram_bytes=self._cache,
            pinned_bytes=n_bytes,
            wire_bytes=fetches * n_bytes,
            slot_bytes=n_bytes,
        )

    def _when_packed(self, *, dense: bool) -> Iterator[Option]:
        machine, fetches = self._machine, self._block.fetches
        packed = sum(packed_bytes(tensor, dense=dense) for tensor in self._block.tensors)
        fused = self._fused() and not dense
        more = PACKED_PRODUCT * self._packed_tensors() if fused else UNPACK
        launch = self._launch + fetches * self._python(self._call + more)
        scratch = self._bytes  # also of fused blocks, for passes of many rows
        if fused:
            compute, unpack, there = self._compute_fused(packed), 0.0, 0.0
        else:
            compute = self._compute(machine.vram_rate)
            gap = 0.0 if self._work.captured else UNPACK_GAP_S
            each = [(t, self._unpacking(t, dense=dense)) for t in self._block.tensors]
            unpack = fetches * (sum(seconds for _, seconds in each) + gap)
            raw = (seconds for t, seconds in each if packed_bytes(t) >= t.given_bytes)
            there = 0.0 if self._converts else fetches * sum(raw)  # calls read them where they are
        yield Option(
            "packed",
            compute_s=compute,
            unpack_s=unpack - there,
            launch_s=launch,
            vram_bytes=packed + self._cache,
            scratch_bytes=scratch,
            dense=dense,
            kept=self._converts,
        )
        streamed = Option(
            "streamed_packed",
            compute_s=compute,
            unpack_s=unpack,
            copy_s=fetches * (machine.link_alpha_s + packed / machine.link_rate),
            launch_s=launch + fetches * self._python(COPY),
            vram_bytes=self._cache,
            pinned_bytes=packed,
            wire_bytes=fetches * packed,
            slot_bytes=packed,
            scratch_bytes=scratch,
            dense=dense,
            kept=self._converts,
        )
        yield streamed
        if not fused and packed >= PIECES * LEAST_PIECE:
            yield self._in_pieces(streamed)

    def _in_pieces(self, streamed: Option) -> Option:
        """The same by way of slots that hold a piece of it: they take less VRAM."""
        machine, fetches = self._machine, self._block.fetches
        room = aligned(int(streamed.slot_bytes * (1 + PIECE_SPARE) / PIECES))
        parts = tuple(
            (fetches * (machine.link_alpha_s + n_bytes / machine.link_rate), fetches * seconds)
            for n_bytes, seconds in self._cut(room, dense=streamed.dense)
        )
        more = (len(parts) - 1) * fetches
        return replace(
            streamed,
            copy_s=sum(copy_s for copy_s, _ in parts),
            unpack_s=sum(unpack_s for _, unpack_s in parts),
            launch_s=streamed.launch_s + more * self._python(COPY + UNPACK),
            slot_bytes=room,
            pieces=len(parts),
            parts=parts,
        )

    def _cut(self, room: int, *, dense: bool) -> list[tuple[float, float]]:
        """Bytes of each piece and seconds of its unpacking, as the runtime cuts it for slots of `room`.

        A tensor that is larger than a slot is cut into equal parts. Neighbours that fit a slot together are
        one piece, so a piece may be much smaller than a slot.
        """
        made: list[tuple[float, float]] = []
        for tensor in self._block.tensors:
            packed = packed_bytes(tensor, dense=dense)
            count = -(-packed // room)
            unpack = self._unpacking(tensor, dense=dense, parts=count)
            for _ in range(count):
                if made and made[-1][0] + packed / count <= room:
                    before = made.pop()
                    made.append((before[0] + packed / count, before[1] + unpack / count))
                else:
                    made.append((packed / count, unpack / count))
        return made

    def _as_table(self) -> Iterator[Option]:
        """Packed in VRAM: lookups unpack the rows that they need, products no more than a piece at a time."""
        machine, (tensor, *more) = self._machine, self._block.tensors
        looked_up = self._block.looked_up or self._lookup_only
        if more or self._converts or not looked_up or not is_table(tensor.shape, tensor.dtype):
            return
        operations = LOOKUP_OPERATIONS if machine.triton else LOOKUP_OPERATIONS_WITHOUT_TRITON
        plain = Option(
            "packed",
            compute_s=self._compute(machine.vram_rate) + operations * machine.kernel_s,
            launch_s=self._launch + self._python(self._call + operations),
            vram_bytes=self._packed,
            table=True,
        )
        if self._lookup_only:
            yield plain
        else:
            yield self._multiplied(plain, tensor)

    def _multiplied(self, plain: Option, tensor: TensorDescription) -> Option:
        """A table that products need as well: fused, or piece by piece.

        Exact ones are compared with those of the whole table, which is in host memory for that.
        """
        machine = self._machine
        roomy = replace(
            plain,
            vram_bytes=plain.vram_bytes + aligned(piece_bytes(tensor.shape)),
            pinned_bytes=0 if self._work.objective == "fast" else self._bytes,
        )
        if self._fused():
            saved = self._compute(machine.vram_rate) - self._compute_fused(self._packed)
            launch = plain.launch_s + self._python(PACKED_PRODUCT)
            return replace(roomy, compute_s=plain.compute_s - saved, launch_s=launch)
        pieces = -(-tensor.shape[0] // piece_rows(tensor.shape))
        return replace(
            roomy,
            compute_s=plain.compute_s + (pieces - 1) * machine.product_s,
            unpack_s=(self._packed + self._bytes) / machine.unpack_rate + pieces * machine.unpack_item_s,
            launch_s=plain.launch_s + self._python(2 * pieces),
        )

    def _compute_fused(self, packed: int) -> float:
        """The GPU's time for products that read packed weights."""
        rows, machine = self._work.rows, self._machine
        main = max(self._block.tensors, key=lambda tensor: tensor.n_bytes)
        tile = fused(rows, main.shape)
        narrow = rows > 1 and tile is not None and tile.rows < WIDEST_TILE
        rate = machine.fused_rows_rate if narrow else machine.fused_rate
        step = MANY_ROWS_FUSED_STEP if rows > 1 else FUSED_STEP
        return self._compute(rate, share=packed / self._bytes, step=step)

    def _unpacking(self, tensor: TensorDescription, *, dense: bool, parts: int = 1) -> float:
        """The GPU's time for one tensor in so many parts, or for its copy where it isn't packed.

        Kernels write the dtype that was packed; operations convert. 3-bit codes of a small tensor wait for
        one program, those of a large one for all of them.
        """
        machine = self._machine
        packed = packed_bytes(tensor, dense=dense)
        moved = packed + tensor.n_bytes
        items = parts * machine.unpack_item_s
        if packed >= tensor.given_bytes:
            return items + moved / machine.vram_rate
        if self._converts:
            return items + moved / machine.operations_rate
        if (dense and tensor.numbers >= DENSE_FROM) or tensor.dtype == "float16":
            return math.hypot(parts * RANKED_LEAST_S, moved / machine.ranked_rate)
        return items + moved / machine.unpack_rate

    def _on_cpu(self) -> Option:
        machine, work, block = self._machine, self._work, self._block
        took = max(self._read() / machine.cpu_rate, 2 * self._products() * work.rows / machine.cpu_flops)
        sync = 2 * (machine.link_alpha_s + SYNC_S) if machine.has_gpu else 0.0
        return Option(
            "cpu",
            cpu_s=block.calls * (took + sync),
            shared_s=HOST_SHARE * block.calls * took if machine.has_gpu else 0.0,
            launch_s=self._launch,
            pageable_bytes=self._bytes + self._cache,
        )

    def _fused(self) -> bool:
        """Whether products are computed straight from the packed weights."""
        dtypes = {tensor.dtype for tensor in self._block.tensors if tensor.use == "product"}
        packed = (t for t in self._block.tensors if packed_bytes(t) < t.given_bytes)
        return (
            all(is_matrix(tensor.shape) for tensor in packed)
            and self._work.objective == "fast"
            and not self._converts
            and self._machine.fused_rate > 0
            and self._work.rows <= MOST_ROWS
            and dtypes <= set(FUSED_DTYPES)
        )

    def _packed_tensors(self) -> int:
        """How many tensors are multiplied while packed in a call."""
        return sum(packed_bytes(tensor) < tensor.given_bytes for tensor in self._block.tensors)

    def _products(self) -> float:
        return sum(tensor.products for tensor in self._block.tensors)

    def _read(self) -> int:
        """Bytes of weights that one pass reads."""
        rows = self._work.rows
        return self._block.calls * sum(tensor.bytes_read(rows) for tensor in self._block.tensors)

    def _compute(self, rate: float, *, share: float = 1.0, step: float = 1.0) -> float:
        """The GPU's time: weights are read at a rate, and take a share of their bytes."""
        each = (self._read_s(tensor, rate, share=share, step=step) for tensor in self._block.tensors)
        return self._fixed + self._block.calls * (sum(each) + self._touched() / self._machine.activation_rate)

    def _read_s(self, tensor: TensorDescription, rate: float, *, share: float, step: float) -> float:
        """The GPU's time for one tensor in one call.

        A product waits for its weights, for its multiplications, and for the turns that one multiplier takes
        through an input row. They overlap in part, the first two nearly whole: 164 products of 16 bits on an
        H100 are within 21 % of this, 7.6 % on average.
        """
        machine, rows = self._machine, self._work.rows
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

    def _in_place(self) -> float:
        reads = self._read() * self._rereads()
        computed = self._compute(self._machine.vram_rate)
        waits = IN_PLACE_S * len(self._block.tensors) * self._block.calls
        return max(reads / self._machine.zero_copy_rate, computed) + waits

    def _rereads(self) -> int:
        """How often a kernel reads the weights: once for a few rows, else for each tile and once more."""
        rows, wide = self._work.rows, self._dtype == "float32"
        if self._lookup_only or rows <= (1 if wide else ONCE_ROWS):
            return 1
        return 1 + -(-rows // (WIDE_TILE_ROWS if wide else TILE_ROWS))

    def _attention(self) -> float:
        """The GPU's time for scores and sums over the context, by bytes of keys and values or by products."""
        attention, work, machine = self._block.attention, self._work, self._machine
        if attention is None or not machine.has_gpu:
            return 0.0
        dtype = _main_dtype(self._block)
        kept = attention.kept(work.context)
        moved = work.batch * kept * attention.numbers_per_token * DTYPE_BITS[dtype] / 8
        products = 2 * work.rows * attention.heads * attention.head_width * kept
        rate = machine.rate_of_products(dtype)
        return max(moved / machine.vram_rate, 2 * products / rate)
