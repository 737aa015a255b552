"""Every tier that a block can go to, with its costs: seconds on each lane, bytes of each memory. Pure.

`options` lists them. `surroundings` counts what a pass takes in VRAM besides weights and their buffers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from probes.placement.models.description import DTYPE_BITS, BlockDescription, TensorDescription, TracedFacts
from probes.placement.packing.format import aligned, is_table, piece_bytes, piece_rows
from probes.placement.planner.costs import (
    ALIGNED,
    COPY,
    PACKED_PRODUCT,
    UNPACK,
    BlockCosts,
    Option,
    is_packed,
    packed_bytes,
    pieces_of,
    unpack_s,
)
from probes.placement.planner.experts import by_experts, gathered_bytes
from probes.placement.planner.machine import Constants
from probes.placement.planner.rules import Pass, live_numbers, main_dtype
from probes.placement.types import Tier, Workload

# Pieces in which a large packed block may be copied. With 3 slots, each for one of 8 pieces of 29 MB, the
# link lost 1.8 %; with 2 for one of 4, 1.5 %; with 6 for one of 16, 2.6 %: four float32 layers of 235 MB
# among sixteen that are packed, H200.
PIECES: Final = 8
LEAST_PIECE: Final = 2 << 20  # bytes; smaller pieces cost more than they save
PIECE_SPARE: Final = 0.01  # room in a slot beyond an equal piece: rows pack to slightly different sizes


def when_packed(costs: BlockCosts, *, dense: bool) -> Iterator[Option]:
    """The packed tiers: in VRAM, in pinned memory, and there in pieces. `dense`: with 2-bit codes."""
    fused = costs.fuses() and not dense
    packed = sum(packed_bytes(tensor, dense=dense) for tensor in costs.block.tensors)
    plain = _fused(costs, packed) if fused else _unpacked(costs, dense=dense)
    # in VRAM, tensors that don't pack are read where they are
    not_copied_s = 0.0 if fused or costs.converts else _raw_s(costs, dense=dense)
    yield replace(
        plain, tier="packed", unpack_s=plain.unpack_s - not_copied_s, vram_bytes=packed + costs.cache_bytes
    )
    streamed = _copied(costs, plain, "streamed_packed", packed)
    yield streamed
    if not fused and packed >= PIECES * LEAST_PIECE:
        yield _in_pieces(costs, streamed)


def _fused(costs: BlockCosts, packed: int) -> Option:
    """Products are computed straight from the packed weights."""
    packed_products = sum(map(is_packed, costs.block.tensors))
    return Option(
        "packed",
        compute_s=costs.gpu.from_packed(share=packed / costs.n_bytes),
        launch_s=costs.python.resident
        + costs.block.fetches * costs.python.of_call(PACKED_PRODUCT * packed_products),
        scratch_bytes=costs.n_bytes,  # for passes of many rows
    )


def _unpacked(costs: BlockCosts, *, dense: bool) -> Option:
    """Unpacked to a scratch buffer before each call."""
    each_s = sum(unpack_s(costs, tensor, dense=dense) for tensor in costs.block.tensors)
    return replace(_decoded(costs, "packed", each_s), dense=dense, kept=costs.converts)


def _decoded(costs: BlockCosts, tier: Tier, each_s: float) -> Option:
    """Brought to a scratch buffer before each call, in `each_s` seconds of the GPU."""
    fetches = costs.block.fetches
    return Option(
        tier,
        compute_s=costs.gpu.from_vram(),
        unpack_s=fetches * (each_s + costs.unpack_gap_s),
        launch_s=costs.python.resident + fetches * costs.python.of_call(UNPACK),
        scratch_bytes=costs.n_bytes,
    )


def _raw_s(costs: BlockCosts, *, dense: bool) -> float:
    """Seconds of copying the tensors that don't pack to the scratch buffer."""
    raw = (tensor for tensor in costs.block.tensors if not is_packed(tensor))
    return costs.block.fetches * sum(unpack_s(costs, tensor, dense=dense) for tensor in raw)


def _copied(costs: BlockCosts, plain: Option, tier: Tier, n_bytes: int) -> Option:
    """`plain`, with so many bytes copied from pinned memory to a slot for each fetch."""
    fetches, copy_s = costs.block.fetches, costs.copied_s(n_bytes)
    return replace(
        plain,
        tier=tier,
        copy_s=copy_s,
        launch_s=plain.launch_s + fetches * costs.python.of(COPY) + costs.python.beside(copy_s),
        vram_bytes=costs.cache_bytes,
        pinned_bytes=n_bytes,
        wire_bytes=fetches * n_bytes,
        slot_bytes=n_bytes,
    )


