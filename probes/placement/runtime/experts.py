"""Experts of a placed model, one by one in VRAM or in host memory: what their modules hold in place of
weights.

A module's own forward runs unchanged, and so do the library's products. Where it takes some experts of a
fused tensor (by an index, or by a product of groups), exactly these are brought into memory of their own,
from wherever the cache's table says that each one is: by a kernel that waits for no router, or by torch
operations, which do. So outputs have the bits of the implementation that the module uses; of transformers'
these are `batched_mm`, `grouped_mm` and `eager`. A listed expert's weights are brought when they are read.
Whatever else reads a fused tensor gets all of it, slowly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from probes.placement.models.experts import count_experts
from probes.placement.models.modules import Block, Entry
from probes.placement.packing import launch
from probes.placement.packing.format import PACKED_PARTS, aligned, grid, rows_of_expert
from probes.placement.packing.packed import B12, Packed
from probes.placement.runtime.buffers import StoredBlock, StoredEntry, memory_order, raw_view, room_for
from probes.placement.runtime.expert_cache import Expert, ExpertCache, ExpertSlice, fixed_bytes
from probes.placement.runtime.offloaded import (
    OffloadedParameter,
    PackedOperations,
    PackedParameter,
    ParameterPlace,
    WeightAccess,
)
from probes.placement.runtime.origins import ParameterOrigins
from probes.placement.runtime.streams import Streams

_NONE: Final = -(1 << 40)  # instead of an expert: nothing is read
_ATEN: Final[Any] = torch.ops.aten
_MATRICES_TURNED: Final[Any] = getattr(_ATEN.mT, "default", None)
_GROUPED: Final[Any] = getattr(getattr(_ATEN, "_grouped_mm", None), "default", None)


# What can be placed by experts


def why_not_experts(block: Block) -> str:
    """Why a block's weights can't be placed expert by expert; empty where they can."""
    if len(block.modules) != 1 or not count_experts(block.modules[0]):
        return "it doesn't consist of experts"
    for entry in block.entries:
        if len(entry.owners) != 1:
            return f"several modules hold {entry.name}"
        if entry.converts or memory_order(entry) != tuple(range(len(entry.shape))):
            return f"{entry.name} is converted for each call, or stored transposed"
    return ""


def is_packed_by_expert(block: Block, entry: Entry) -> bool:
    """Whether a packed tensor can be cut into those of single experts, which kernels find by a table."""
    if entry.given is not torch.bfloat16:
        return False
    if any(entry.parameter is own for own in block.modules[0]._parameters.values()):
        return rows_of_expert(entry.shape, entry.shape[0]) > 0
    return True


# One module's experts


@dataclass(frozen=True, eq=False)
class ExpertTensor:
    """A parameter: of all experts (`only` is None), or of one. Its slices begin at the table's `column`."""

    item: StoredEntry
    column: int
    only: int | None
    counts: bool  # reading it counts as choosing the expert

    @property
    def entry(self) -> Entry:
        """The parameter."""
        return self.item.entry

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one expert's."""
        return self.entry.shape if self.only is not None else self.entry.shape[1:]


@dataclass(eq=False)
class ExpertGroup:
    """The experts of one module. `first` is the index of its first one among all of the model."""

    stored: StoredBlock
    memory: torch.Tensor  # its bytes in host memory
    seen: torch.Tensor  # the same, as kernels of the device read them
    first: int
    tensors: tuple[ExpertTensor, ...]
    experts: tuple[Expert, ...]
    places: list[ParameterPlace] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The module that holds them."""
        return self.stored.block.modules[0]

    @property
    def fused(self) -> bool:
        """Whether tensors hold all experts."""
        return self.tensors[0].only is None


def make_group(stored: StoredBlock, memory: torch.Tensor, seen: torch.Tensor, first: int) -> ExpertGroup:
    """The group of a block that is stored in `memory`."""
    module, count = stored.block.modules[0], _count(stored)
    owner_of = {
        id(inner): index for index, expert in enumerate(module.children()) for inner in expert.modules()
    }
    tensors: list[ExpertTensor] = []
    slices: list[list[ExpertSlice]] = [[] for _ in range(count)]
    for item in stored.items:
        only = owner_of.get(id(item.entry.owners[0][0]))
        into = slices if only is None else [slices[only]]
        tensors.append(ExpertTensor(item, len(into[0]), only, counts=not into[0]))
        for pieces, spans in zip(into, _spans(item, memory, len(into)), strict=True):
            for host, n_bytes in spans:
                at = aligned(pieces[-1].place + pieces[-1].n_bytes) if pieces else 0
                pieces.append(ExpertSlice(host, n_bytes, at))
    experts = tuple(Expert(memory, seen, tuple(pieces)) for pieces in slices)
    return ExpertGroup(stored, memory, seen, first, tuple(tensors), experts)


def table_bytes(stored: Sequence[StoredBlock]) -> int:
    """Bytes of the table for these blocks of experts, and of what belongs to it."""
    count = columns = 0
    for block in stored:
        own = sum(1 if item.form is None else len(PACKED_PARTS) for item in block.items)
        count, columns = count + _count(block), max(columns, own)
    return aligned(fixed_bytes(count, columns))


def _count(stored: StoredBlock) -> int:
    """How many experts a block has; a list's by its modules, whose parameters may be empty by now."""
    module = stored.block.modules[0]
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return len(list(module.children())) if listed else stored.block.entries[0].shape[0]


