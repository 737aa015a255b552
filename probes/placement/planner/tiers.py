"""Every tier that a block can go to: seconds on each lane there, bytes of each memory. Pure.

Those of packed weights are in `packedtiers` and `packedlookups`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription
from probes.placement.packing.format import aligned, is_table, piece_bytes, piece_rows
from probes.placement.planner.costs import (
    COPY,
    PACKED_PRODUCT,
    UNPACK,
    Constants,
    OneBlock,
    Option,
    Pass,
    cut,
    is_packed,
    packed_bytes,
    unpack_s,
)
from probes.placement.types import Tier, Workload

# A packed block that streams may be copied in so many pieces. A ring of 3 of 8 pieces of 29 MB cost the link
# 1.8 %, of 2 of 4 1.5 %, of 6 of 16 2.6 %: four float32 layers of 235 MB among sixteen that are packed, H200.
PIECES: Final = 8
LEAST_PIECE: Final = 2 << 20  # bytes
PIECE_SPARE: Final = 0.01  # of a piece: rows are packed to slightly different sizes


def when_packed(one: OneBlock, *, dense: bool) -> Iterator[Option]:
    """Packed in VRAM and in pinned memory; `dense`: with 3-bit codes."""
    fused = one.fuses() and not dense
    packed = sum(packed_bytes(tensor, dense=dense) for tensor in one.block.tensors)
    plain = _fused(one, packed) if fused else _unpacked(one, dense=dense)
    there = 0.0 if fused or one.converts else _raw_s(one, dense=dense)  # calls read them where they are
    yield replace(plain, tier="packed", unpack_s=plain.unpack_s - there, vram_bytes=packed + one.cache_bytes)
    streamed = _streamed(one, plain, packed)
    yield streamed
    if not fused and packed >= PIECES * LEAST_PIECE:
        yield _in_pieces(one, streamed)


def _fused(one: OneBlock, packed: int) -> Option:
    """Products are computed straight from the packed weights."""
    multiplied = sum(map(is_packed, one.block.tensors))
    return Option(
        "packed",
        compute_s=one.gpu.from_packed(share=packed / one.n_bytes),
        launch_s=one.python.resident + one.block.fetches * one.python.of_call(PACKED_PRODUCT * multiplied),
        scratch_bytes=one.n_bytes,  # for passes of many rows
    )


def _unpacked(one: OneBlock, *, dense: bool) -> Option:
    """Unpacked to a scratch buffer before each call."""
    fetches = one.block.fetches
    each = sum(unpack_s(one, tensor, dense=dense) for tensor in one.block.tensors)
    return Option(
        "packed",
        compute_s=one.gpu.from_vram(),
        unpack_s=fetches * (each + one.unpack_gap_s),
        launch_s=one.python.resident + fetches * one.python.of_call(UNPACK),
        scratch_bytes=one.n_bytes,
        dense=dense,
        kept=one.converts,
    )


def _raw_s(one: OneBlock, *, dense: bool) -> float:
    """Seconds in which tensors that don't pack are copied to the scratch buffer."""
    raw = (tensor for tensor in one.block.tensors if not is_packed(tensor))
    return one.block.fetches * sum(unpack_s(one, tensor, dense=dense) for tensor in raw)


def _streamed(one: OneBlock, plain: Option, packed: int) -> Option:
    """Copied from pinned memory to a slot."""
    fetches, copy_s = one.block.fetches, one.copied_s(packed)
    return replace(
        plain,
        tier="streamed_packed",
        copy_s=copy_s,
        launch_s=plain.launch_s + fetches * one.python.of(COPY) + one.python.beside(copy_s),
        vram_bytes=one.cache_bytes,
        pinned_bytes=packed,
        wire_bytes=fetches * packed,
        slot_bytes=packed,
    )


def _in_pieces(one: OneBlock, streamed: Option) -> Option:
    """The same by way of slots that hold a piece of it: they take less VRAM."""
    fetches = one.block.fetches
    room = aligned(int(streamed.slot_bytes * (1 + PIECE_SPARE) / PIECES))
    parts = tuple(
        (one.copied_s(n_bytes), fetches * seconds)
        for n_bytes, seconds in cut(one, room, dense=streamed.dense)
    )
    more = (len(parts) - 1) * fetches
    return replace(
        streamed,
        copy_s=sum(copy_s for copy_s, _ in parts),
        unpack_s=sum(unpack_s for _, unpack_s in parts),
        launch_s=streamed.launch_s + more * one.python.of(COPY + UNPACK),
        slot_bytes=room,
        pieces=len(parts),
        parts=parts,
    )


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