def _in_pieces(costs: BlockCosts, streamed: Option) -> Option:
    """`streamed` through slots that hold a piece of the block each, which take less VRAM."""
    fetches = costs.block.fetches
    slot_bytes = aligned(int(streamed.slot_bytes * (1 + PIECE_SPARE) / PIECES))
    parts = tuple(
        (costs.copied_s(n_bytes), fetches * seconds)
        for n_bytes, seconds in pieces_of(costs, slot_bytes, dense=streamed.dense)
    )
    added = (len(parts) - 1) * fetches
    return replace(
        streamed,
        copy_s=sum(copy_s for copy_s, _ in parts),
        unpack_s=sum(unpack_s for _, unpack_s in parts),
        launch_s=streamed.launch_s + added * costs.python.of(COPY + UNPACK),
        slot_bytes=slot_bytes,
        pieces=len(parts),
        parts=parts,
    )


LOOKUP_OPERATIONS: Final = 2  # of a lookup in a packed table, by a kernel
LOOKUP_OPERATIONS_WITHOUT_TRITON: Final = 25  # and by torch operations


def as_table(costs: BlockCosts) -> Option | None:
    """A lookup table packed in VRAM and never unpacked as a whole; None where the block isn't one."""
    machine, (tensor, *others) = costs.machine, costs.block.tensors
    looked_up = costs.block.looked_up or costs.block.lookups_only
    if others or costs.converts or not looked_up or not is_table(tensor.shape, tensor.dtype):
        return None
    operations = LOOKUP_OPERATIONS if machine.triton else LOOKUP_OPERATIONS_WITHOUT_TRITON
    lookup = Option(
        "packed",
        compute_s=costs.gpu.from_vram() + operations * machine.kernel_s,
        launch_s=costs.python.resident + costs.python.of_call(operations),
        vram_bytes=costs.packed_bytes,
        table=True,
    )
    if costs.block.lookups_only:
        return lookup
    # of another number of rows a library multiplies the whole and pieces by kernels that round otherwise
    alike = tensor.shape[0] % ALIGNED == 0 or costs.work.objective == "fast"
    return _tied_table(costs, lookup, tensor) if alike else None


