"""What a block takes whose weights are packed: in VRAM, or copied, whole or in pieces. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from probes.placement.packing.forms import aligned
from probes.placement.planner.costs.blockbytes import is_packed, packed_bytes
from probes.placement.planner.costs.oneblock import OneBlock
from probes.placement.planner.costs.option import Option
from probes.placement.planner.costs.pythontime import COPY, PACKED_PRODUCT, UNPACK
from probes.placement.planner.costs.unpacking import cut, unpack_s

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