WORTH_PACKING: Final = 0.97  # of its bytes, that a packed block must be below
HOST_SHARE: Final = (
    0.2  # of the CPU's time that copies lose: 64 layers with 10 on the CPU took 34.6 ms, not 29.5
)
SYNC_S: Final = 30e-6  # the CPU waits for the GPU and the GPU for the CPU


def options(block: BlockDescription, machine: Constants, work: Pass) -> tuple[Option, ...]:
    """Every tier that a block can go to."""
    return tuple(_options(OneBlock(block, machine, work)))


def _options(one: OneBlock) -> Iterator[Option]:
    """All tiers, the plain ones first. A graph holds neither the CPU's work nor reading from disk."""
    block, machine, work = one.block, one.machine, one.work
    if not block.tensors:
        yield _resident(one, one.gpu.without_weights)
        return
    if machine.has_gpu:
        graph = ("disk",) if work.captured else ()
        yield from (option for option in _on_gpu(one) if option.tier not in graph)
    if machine.has_gpu and (block.anytime or work.captured):
        return
    if not machine.has_gpu or block.lookups_only or work.objective == "fast":
        yield _on_cpu(one)


def _on_gpu(one: OneBlock) -> Iterator[Option]:
    yield _resident(one, one.gpu.from_vram())
    if one.block.anytime or not one.n_bytes:
        return
    if one.given_bytes < one.n_bytes:
        yield replace(_converted(one, "resident"), vram_bytes=one.given_bytes + one.cache_bytes)
    yield _in_place(one)
    yield _moving(one, "streamed", kept=one.given_bytes < one.n_bytes)
    yield _from_disk(one)
    if one.packed_bytes < WORTH_PACKING * one.given_bytes:
        if table := as_table(one):  # no scratch buffer as large as a vocabulary is of use then
            yield table
            return
        yield from when_packed(one, dense=False)
        if one.may_be_dense:
            yield from when_packed(one, dense=True)


def _resident(one: OneBlock, compute_s: float) -> Option:
    return Option(
        "resident",
        compute_s=compute_s,
        launch_s=one.python.resident,
        vram_bytes=one.n_bytes + one.cache_bytes,
    )


def _converted(one: OneBlock, tier: Tier) -> Option:
    """Kept with the bits that the model has: one operation a tensor converts them before each call."""
    machine, fetches = one.machine, one.block.fetches
    items = machine.unpack_item_s * len(one.block.tensors) + one.unpack_gap_s
    return Option(
        tier,
        compute_s=one.gpu.from_vram(),
        unpack_s=fetches * ((one.given_bytes + one.n_bytes) / machine.vram_rate + items),
        launch_s=one.python.resident + fetches * one.python.of_call(UNPACK),
        scratch_bytes=one.n_bytes,
        kept=True,
    )


def _in_place(one: OneBlock) -> Option:
    """Read over the link by the kernels that need it."""
    machine, read = one.machine, one.gpu.bytes_in_place()
    shared_s = 0.0 if machine.unified else read / machine.link_rate
    return Option(
        "in_place",
        compute_s=one.gpu.in_place(),
        shared_s=shared_s,
        launch_s=one.python.resident + one.python.beside(shared_s),
        vram_bytes=one.cache_bytes,
        pinned_bytes=one.n_bytes,
        wire_bytes=read,
    )


def _moving(one: OneBlock, tier: Tier, *, kept: bool) -> Option:
    """Copied from pinned memory to a slot."""
    fetches = one.block.fetches
    called = one.python.resident + fetches * one.python.of_call()
    plain = Option(tier, compute_s=one.gpu.from_vram(), launch_s=called)
    how, n_bytes = (_converted(one, tier), one.given_bytes) if kept else (plain, one.n_bytes)
    copy_s = one.copied_s(n_bytes)
    return replace(
        how,
        copy_s=copy_s,
        launch_s=how.launch_s + fetches * one.python.of(COPY) + one.python.beside(copy_s),
        vram_bytes=one.cache_bytes,
        pinned_bytes=n_bytes,
        wire_bytes=fetches * n_bytes,
        slot_bytes=n_bytes,
    )


