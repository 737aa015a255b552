"""Every tier that a block can go to: seconds on each lane there, bytes of each memory. Pure.

Those of packed weights are in `packedtiers` and `packedlookups`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from probes.placement.models.description import BlockDescription
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.costs.oneblock import OneBlock
from probes.placement.planner.costs.option import Option, Pass
from probes.placement.planner.costs.packedlookups import as_table
from probes.placement.planner.costs.packedtiers import when_packed
from probes.placement.planner.costs.pythontime import COPY, UNPACK
from probes.placement.values import Tier

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
