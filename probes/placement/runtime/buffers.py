"""Memory of exact size: one piece on the host, registered once for the GPU's copies, and one in VRAM.

torch's own pinned allocator rounds each allocation up to a power of two, and pins again for each. Here the
pages come from the kernel, only those that are used are registered, and they are on the GPU's NUMA node where
sysfs says which one that is.
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

import torch

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware import numa
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import ALIGNMENT, DENSE_FROM, PackedForm, aligned
from probes.placement.packing.packed import Packed, as_it_is, form
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.packed_tables import is_multiplied, room_of
from probes.placement.runtime.stored_blocks import Cuts, Stored, lay_out, memory_order, raw_bytes, raw_view
from probes.placement.runtime.weight_sources import Homes, PackedValues, Source, Wire, own_values
from probes.placement.types import Plan, Tier

_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, <linux/mman.h>, since 5.14
_PORTABLE_MAPPED: Final = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class _Pages(mmap.mmap):
    """Pages that the driver forgets before they go back to the kernel, however late that is.

    Without `remove()` the last tensor that uses them decides. The driver would refuse to register new pages
    at the address of pages that it still knows.
    """

    registered = 0  # the address that the driver knows
    finish: Callable[[], object] = staticmethod(int)  # waits for the copies that read them

    def unregister(self) -> None:
        """Twice does no harm."""
        if self.registered:
            with suppress(RuntimeError):  # of a device that failed: nothing is copied there any more
                self.finish()
            torch.cuda.cudart().cudaHostUnregister(self.registered)
            self.registered = 0

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be about to end
            self.unregister()


class _Region:
    """One mapping, from which memory is taken piece by piece."""

    def __init__(self, room: int, node: int | Unknown) -> None:
        size = _in_pages(max(room, 1))
        try:
            self._map = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise PlacementError(
                f"{binary_bytes(size)} of host memory were refused: {error}",
                "plan again with a smaller host, or end other programs",
            ) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._node = node
        self._populated = 0
        self.size, self.used = size, 0

    def take(self, n_bytes: int) -> torch.Tensor:
        """The next piece, for which there is room."""
        begin, end = self.used, self.used + n_bytes
        self._populate(end)
        self.used = min(begin + aligned(n_bytes), self.size)
        return self._bytes[begin:end]

    def _populate(self, end: int) -> None:
        """Let the kernel provide pages from the GPU's node. Where it can't, the first write provides them."""
        stop = _in_pages(end)
        if stop <= self._populated:
            return
        with _on_node(self._node), suppress(OSError):
            self._map.madvise(_POPULATE_WRITE, self._populated, stop - self._populated)
        self._populated = stop

    def register(self, finish: Callable[[], object]) -> str:
        """Register what has been taken. Why that isn't possible; empty where it is."""
        try:
            failed = torch.cuda.cudart().cudaHostRegister(
                self._bytes.data_ptr(), _in_pages(self.used), _PORTABLE_MAPPED
            )
        except (RuntimeError, AttributeError, AssertionError) as error:
            return f"the memory can't be registered: {first_line(error)}"
        self._map.finish = finish
        self._map.registered = 0 if int(failed) else self._bytes.data_ptr()
        return f"the driver refused to register the memory (error {int(failed)})" if int(failed) else ""

    def unregister(self) -> None:
        """Twice does no harm."""
        self._map.unregister()