def _tied_table(costs: BlockCosts, lookup: Option, tensor: TensorDescription) -> Option:
    """A packed table that a product needs as well, as tied embeddings: fused, or unpacked piece by piece.

    With the objective `exact` the runtime compares such products with the whole table's once, which is in
    host memory for that.
    """
    machine = costs.machine
    tied = replace(
        lookup,
        vram_bytes=lookup.vram_bytes + aligned(piece_bytes(tensor.shape)),
        pinned_bytes=0 if costs.work.objective == "fast" else costs.n_bytes,
    )
    if costs.fuses():
        saved = costs.gpu.from_vram() - costs.gpu.from_packed(share=costs.packed_bytes / costs.n_bytes)
        launch = lookup.launch_s + costs.python.of(PACKED_PRODUCT)
        return replace(tied, compute_s=lookup.compute_s - saved, launch_s=launch)
    pieces = -(-tensor.shape[0] // piece_rows(tensor.shape))
    return replace(
        tied,
        compute_s=lookup.compute_s + (pieces - 1) * machine.product_s,
        unpack_s=(costs.packed_bytes + costs.n_bytes) / machine.unpack_rate + pieces * machine.unpack_item_s,
        launch_s=lookup.launch_s + costs.python.of(2 * pieces),
    )


WORTH_PACKING: Final = 0.97  # share of a block's bytes below which packing it is considered
# Share of the CPU's time that copies lose to it: 64 layers with 10 on the CPU took 34.6 ms, not 29.5.
HOST_SHARE: Final = 0.2
SYNC_S: Final = 30e-6  # of handing activations from the GPU to the CPU, or back


def options(block: BlockDescription, machine: Constants, work: Pass) -> tuple[Option, ...]:
    """Every tier that a block can go to, the plain ones first."""
    return tuple(_options(BlockCosts(block, machine, work)))


def _options(costs: BlockCosts) -> Iterator[Option]:
    """A graph captures neither the CPU's work nor reading from disk, so such tiers are left out for it."""
    block, machine, work = costs.block, costs.machine, costs.work
    if not block.tensors:
        yield _resident(costs, costs.gpu.without_weights)
        return
    if block.experts:
        yield by_experts(costs)
        return
    if machine.has_gpu:
        yield from (option for option in _on_gpu(costs) if not (work.captured and option.tier == "disk"))
    if machine.has_gpu and (block.anytime or block.gpu_only or work.captured):
        return
    if not machine.has_gpu or block.lookups_only or work.objective == "fast":
        yield _on_cpu(costs)


def _on_gpu(costs: BlockCosts) -> Iterator[Option]:
    yield _resident(costs, costs.gpu.from_vram())
    if costs.block.anytime or not costs.n_bytes:
        return
    if costs.given_bytes < costs.n_bytes:
        yield replace(_converted(costs, "resident"), vram_bytes=costs.given_bytes + costs.cache_bytes)
    yield _in_place(costs)
    yield _moving(costs, "streamed", kept=costs.given_bytes < costs.n_bytes)
    yield _from_disk(costs)
    if costs.packed_bytes < WORTH_PACKING * costs.given_bytes:
        if table := as_table(costs):  # then no scratch buffer as large as a vocabulary is of use
            yield table
            return
        yield from when_packed(costs, dense=False)
        # only the Triton kernels unpack 2-bit codes fast enough
        if costs.machine.triton and main_dtype(costs.block) == "bfloat16":
            yield from when_packed(costs, dense=True)


def _resident(costs: BlockCosts, compute_s: float) -> Option:
    return Option(
        "resident",
        compute_s=compute_s,
        launch_s=costs.python.resident,
        vram_bytes=costs.n_bytes + costs.cache_bytes,
    )


def _converted(costs: BlockCosts, tier: Tier) -> Option:
    """Kept as bfloat16: before each call, one operation a tensor converts it to what it computes in."""
    machine = costs.machine
    items_s = machine.unpack_item_s * len(costs.block.tensors)
    moved_s = (costs.given_bytes + costs.n_bytes) / machine.vram_rate
    return replace(_decoded(costs, tier, moved_s + items_s), kept=True)


def _in_place(costs: BlockCosts) -> Option:
    """In pinned memory, where the kernels that need it read it over the link."""
    machine, read = costs.machine, costs.gpu.bytes_in_place()
    shared_s = 0.0 if machine.unified else read / machine.link_rate
    return Option(
        "in_place",
        compute_s=costs.gpu.in_place(),
        shared_s=shared_s,
        launch_s=costs.python.resident + costs.python.beside(shared_s),
        vram_bytes=costs.cache_bytes,
        pinned_bytes=costs.n_bytes,
        wire_bytes=read,
    )


def _moving(costs: BlockCosts, tier: Tier, *, kept: bool) -> Option:
    """Copied from pinned memory to a slot for each fetch. `kept`: as bfloat16, and converted there."""
    if kept:
        return _copied(costs, _converted(costs, tier), tier, costs.given_bytes)
    called_s = costs.python.resident + costs.block.fetches * costs.python.of_call()
    plain = Option(tier, compute_s=costs.gpu.from_vram(), launch_s=called_s)
    return _copied(costs, plain, tier, costs.n_bytes)


def _from_disk(costs: BlockCosts) -> Option:
    """Read from disk to pinned memory for each fetch, and copied from there to a slot."""
    moving = _moving(costs, "disk", kept=costs.converts)
    return replace(
        moving,
        disk_s=moving.wire_bytes / costs.machine.disk_rate,
        disk_bytes=moving.slot_bytes,
        pinned_bytes=0,
    )


def _on_cpu(costs: BlockCosts) -> Option:
    machine, block = costs.machine, costs.block
    pass_s = max(costs.gpu.bytes_read() / machine.cpu_rate, costs.gpu.flops / machine.cpu_flops)
    sync = 2 * (machine.link_alpha_s + SYNC_S) if machine.has_gpu else 0.0
    return Option(
        "cpu",
        cpu_s=pass_s + block.calls * sync,
        shared_s=HOST_SHARE * pass_s if machine.has_gpu else 0.0,
        launch_s=costs.python.resident,
        pageable_bytes=costs.n_bytes + costs.cache_bytes,
    )


SEGMENT: Final = 2 << 20  # bytes, in multiples of which torch's allocator takes large blocks
LOOSE_SEGMENTS: Final = 4  # lost at the arena's end, to small blocks, activations and what libraries keep
POOL_SEGMENTS: Final = 4  # likewise in a graph's own memory pool; without, Qwen2.5-3B lacked 7 MB of 4 GiB
# torch's allocator serves 1 to 10 MiB from buffers of 20 MiB (kLargeBuffer, kMinLargeAlloc), each for one
# stream alone: GPT-2 XL's logits of 100 MiB, next to hidden states of 3 MiB, lacked 2 MiB.
LARGE_BUFFER: Final = 20 << 20
LARGE_ACTIVATIONS: Final = 10 << 20  # bytes above which such buffers come beside the largest tensor's own

FULL_BYTES: Final = 4  # of a float32 number


@dataclass(frozen=True)
class Surroundings:
    """Bytes of VRAM that weights, their buffers and the KV cache must leave free."""

    activations: int
    workspace: int
    context: int
    segments: int = LOOSE_SEGMENTS

    @property
    def loose_rounding(self) -> int:
        """Bytes lost to the allocator's rounding outside the arenas."""
        return self.segments * SEGMENT

    def left(self, vram: int, machine: Constants) -> int:
        """Bytes left for those, under a budget `vram` of torch's allocator and on this card."""
        budget = min(vram, machine.vram_bytes - self.context)
        return budget - self.activations - self.workspace - self.loose_rounding


def surroundings(
    blocks: Sequence[BlockDescription],
    machine: Constants,
    workload: Workload,
    traced: TracedFacts | None = None,
    *,
    captured: bool = False,
) -> Surroundings:
    """What one pass of this workload takes in VRAM besides weights, their buffers and the KV cache.

    A library keeps a workspace for each stream, and a captured pass is recorded on a stream of its own.
    Activations are those of the trace, in the allocator's segments; without one, they are guessed.
    """
    if not machine.has_gpu:
        return Surroundings(0, 0, 0)
    workspace = machine.workspace_bytes * (2 if captured else 1)
    segments = LOOSE_SEGMENTS + (POOL_SEGMENTS if captured else 0)
    if traced is not None:
        halves = all(t.dtype != "float32" for block in blocks for t in block.tensors if t.products)
        fuses = machine.fuses_attention(halves=halves, grouped=False)
        peak = traced.peak if fuses else traced.peak_with_scores
        lost = -(-max(peak.reserved - peak.alive, 0) // SEGMENT)
        joined = max((block.joined_bytes for block in blocks), default=0)
        activations = peak.alive + max(gathered_bytes(blocks, workload), joined)
        return Surroundings(activations, workspace, machine.context_bytes, segments + lost)
    rows = workload.batch * workload.tokens
    most = max(
        (_live_bytes(block) + _score_bytes(block, machine, workload.tokens) for block in blocks), default=0
    )
    if captured:
        segments += LARGE_BUFFER // SEGMENT if rows * most > LARGE_ACTIVATIONS else 0
    activations = rows * most + gathered_bytes(blocks, workload)
    return Surroundings(activations, workspace, machine.context_bytes, segments)


def _live_bytes(block: BlockDescription) -> int:
    """Bytes of activations alive at the block's peak, for each input row."""
    if not block.tensors:
        return 0
    width = max(min(DTYPE_BITS[tensor.dtype], 32) for tensor in block.tensors) // 8
    return live_numbers(block) * max(width, 2)


def _score_bytes(block: BlockDescription, machine: Constants, tokens: int) -> int:
    """Bytes of attention's scores, for each input row: those of a pass that attends without a fused kernel.

    torch computes them in float32, and has them twice while it normalises them. `tokens`: of a sequence.
    """
    attention = block.attention
    if attention is None or not block.tensors:
        return 0
    halves = all(tensor.dtype != "float32" for tensor in block.tensors if tensor.products)
    grouped = attention.heads != attention.key_value_heads
    if machine.fuses_attention(halves=halves, grouped=grouped):
        return 0
    return 2 * FULL_BYTES * attention.heads * attention.kept(tokens)


def rounded(n_bytes: int) -> int:
    """`n_bytes` as torch's allocator takes them for one large allocation, such as the weights' arena."""
    return -(-n_bytes // SEGMENT) * SEGMENT
