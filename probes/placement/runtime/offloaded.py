"""What the modules of an offloaded block hold in place of weights, and what the engine puts there for a call.

A placed module's own forward finds its weights in place, because they are brought before its call. Whatever
else reads a weight (another module's forward, a scripted function, a debugger) meets an `OffloadedParameter`:
it knows its shape, dtype and device, and fetches values when they are read. So that reader gets the right
values, slowly. It has no memory, so what asks for an address gets an error and never other numbers.

To code that only asks, it looks like any parameter that wants no gradients. torch's encoders, for example,
choose another way where a weight has a `__torch_function__`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import aligned, is_matrix
from probes.placement.packing.packed import Packed
from probes.placement.packing.products import linear
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.buffers import (
    DeviceBuffer,
    StoredBlock,
    StoredEntry,
    StoredPiece,
    lay_out,
    memory_order,
)
from probes.placement.runtime.weight_sources import WeightSource

Fetch = Callable[[], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
Lookup = Callable[[torch.Tensor], torch.Tensor]
_HOST: Final = torch.device("cpu")
_REMOVE: Final = "call remove() of the handle first"

# torch before 2.3 gives address 0 instead of an error
_HAVE_NO_ADDRESS: Final[Callable[[torch.Tensor], object]] = getattr(
    torch._C, "_set_throw_on_mutable_data_ptr", id
)
# by tensors; older torch doesn't say
_STORAGE_USES: Final[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


@dataclass(frozen=True)
class WeightAccess:
    """How an offloaded parameter gets its values.

    `outline` has its shape, strides and dtype, on meta. `fetch` gives its values on `device`, `fetch_to_host`
    in host memory. `product(input, bias)` may compute a linear layer without them, or return None.
    `lookup(ids)` gives some rows. `wants` notes whether gradients are wanted. `attributes`: those of the
    model's own parameter, such as libraries give it.
    """

    label: str
    outline: torch.Tensor
    device: torch.device
    fetch: Fetch
    fetch_to_host: Fetch
    wants: Callable[[bool], None]
    attributes: dict[str, Any]
    product: Product | None = None
    lookup: Lookup | None = None

    def values(self) -> torch.Tensor:
        """Fetch an ordinary tensor, as the parameter is one: an inference tensor's views would not fit it."""
        with torch.inference_mode(False), torch.no_grad():
            return self.fetch()