class HostArena:
    """Host memory that is handed out piece by piece, then pinned as a whole.

    `room` bounds what can be handed out; memory is taken only for what is. `why_pageable` is empty once the
    memory is pinned.
    """

    def __init__(self, room: int, node: int | Unknown) -> None:
        self.node = node
        self._regions = [_Region(room, node)]
        self.asked = 0
        self.why_pageable = "nothing was registered"

    @property
    def used(self) -> int:
        """Bytes that have been handed out, each piece aligned."""
        return sum(one.used for one in self._regions)

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered with the driver, in whole pages."""
        return 0 if self.why_pageable else sum(_in_pages(one.used) for one in self._regions)

    def widen(self, n_bytes: int) -> None:
        """Have room for so many more bytes: what wasn't known when the arena was made."""
        if self._regions[-1].used + n_bytes > self._regions[-1].size:
            self._regions.append(_Region(n_bytes, self.node))

    def take(self, n_bytes: int) -> torch.Tensor:
        """The next piece. Raises PlacementError when the room is used up."""
        last = self._regions[-1]
        if last.used + n_bytes > last.size:
            room = sum(one.size for one in self._regions)
            raise PlacementError(
                f"{binary_bytes(self.used + n_bytes)} of host memory are needed, "
                f"{binary_bytes(room)} were planned",
                "the model has changed since it was planned: plan again",
            )
        self.asked += n_bytes
        return last.take(n_bytes)

    def pin(self, finish: Callable[[], object]) -> None:
        """Register what has been handed out. Where the driver refuses, all of the memory stays pageable.

        `finish` waits for the device: a model may be dropped while it copies ahead.
        """
        for one in self._regions:
            if not one.used:
                continue
            self.why_pageable = one.register(finish)
            if self.why_pageable:
                self._unregister()
                return

    def _unregister(self) -> None:
        for one in self._regions:
            one.unregister()

    def release(self) -> None:
        """Unregister. The memory lasts as long as tensors that use it; calling it twice does no harm."""
        if not self.why_pageable:
            self._unregister()
            self.why_pageable = "it was released"


def _in_pages(n_bytes: int) -> int:
    """So many bytes in whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class DeviceArena:
    """One allocation on the device, handed out piece by piece, each aligned as the caching allocator's."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        try:
            self._bytes = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise PlacementError(
                f"{binary_bytes(n_bytes)} on {device} were refused: {first_line(error)}",
                "plan again with a smaller vram",
            ) from error
        self.used = 0

    @property
    def whole(self) -> torch.Tensor:
        """All of it."""
        return self._bytes

    @property
    def taken(self) -> int:
        """Bytes of the allocation."""
        return int(self._bytes.numel())

    def take(self, n_bytes: int) -> torch.Tensor:
        """The next piece."""
        begin = self.used
        self.used += aligned(n_bytes)
        return self._bytes[begin : begin + n_bytes]