def _from_disk(one: OneBlock) -> Option:
    """Read to pinned memory for each fetch, and copied from there."""
    read = _moving(one, "disk", kept=one.converts)
    return replace(
        read,
        disk_s=read.wire_bytes / one.machine.disk_rate,
        disk_bytes=read.slot_bytes,
        pinned_bytes=0,
    )


def _on_cpu(one: OneBlock) -> Option:
    machine, block = one.machine, one.block
    products = sum(tensor.products for tensor in block.tensors)
    took = max(one.gpu.bytes_read() / machine.cpu_rate, 2 * products * one.work.rows / machine.cpu_flops)
    sync = 2 * (machine.link_alpha_s + SYNC_S) if machine.has_gpu else 0.0
    return Option(
        "cpu",
        cpu_s=block.calls * (took + sync),
        shared_s=HOST_SHARE * block.calls * took if machine.has_gpu else 0.0,
        launch_s=one.python.resident,
        pageable_bytes=one.n_bytes + one.cache_bytes,
    )


SEGMENT: Final = 2 << 20  # torch's allocator takes large blocks in multiples of this
LOOSE_SEGMENTS: Final = 4  # for the arena's end, small blocks, activations, what libraries keep
POOL_SEGMENTS: Final = 4  # likewise of a graph's own pool; without them Qwen2.5-3B lacked 7 MB of 4 GiB
# torch's allocator serves 1 to 10 MiB from buffers of 20 (kLargeBuffer, kMinLargeAlloc), and those of one
# stream don't serve another: GPT-2 XL's logits of 100 MiB, next to hidden states of 3, lacked 2 MiB.
LARGE_BUFFER: Final = 20 << 20
LARGE_ACTIVATIONS: Final = 10 << 20  # from where on there are such buffers beside the largest tensor's own


@dataclass(frozen=True)
class Surroundings:
    """Bytes of VRAM that the weights, their buffers and the keys and values must leave free."""

    activations: int
    workspace: int
    context: int
    segments: int = LOOSE_SEGMENTS

    @property
    def loose_rounding(self) -> int:
        """Bytes lost to the allocator's rounding outside the arenas."""
        return self.segments * SEGMENT

    def left(self, vram: int, machine: Constants) -> int:
        """Bytes for everything else, under a budget of torch's allocator and on this card."""
        budget = min(vram, machine.vram_bytes - self.context)
        return budget - self.activations - self.workspace - self.loose_rounding


def surroundings(
    blocks: Sequence[BlockDescription], machine: Constants, workload: Workload, *, captured: bool = False
) -> Surroundings:
    """What one pass of this workload takes besides weights.

    A library keeps a workspace for each stream. A captured pass is recorded on a stream of its own.
    """
    if not machine.has_gpu:
        return Surroundings(0, 0, 0)
    rows = workload.batch * workload.tokens
    peak = max((_live_bytes(block) for block in blocks), default=0)
    workspace = machine.workspace_bytes * (2 if captured else 1)
    segments = LOOSE_SEGMENTS
    if captured:
        segments += POOL_SEGMENTS + (LARGE_BUFFER // SEGMENT if rows * peak > LARGE_ACTIVATIONS else 0)
    return Surroundings(rows * peak, workspace, machine.context_bytes, segments)


def _live_bytes(block: BlockDescription) -> int:
    """Bytes of activations for each input row."""
    if not block.tensors:
        return 0
    width = max(min(DTYPE_BITS[tensor.dtype], 32) for tensor in block.tensors) // 8
    live = block.live_numbers or 2 * max(_in_and_out(tensor) for tensor in block.tensors)
    return live * max(width, 2)


def _in_and_out(tensor: TensorDescription) -> int:
    """Numbers that go into a tensor's operation and come out, for a row; a lookup gives one of its rows."""
    return tensor.shape[-1] if tensor.use == "lookup" else sum(tensor.shape[-2:])


def rounded(n_bytes: int) -> int:
    """Bytes of the arena of weights and rings, one allocation, as torch's allocator takes it."""
    return -(-n_bytes // SEGMENT) * SEGMENT