def _spans(item: StoredEntry, memory: torch.Tensor, count: int) -> Iterator[list[tuple[int, int]]]:
    """For each of `count` experts, where in its block's memory the slices of one tensor are, in bytes."""
    if item.form is None:
        each = item.n_bytes // count
        yield from ([(item.offset + n * each, each)] for n in range(count))
        return
    packed = item.packed(memory)
    begins = dict(zip((part.name for part in item.form.parts), item.form.offsets(), strict=True))
    width, group = packed.grid.width, packed.grid.group_rows
    rows = packed.grid.rows // count
    starts = packed.parts["starts"].tolist()
    for n in range(count):
        top, bottom = n * rows // group, -(-(n + 1) * rows // group)
        low, high = starts[top] - starts[0], starts[bottom] - starts[0]
        numbers = {
            "rest0": (n * rows * width, rows * width),
            "codes": (n * rows * width // 2, rows * width // 2),
            "values": (2 * low, 2 * (high - low)),
            "positions": (2 * low, 2 * (high - low)),
            "starts": (4 * top, 4 * (bottom - top + 1)),
        }
        yield [
            (item.offset + begins[name] + begin, n_bytes)
            for name in PACKED_PARTS
            for begin, n_bytes in (numbers[name],)
        ]


# All experts of a model


class PlacedExperts:
    """The experts of one placed model, with their cache. `update` is called between passes."""

    def __init__(
        self, groups: Sequence[ExpertGroup], room: torch.Tensor, streams: Streams, work: PackedOperations
    ) -> None:
        self.groups, self._streams, self._work = tuple(groups), streams, work
        self.cache = ExpertCache([expert for group in groups for expert in group.experts], room, streams)
        device = streams.device
        self.by_kernel = launch.usable(device) and all(
            group.seen.device.type == device.type for group in groups
        )

    def install(self, origins: ParameterOrigins) -> None:
        """Let modules hold what finds the experts; `give_back` undoes it, also where this was interrupted."""
        for group in self.groups:
            for tensor in group.tensors:
                self._install(group, tensor, origins)

    def give_back(self, origins: ParameterOrigins) -> None:
        """Put the model's own parameters back, and release the cache."""
        for group in self.groups:
            for place in group.places:
                place.give_back(origins.parameter(place.entry))
            group.places.clear()
        self.cache.forget()
        self.groups = ()

    # What modules hold

    def _install(self, group: ExpertGroup, tensor: ExpertTensor, origins: ParameterOrigins) -> None:
        entry = tensor.entry
        (owner, key) = entry.owners[0]
        fetch = partial(self._whole, group, tensor)
        access = WeightAccess(
            entry.name,
            outline=room_for(entry, "meta"),
            device=self._streams.device,
            fetch=fetch,
            fetch_to_host=partial(tensor.item.unpacked, tensor.item.bytes(group.memory), self._work.unpack),
            wants=partial(origins.wanted, entry),
            attributes=vars(entry.parameter),
        )
        if tensor.only is None:
            gather = partial(self.gather, group, tensor)
            made: OffloadedParameter = ExpertsParameter.of(
                ExpertsAccess(**vars(access), gather=gather, count=entry.shape[0])
            )
        else:
            made = PackedParameter.of(replace(access, product=partial(_linear, fetch)))
        group.places.append(ParameterPlace(owner._parameters, key, entry, made, made))  # before it is there
        owner._parameters[key] = made

    def _whole(self, group: ExpertGroup, tensor: ExpertTensor) -> torch.Tensor:
        """All values of a parameter on the device."""
        if tensor.only is None:
            ids = torch.arange(tensor.entry.shape[0], device=self._streams.device)
            return self.gather(group, tensor, ids, counted=False)
        if tensor.counts:
            self.cache.count_call(group.first + tensor.only)
        if tensor.item.form is None:
            source = self._slices(group, tensor, tensor.only)[0]
            there = source.to(self._streams.device, non_blocking=True)
            return raw_view(tensor.entry, there)
        values = torch.empty(tensor.shape, dtype=tensor.entry.dtype, device=self._streams.device)
        self._read(group, tensor, tensor.only, values)
        return values

    def gather(
        self, group: ExpertGroup, tensor: ExpertTensor, ids: torch.Tensor, *, counted: bool = True
    ) -> torch.Tensor:
        """The weights of the experts `ids` (flat, whole numbers on the device), of shape (ids, *shape).

        Ids below zero count from the end, and of _NONE nothing is read. Raises IndexError for one that there
        is no expert for, where torch operations gather; kernels write NaN.
        """
        out = torch.empty((ids.numel(), *tensor.shape), dtype=tensor.entry.dtype, device=self._streams.device)
        counts = self.cache.counts[group.first :][: len(group.experts)] if counted and tensor.counts else None
        if not out.numel():
            return out
        if self.by_kernel:
            table = self.cache.table[group.first :][: len(group.experts), tensor.column :]
            if tensor.item.form is None:
                launch.gather_experts(table, ids, out, counts)
            else:
                base, rows = tensor.item.form.base, rows_of_expert(tensor.entry.shape, len(group.experts))
                launch.unpack_experts(table, ids, out, counts, rows=rows, base=base)
            return out
        number = len(group.experts)
        there = []
        for slot, expert in enumerate(ids.tolist()):  # waits for the router
            if expert == _NONE:
                continue
            if not -number <= expert < number:
                raise IndexError(f"index {expert} is out of bounds: {tensor.entry.name} has {number} experts")
            there.append(expert % number)
            self._read(group, tensor, there[-1], out[slot])
        if counts is not None:
            chosen = torch.tensor(there, dtype=torch.int64, device=counts.device)
            counts.index_add_(0, chosen, torch.ones_like(chosen))
        return out

    def _read(self, group: ExpertGroup, tensor: ExpertTensor, expert: int, out: torch.Tensor) -> None:
        """One expert's weights by torch operations."""
        parts = self._slices(group, tensor, expert)
        if tensor.item.form is None:
            out.view(-1).view(torch.uint8).copy_(parts[0], non_blocking=True)
            return
        self._work.unpack(_packed_expert(tensor, parts, out.device), out.view(_packed_shape(tensor)))

    def _slices(self, group: ExpertGroup, tensor: ExpertTensor, expert: int) -> list[torch.Tensor]:
        """The bytes of one expert's tensor where they are now."""
        number = 1 if tensor.item.form is None else len(PACKED_PARTS)
        columns = range(tensor.column, tensor.column + number)
        parts = [self.cache.bytes_of(group.first + expert, column) for column in columns]
        if self._work.reads is not None:
            self._work.reads(tensor.entry.name, parts)
            parts = [self.cache.bytes_of(group.first + expert, column) for column in columns]
        return parts


def _linear(fetch: Callable[[], torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, fetch(), bias)


def _packed_shape(tensor: ExpertTensor) -> tuple[int, int]:
    shape = tensor.entry.shape
    rows = rows_of_expert(shape, shape[0]) if tensor.only is None else grid(shape).rows
    return rows, grid(shape).width


def _packed_expert(tensor: ExpertTensor, parts: Sequence[torch.Tensor], device: torch.device) -> Packed:
    """One expert's packed tensor, of these bytes."""
    form = tensor.item.form
    assert form is not None
    kinds = {part.name: getattr(torch, part.dtype) for part in form.parts}
    typed = {
        name: part.to(device, non_blocking=True).view(kinds[name])
        for name, part in zip(PACKED_PARTS, parts, strict=True)
    }
    return Packed(B12, _packed_shape(tensor), typed, base=form.base)


# The parameter that holds all experts


@dataclass(frozen=True)
class ExpertsAccess(WeightAccess):
    """How a fused parameter gets some of its `count` experts. `turned`: with its matrices transposed."""

    gather: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    count: int = 0
    turned: bool = False

    def some(self, ids: torch.Tensor) -> torch.Tensor:
        """Those of a tensor of ids of any shape, as indexing gives them."""
        with torch.inference_mode(False), torch.no_grad():
            flat = ids.reshape(-1).to(self.device, torch.int64)
            gathered = self.gather(flat)
            shaped = gathered.view(*ids.shape, *gathered.shape[1:])
        return shaped.transpose(-2, -1) if self.turned else shaped

    def one(self, index: int) -> torch.Tensor:
        """That of one id. Raises IndexError where there is none."""
        if not -self.count <= index < self.count:
            raise IndexError(f"index {index} is out of bounds: {self.label} has {self.count} experts")
        return self.some(torch.full((1,), index, dtype=torch.int64, device=self.device))[0]

    def turn(self) -> "ExpertsAccess":
        """The same with its matrices transposed, without reading them."""
        fetch, fetch_to_host = self.fetch, self.fetch_to_host
        return replace(
            self,
            outline=self.outline.transpose(-2, -1),
            fetch=lambda: fetch().transpose(-2, -1),
            fetch_to_host=lambda: fetch_to_host().transpose(-2, -1),
            turned=not self.turned,
        )

    def grouped(self, x: torch.Tensor, ends: torch.Tensor, **options: Any) -> torch.Tensor:
        """The product of groups of rows of `x`, of which that of expert n ends at row `ends[n]`.

        Only experts with rows are read, and stand one behind the other for the library's product. Nothing
        waits for the device.
        """
        rows = ends.diff(prepend=torch.zeros_like(ends[:1]))
        present = rows > 0
        number = max(1, min(self.count, x.shape[0]))
        order = torch.argsort((~present).to(torch.int8), stable=True)[:number]
        there = present[order]
        with torch.inference_mode(False), torch.no_grad():
            weights = self.gather(torch.where(there, order, _NONE))
        weights = weights.transpose(-2, -1) if self.turned else weights
        return _GROUPED(x, weights, torch.where(there, ends[order], ends[-1]), **options)


class ExpertsParameter(OffloadedParameter):
    """A parameter whose first dimension counts experts, of which operations take some."""

    __slots__ = ()
    access: ExpertsAccess

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read only the experts that an operation takes, if it takes some; else as for any weight
        elsewhere.
        """
        if args and isinstance(args[0], ExpertsParameter):
            result = _of_some(func, args[0].access, args)
            if result is not None:
                return result
        if func is _GROUPED and len(args) > 1 and isinstance(args[1], ExpertsParameter):
            options = dict(kwargs or {})
            ends = args[2] if len(args) > 2 else options.pop("offs", None)
            if ends is not None and not isinstance(args[0], OffloadedParameter) and args[0].dim() == 2:
                names = ("bias", "out_dtype")
                return args[1].access.grouped(
                    args[0], ends, **dict(zip(names, args[3:], strict=False)), **options
                )
        return super().__torch_dispatch__(func, types, args, kwargs)


def _of_some(func: Any, access: ExpertsAccess, args: tuple[Any, ...]) -> torch.Tensor | None:
    """What an operation gives of a parameter of which it takes some experts; None for any other."""
    if func is _ATEN.select.int and args[1] % access.outline.dim() == 0:
        return access.one(args[2])
    if func is _ATEN.index_select.default and args[1] % access.outline.dim() == 0:
        return access.some(args[2])
    if func is _ATEN.index.Tensor:
        first, *others = args[1]
        whole_numbers = first is not None and first.dtype in (torch.int64, torch.int32)
        return access.some(first) if whole_numbers and not any(o is not None for o in others) else None
    if func is _MATRICES_TURNED:
        return ExpertsParameter.of(access.turn())
    if func is _ATEN.transpose.int:
        dims = access.outline.dim()
        turned = dims > 2 and {args[1] % dims, args[2] % dims} == {dims - 2, dims - 1}
        return ExpertsParameter.of(access.turn()) if turned else None
    return None