class OffloadedParameter(torch.Tensor):  # type: ignore[misc]  # torch isn't there when types are checked
    """A parameter without values and without memory."""

    __slots__ = ("access",)
    __torch_function__ = torch._C._disabled_torch_function_impl
    _is_param = True  # so it is an instance of nn.Parameter

    access: WeightAccess

    @classmethod
    def of(cls, access: WeightAccess) -> "OffloadedParameter":
        """A tensor of this class whose values are elsewhere."""
        with torch.inference_mode(False):
            parameter: OffloadedParameter = torch.Tensor._make_wrapper_subclass(
                cls,
                access.outline.shape,
                strides=access.outline.stride(),
                dtype=access.outline.dtype,
                device=access.device,
                requires_grad=False,
            )
        _HAVE_NO_ADDRESS(parameter)
        parameter.access = access
        parameter.__dict__ = access.attributes  # type: ignore[misc]  # a tensor has both this and slots
        return parameter

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation, also those of scripts and transforms: on fetched values."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:  # `.data`, too
            return DetachedParameter.of(args[0].access)
        for parameter in _changed(func, args, kwargs):
            parameter.refuse_change(func.overloadpacket.__name__)
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == _HOST:
            return func(args[0].access.fetch_to_host(), **kwargs)  # several of them may not fit in VRAM
        return func(*_values(args), **_values(kwargs))

    def refuse_change(self, by: str) -> NoReturn:
        """Refuse what would be lost."""
        raise PlacementError(
            f"{self.access.label} can't be changed (by {by}): the weights of a placed model are only read",
            _REMOVE,
        )

    def _refuse_address(self, *_args: Any, **_options: Any) -> NoReturn:
        raise PlacementError(f"{self.access.label} has no address: its values are elsewhere", _REMOVE)

    data_ptr = share_memory_ = _refuse_address
    __dlpack__ = _refuse_address

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; it can't be set."""
        return self.detach()

    @data.setter
    def data(self, _values: torch.Tensor) -> None:
        self.refuse_change("data")

    @property
    def grad(self) -> None:
        """Return None: offloaded weights have no gradients."""
        return

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.refuse_change("grad")

    @property
    def requires_grad(self) -> bool:
        """Placed weights want none, whatever is asked: what is asked counts after `remove()`."""
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> "OffloadedParameter":
        """Note it for `remove()`: no weight changes by it."""
        self.access.wants(bool(requires_grad))
        return self

    def __setitem__(self, _where: Any, _values: Any) -> NoReturn:
        """Refused: else a copy would be changed."""
        self.refuse_change("[...] =")

    def backward(self, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse: offloaded weights don't change. Raises PlacementError."""
        self.refuse_change("backward")

    def numpy(self, *, force: bool = False) -> Any:
        """The values, which torch refuses to give of its subclasses."""
        return self.access.values().numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists, which torch refuses to give of its subclasses."""
        return self.access.values().tolist()

    def __repr__(self, **_: Any) -> str:
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"OffloadedParameter({self.access.label}, {facts})"

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy()


class DetachedParameter(OffloadedParameter):
    """What `detach()` and `.data` give of an offloaded parameter."""

    __slots__ = ()
    _is_param = False

    def requires_grad_(self, requires_grad: bool = True) -> OffloadedParameter:
        """Refused: gradients of it would be those of a tensor of its own."""
        if requires_grad:
            self.refuse_change("requires_grad_")
        return self


class PackedParameter(OffloadedParameter):
    """An offloaded parameter with products or rows that need no unpacked values."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute linear layers and lookups from packed weights; everything else is as for any tensor."""
        kwargs = kwargs or {}
        result = None
        if func is F.linear:
            result = _linear(*args, **kwargs)
        elif func is F.embedding:
            result = _embedding(*args, **kwargs)
        if result is not None:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def refuse_copy() -> NoReturn:
    """Refuse what would share buffers with the placed model."""
    raise PlacementError("a placed model can't be copied or pickled", _REMOVE)


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[OffloadedParameter]:
    """The offloaded parameters that an operation would write to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (value for value in _several(given) if isinstance(value, OffloadedParameter))


def _several(given: Any) -> Any:
    return given if isinstance(given, list | tuple) else (given,)


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if (
        isinstance(input, OffloadedParameter)
        or not isinstance(weight, PackedParameter)
        or weight.access.product is None
    ):
        return None
    return weight.access.product(input, _values(bias))


def _embedding(
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *more: Any,
    **options: Any,
) -> torch.Tensor | None:
    """Rows alone; of the whole table where a largest norm is applied to it first."""
    if not isinstance(weight, PackedParameter) or weight.access.lookup is None:
        return None
    if max_norm is None:
        return weight.access.lookup(input)
    return F.embedding(_values(input), weight.access.values(), padding_idx, max_norm, *more, **options)


def _values(thing: Any) -> Any:
    if isinstance(thing, OffloadedParameter):
        return thing.access.values()
    if isinstance(thing, tuple | list):
        return type(thing)(map(_values, thing))
    if isinstance(thing, dict):
        return {key: _values(value) for key, value in thing.items()}
    return thing


@dataclass(frozen=True)
class PackedOperations:
    """The operations on packed tensors. Tests replace them, and watch with `reads` what is about to be read.

    `multiplies`: whether `linear` can do anything with a packed tensor of this shape.
    """

    reads: Callable[[str, Sequence[torch.Tensor]], None] | None = None

    unpack: Callable[[Packed, torch.Tensor], Any] = unpack
    linear: Callable[[torch.Tensor, Packed, torch.Tensor | None], torch.Tensor | None] = linear
    multiplies: Callable[[tuple[int, ...]], bool] = is_matrix


@dataclass(frozen=True)
class ParameterPlace:
    """Where a module keeps a parameter, and what is there during a call and otherwise."""

    holder: Any  # the module's `_parameters`, or a list in which a recurrent module keeps them once more
    key: str | int
    entry: Entry
    present: nn.Parameter
    absent: nn.Parameter
    address: int = 0  # of the values that are present

    def require_absent(self) -> None:
        """Raise PlacementError where something else has been put there."""
        if not self._has(self.absent):
            raise PlacementError(
                f"{self.entry.name} was exchanged after the model had been placed",
                "call remove() of the handle, change the model, and place it again",
            )

    def give_back(self, parameter: nn.Parameter) -> None:
        """Put the model's own parameter there, unless something else has been put there meanwhile."""
        if self._has(self.absent) or self._has(self.present):
            self.holder[self.key] = parameter

    def written(self) -> torch.Tensor | None:
        """What a forward has given the parameter instead of its values, by `.data =`."""
        if isinstance(self.present, OffloadedParameter) or self.present.data_ptr() == self.address:
            return None
        return self.present.data

    def _has(self, parameter: nn.Parameter) -> bool:
        try:
            return self.holder[self.key] is parameter
        except (KeyError, IndexError):
            return False


class ParameterSwap:
    """Puts a block's parameters where its modules keep them, and takes them away again: all, or none."""

    def __init__(
        self, places: Sequence[ParameterPlace], values: Sequence[nn.Parameter] | None = None
    ) -> None:
        self.places = tuple(places)
        present = values or [place.present for place in places]
        # each call of a block pays for what is done here: plain tuples
        self._all = tuple(
            (place.holder, place.key, place.absent, there)
            for place, there in zip(places, present, strict=True)
        )

    def bring(self) -> None:
        """Before a call. Raises PlacementError where a parameter was exchanged after the model was placed."""
        # in one loop: since the last call, its objects have left the processor's caches
        try:
            for holder, key, absent, present in self._all:
                if holder[key] is not absent:
                    break
                holder[key] = present
            else:
                return
        except (KeyError, IndexError):
            pass
        self.clear()
        for place in self.places:
            place.require_absent()

    @property
    def present(self) -> list[nn.Parameter]:
        """Its parameters that are there during a call."""
        return [present for _, _, _, present in self._all]

    def clear(self) -> None:
        """After a call. What has been put there meanwhile stays: the next call complains."""
        for holder, key, absent, present in self._all:
            try:
                if holder[key] is present:
                    holder[key] = absent
            except (KeyError, IndexError):
                continue


@dataclass(eq=False)
class Piece:
    """All of a block, or the part of it that is copied to one staging buffer and unpacked at once."""

    owner: "MovingBlock"
    index: int  # among all pieces
    weight_source: WeightSource
    staging_buffer: DeviceBuffer | None
    target: torch.Tensor | None  # its bytes of the staging buffer
    unpack: Callable[[], Any] = int  # into its block's decode buffer
    written: torch.Tensor | None = None  # its bytes there
    unpackings: int = 0

    @property
    def depth(self) -> int:
        """Calls of its block under way."""
        return self.owner.depth


@dataclass(eq=False)
class MovingBlock:
    """A block that comes and goes, or is unpacked for each call.

    One without staging buffers has its `weight_source` in VRAM.
    """

    index: int
    stored: StoredBlock
    weight_source: WeightSource
    decode_buffer: DeviceBuffer | None  # None: nothing is packed, or all products use packed weights
    pieces: tuple[Piece, ...] = ()
    unpacked: ParameterSwap = field(default_factory=lambda: ParameterSwap(()))
    products: ParameterSwap | None = None  # for calls that multiply with packed weights, where possible
    inside: ParameterSwap | None = None  # what its modules have during its present call
    depth: int = 0  # calls of it under way
    fused: bool = False  # its present call multiplies with packed weights
    apart: bool = False  # its present call has weights in memory of their own
    trainable: bool = False
    spans: tuple[tuple[int, int], ...] = ()  # the addresses of its staging buffers and decode buffer
    checks: int = 2  # of its next calls: whether they keep weights
    references: tuple[int, int] = (0, 0)  # before its present call
    uses: Callable[[], int] = int  # of its buffers' memory, and all that lies there with them, by tensors
    staying: tuple[ParameterPlace, ...] = ()  # what is unpacked in VRAM: it is there between calls, too
    through: tuple[tuple[Piece, DeviceBuffer], ...] = ()  # its pieces that have staging buffers, with them

    @property
    def name(self) -> str:
        """The block's name."""
        return self.stored.block.name

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a part of its staging buffers or decode buffer."""
        try:
            address = tensor.data_ptr()
        except (RuntimeError, PlacementError):  # sparse, or wrapped by a transformation; an offloaded weight
            return False
        for begin, end in self.spans:  # noqa: SIM110  # a generator costs each call of a block as much again
            if begin <= address < end:
                return True
        return False

    def put_away(self) -> None:
        """Take its parameters away, as far as an interrupted call has brought them."""
        for swap in (self.unpacked, self.products, self.inside):
            if swap is not None:
                swap.clear()
        self.apart = False

    def forget(self) -> None:
        """Refer to no buffers and parameters any more: the model has been given back."""
        self.decode_buffer = self.products = self.inside = None
        self.uses = int
        self.unpacked, self.pieces, self.staying, self.through = ParameterSwap(()), (), (), ()

    @property
    def places(self) -> tuple[ParameterPlace, ...]:
        """Return the modules' attributes that hold the block's weights."""
        return *self.unpacked.places, *self.staying

    @property
    def staging(self) -> list[DeviceBuffer]:
        """What its pieces are copied to."""
        return [staging_buffer for _, staging_buffer in self.through]

    def used(self) -> DeviceBuffer | None:
        """The buffer that a call reads its weights from: a staging buffer only where there is one piece."""
        return (
            self.pieces[0].staging_buffer if self.fused or self.decode_buffer is None else self.decode_buffer
        )


@dataclass(eq=False)
class CpuBlock:
    """A block that computes on the CPU. Outside its calls its weights are offloaded ones of the device."""

    block: Block
    trainable: bool
    swap: ParameterSwap = field(default_factory=lambda: ParameterSwap(()))
    depth: int = 0  # calls of it under way

    @property
    def places(self) -> tuple[ParameterPlace, ...]:
        """Return the modules' attributes that hold the block's weights."""
        return self.swap.places

    def install(self, offloaded: dict[int, OffloadedParameter]) -> None:
        """Put offloaded parameters, by the identity of their entries, where the modules keep weights."""
        places = []
        for entry in self.block.entries:
            owner, name = entry.owners[0]
            present, absent = owner._parameters[name], offloaded[id(entry)]
            places += [ParameterPlace(holder, key, entry, present, absent) for holder, key in entry.holders()]
        self.swap = ParameterSwap(places)
        for place in places:
            place.holder[place.key] = place.absent


def prepare_block(
    block: MovingBlock,
    staging: Sequence[DeviceBuffer],
    first_index: int,
    work: PackedOperations,
    *,
    fast: bool,
    offloaded: dict[int, OffloadedParameter],
) -> None:
    """Make a block's pieces and parameters, and the steps that unpack it.

    `staging` has a buffer for each piece, and is empty for a block in VRAM. `first_index` is that of its
    first piece. `offloaded`: parameters by the identity of their entries.
    """
    unpacked = {id(item.entry): item for item in lay_out(block.stored.block).items}
    cut, through = block.stored.pieces, staging or (None,)
    block.pieces = tuple(
        _piece(block, span, staging_buffer, index, unpacked=unpacked, unpack=work.unpack)
        for index, (span, staging_buffer) in enumerate(zip(cut, through, strict=True), start=first_index)
    )
    block.through = tuple((piece, piece.staging_buffer) for piece in block.pieces if piece.staging_buffer)
    memories = [buffer.memory for buffer in (*block.staging, block.decode_buffer) if buffer]
    block.uses = partial(_STORAGE_USES, memories[0].untyped_storage()._cdata) if memories else int
    block.spans = tuple((memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in memories)
    source = staging[0].memory if staging else block.weight_source.whole()
    present: list[nn.Parameter] = []
    for item in block.stored.items:
        if item.form is not None and block.decode_buffer is None:
            present.append(offloaded[id(item.entry)])  # unpacked for each operation that reads it
            continue
        if block.decode_buffer is None or (item.form is None and not staging):
            view = item.raw(source)  # it's there already
        else:
            view = unpacked[id(item.entry)].raw(block.decode_buffer.memory)
        present.append(item.entry.like(view))
    places: list[ParameterPlace] = []
    staying: list[ParameterPlace] = []
    for item, parameter in zip(block.stored.items, present, strict=True):
        stays = item.form is None and not staging
        for holder, key in item.entry.holders():
            address = 0 if isinstance(parameter, OffloadedParameter) else parameter.data_ptr()
            place = ParameterPlace(holder, key, item.entry, parameter, offloaded[id(item.entry)], address)
            (staying if stays else places).append(place)
            holder[key] = parameter if stays else place.absent
    block.unpacked, block.staying = ParameterSwap(places), tuple(staying)
    if fast and len(cut) == 1 and _multiplies(block, work):
        block.products = ParameterSwap(_products(block, source, work))


def _piece(
    block: MovingBlock,
    span: StoredPiece,
    staging_buffer: DeviceBuffer | None,
    index: int,
    *,
    unpacked: dict[int, StoredEntry],
    unpack: Callable[[Packed, torch.Tensor], Any],
) -> Piece:
    """A piece with the steps that unpack it; there are none where calls read it from its staging buffer."""
    n_bytes = span.end - span.begin
    whole = (span.begin, span.end) == (0, block.stored.n_bytes)
    weight_source = (
        block.weight_source if whole else WeightSource(block.weight_source.whole()[span.begin : span.end])
    )
    piece = Piece(
        block,
        index,
        weight_source,
        staging_buffer,
        staging_buffer.memory[:n_bytes] if staging_buffer else None,
    )
    if block.decode_buffer is None:
        return piece
    source = block.weight_source.whole() if piece.target is None else piece.target
    steps, edges = [], []
    for item, unit in span.units:
        if item.form is None and staging_buffer is None:
            continue  # it is there already
        there, begin = unpacked[id(item.entry)], unit.offset - span.begin
        flat = there.bytes(block.decode_buffer.memory).view(item.entry.dtype)
        steps.append(partial(unit.write, source[begin : begin + unit.n_bytes], flat, unpack))
        size = item.entry.dtype.itemsize
        last = aligned(there.n_bytes) if unit is item.units[-1] else unit.last * size
        edges += [there.offset + unit.first * size, there.offset + last]
    piece.unpack = partial(_run_all, steps)
    piece.written = block.decode_buffer.memory[min(edges, default=0) : max(edges, default=0)]
    return piece


def _run_all(steps: Sequence[Callable[[], Any]]) -> None:
    for step in steps:
        step()


def _multiplies(block: MovingBlock, work: PackedOperations) -> bool:
    """Whether every packed tensor is the weight of a linear layer, stored by wide rows, with 4-bit codes."""
    packed = [item for item in block.stored.items if item.form]
    if not all(work.multiplies(item.entry.shape) for item in packed):
        return False
    if block.stored.table or any(item.entry.converts or item.form.table for item in packed if item.form):
        return False
    return bool(packed) and all(
        type(owner) is nn.Linear and key == "weight" and memory_order(item.entry) == (0, 1)
        for item in packed
        for owner, key in item.entry.owners
    )


def _products(block: MovingBlock, source: torch.Tensor, work: PackedOperations) -> list[ParameterPlace]:
    parameters: dict[int, nn.Parameter] = {}
    absent = {id(place.entry): place.absent for place in block.unpacked.places}
    for item in block.stored.items:
        if item.form is None:
            parameters[id(item.entry)] = item.entry.like(item.raw(source))
            continue
        product = partial(_product, work, item.packed(source))
        parameters[id(item.entry)] = PackedParameter.of(
            replace(absent[id(item.entry)].access, product=product)
        )
    return [
        ParameterPlace(p.holder, p.key, p.entry, parameters[id(p.entry)], p.absent)
        for p in block.unpacked.places
    ]


def _product(
    work: PackedOperations, packed: Packed, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    return work.linear(x, packed, bias)