@contextmanager
def _on_node(node: int | Unknown) -> Iterator[None]:
    """The calling thread runs on the node's processors meanwhile, where that is possible."""
    before = os.sched_getaffinity(0)
    mine = {
        cpu for one in numa.nodes(Path("/")) if one.node == node for cpu in numa.cpus_of(one.cpus)
    } & before
    if not mine or mine == before:
        yield
        return
    os.sched_setaffinity(0, mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def node_of_gpu(device: torch.device) -> int | Unknown:
    """The NUMA node that the GPU is attached to, by sysfs."""
    if device.type != "cuda":
        return Unknown("no GPU")
    facts = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_bus_id"):
        return Unknown("this torch doesn't say where on the bus the GPU is")
    pci_id = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return numa.gpu_node(Path("/"), pci_id, numa.nodes(Path("/")))


PACKED: Final = ("packed", "streamed_packed")


@dataclass(frozen=True)
class Storing:
    """What a plan says of how blocks are stored, besides their tiers."""

    fast: bool  # few rows are multiplied with packed weights
    dense: Collection[str] = ()  # names of blocks that are packed with 3-bit codes
    kept: Collection[str] = ()  # and of those that are converted for each call
    tables: Collection[str] = ()  # and of those that stay packed

    @staticmethod
    def of(plan: Plan) -> "Storing":
        """What this plan says."""
        return Storing(
            plan.objective == "fast",
            {block.name for block in plan.blocks if block.dense},
            {block.name for block in plan.blocks if block.kept},
            {block.name for block in plan.blocks if block.table},
        )

    def is_compared(self, block: Block) -> bool:
        """Whether products with the whole table are needed, which are read in place, to compare with."""
        return block.name in self.tables and not self.fast and is_multiplied(block.entries[0])


@dataclass(eq=False)
class Settled:
    """One block on its way."""

    block: Block
    tier: Tier
    stored: Stored
    packed: tuple[PackedValues | None, ...] = ()  # of each entry
    wire: Wire | None = None
    memory: torch.Tensor | None = None  # its bytes, wherever the tier keeps them
    original: torch.Tensor | None = None  # of a table, its bytes unpacked, in host memory


def laid(block: Block, tier: Tier, storing: Storing, source: Source, homes: Homes, *, most: int) -> Settled:
    """The block as its tier has it, packed already if it is to be. `most` is as for `arranged`."""
    if tier not in PACKED and block.name not in storing.kept:
        return Settled(block, tier, lay_out(block))
    found: list[PackedValues | None] = []
    for entry in block.entries:
        dense = block.name in storing.dense and prod(entry.shape) >= DENSE_FROM
        values = source.packed(entry, dense=dense) if tier in PACKED else None
        found.append(values)
        if source.again:
            homes.later(entry, partial(own_values, source, entry))
        elif values is not None:  # the values are kept twice no longer than necessary
            homes.later(entry, partial(_unpacked, entry, values.outline))
    return arranged(block, tier, found, storing, most=most)


def arranged(
    block: Block, tier: Tier, found: Sequence[PackedValues | None], storing: Storing, *, most: int
) -> Settled:
    """The block as its tier has it, from what was packed of its entries; none were for an empty `found`.

    At most `most` bytes of a packed block that streams are copied at once; 0: it is copied as a whole.
    Tensors that are converted for each call have a form as well, where they aren't packed.
    """
    most = most if tier == "streamed_packed" else 0
    forms: list[PackedForm | None] = []
    cuts: list[Cuts] = []
    found = tuple(found or [None] * len(block.entries))
    for entry, values in zip(block.entries, found, strict=True):
        packed = values.outline if values else None
        forms.append(form(packed) if packed else _as_given(block, entry, storing))
        cuts.append(_cuts(entry, packed, most) if most and (packed or forms[-1] is None) else ())
    return Settled(block, tier, _stored(block, forms, cuts, storing, most=most), found)


def _as_given(block: Block, entry: Entry, storing: Storing) -> PackedForm | None:
    """The form of a tensor that is kept with the bits that the model has."""
    if not entry.converts or block.name not in storing.kept:
        return None
    return as_it_is(tuple(entry.shape[d] for d in memory_order(entry)))


def _stored(
    block: Block, forms: Sequence[PackedForm | None], cuts: Sequence[Cuts], storing: Storing, *, most: int
) -> Stored:
    """Where each tensor is in the block's bytes: in pieces, if they take no more than the unpacked block."""
    stored = lay_out(block, forms)
    cut = replace(lay_out(block, forms, cuts), most=most)
    several = stored.is_unpacked or len(cut.pieces) > 1
    if most and several and cut.n_bytes <= raw_bytes(block):  # else calls read it from its slot
        stored = cut
    if block.name in storing.tables and forms[0] is not None:
        stored = replace(stored, table=True, room=room_of(block.entries[0]))
    return stored


def _cuts(entry: Entry, packed: Packed | None, most: int) -> Cuts:
    """The parts of an entry that is larger than a slot."""
    if packed is not None:
        return [(first, form(part)) for first, part in packed.cut(most)]
    step = max(most // entry.dtype.itemsize // ALIGNMENT, 1) * ALIGNMENT
    return [(first, None) for first in range(0, prod(entry.shape), step)]


def _unpacked(entry: Entry, packed: Packed) -> torch.Tensor:
    flat = torch.empty(entry.given_bytes, dtype=torch.uint8, device=packed.device)
    unpack(packed, flat.view(entry.given).view(packed.shape))
    return raw_view(entry, flat, entry.given)
