"""Where a model's parameters and buffers were before it was placed, and how they get back there."""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.packed import Packed, write_into
from probes.placement.packing.tensors import pack, unpack
from probes.placement.runtime.host_memory import ForwardHook
from probes.placement.runtime.offloaded import DetachedParameter
from probes.placement.runtime.stored_blocks import StoredBlock, as_stored, raw_view
from probes.placement.runtime.streams import Stream, Streams
from probes.placement.types import Plan

Fetch = Callable[[], torch.Tensor]
_CHANGES: Final = {
    "_apply": "converted or moved",  # this is what to(), half() and cuda() call
    "load_state_dict": "loaded from a state dict",
    "merge": "changed by adapters that are merged into it",
    "unmerge": "changed by adapters that are taken out of it",
}


@dataclass(eq=False)
class _ParameterOrigin:
    """One parameter: the object, whether it wanted gradients, and how its values come to the host again."""

    entry: Entry
    parameter: nn.Parameter
    requires_grad: bool
    fetch: Fetch | None = None  # None: its values are on the host
    address: int = 0  # of the values that it has meanwhile
    instead: nn.Parameter | None = None  # of one made under inference mode, which can't be given other values

    def back(self) -> None:
        """Give values and the wish for gradients back: what was asked since, where that is known."""
        if self.instead is not None:
            for owner, key in self.entry.owners:
                if owner._parameters.get(key) is self.instead:
                    owner._parameters[key] = self.parameter
            return
        if self.fetch is not None:
            if self.parameter.data_ptr() == self.address:
                self.parameter.data = on_host(self.entry, self.fetch())
            else:  # it was given others, by `.data =`
                self.parameter.data = self.parameter.data.cpu()
            self.fetch = None
        if self.parameter.is_inference():  # a forward gave it values under inference mode, by `.data =`
            self.parameter.data = self.parameter.detach().clone()
        self.parameter.requires_grad_(self.requires_grad or self.parameter.requires_grad)


@dataclass(frozen=True, eq=False)
class _BufferOrigin:
    holder: dict[str, Any]
    key: str
    home: torch.Tensor
    moved: torch.Tensor

    def back(self) -> None:
        now, moved = self.holder.get(self.key), self.moved
        if now is moved:
            if not self._is_converted_only(moved):
                with torch.inference_mode(self.home.is_inference()):
                    self.home.copy_(moved)
            self.holder[self.key] = self.home  # the last step: before it, this can be done again
        elif now is not None:
            self.holder[self.key] = now.to(self.home.device, self.home.dtype)

    def _is_converted_only(self, moved: torch.Tensor) -> bool:
        """Whether nothing was written to it: converting it back may lose bits."""
        return moved.dtype is not self.home.dtype and torch.equal(
            moved.to(self.home.device), self.home.to(moved.dtype)
        )


def _refuse_change(name: str, *_args: Any, **_options: Any) -> NoReturn:
    raise PlacementError(
        f"a placed model can't be {_CHANGES[name]}: the weights of a placed model are only read",
        "call remove() of the handle first",
    )


def _is_adapted(module: nn.Module) -> bool:
    """Whether it is a layer with adapters, as peft makes them, which can be merged into its weight."""
    return all(hasattr(module, name) for name in ("merge", "unmerge", "merged_adapters"))


def joins_its_weights(block: nn.Module) -> bool:
    """Whether a recurrent module in it joins its weights for cuDNN while placed (`Homes` says which)."""
    return any(isinstance(module, nn.RNNBase) and not module.bias for module in block.modules())


def _leave_apart() -> None:
    """Instead of joining weights."""


def _saved(
    module: nn.Module,
    save: Callable[..., None],
    destination: dict[str, Any],
    prefix: str,
    keep_vars: bool,
) -> None:
    """A module's part of a state dict, with values of weights that move, in host memory."""
    save(destination, prefix, keep_vars)
    for key in (prefix + name for name in module._parameters):
        value = destination.get(key)
        if isinstance(value, DetachedParameter):
            destination[key] = value.away.home()


def on_host(entry: Entry, values: torch.Tensor) -> torch.Tensor:
    """The model's own values in host memory of their own, in the parameter's order of dimensions."""
    made = raw_view(entry, torch.empty(entry.given_bytes, dtype=torch.uint8, device="cpu"), entry.given)
    return made.copy_(values)


def _put(entry: Entry, values: torch.Tensor) -> nn.Parameter:
    made = entry.like(values)
    for owner, key in entry.owners:
        owner._parameters[key] = made
    return made


class ParameterOrigins:
    """What has been taken from a model. `restore` gives it back; twice does no harm."""

    def __init__(self) -> None:
        self._homes: dict[int, _ParameterOrigin] = {}
        self._buffers: list[_BufferOrigin] = []
        self._forwards: list[tuple[nn.Module, ForwardHook, Any]] = []
        self._methods: list[tuple[nn.Module, str]] = []  # that are others while the model is placed
        self._recurrent: list[nn.RNNBase] = []

    def adopt(self, entry: Entry, values: torch.Tensor, fetch: Fetch | None = None) -> nn.Parameter:
        """Let the parameter have these values, without gradients. `fetch`: how to get them back to the host.

        A parameter on meta is exchanged for one with values.
        """
        home = self._homes.get(id(entry))
        if home is None:
            home = self._homes[id(entry)] = _ParameterOrigin(
                entry, entry.parameter, entry.parameter.requires_grad
            )
        if home.parameter.is_inference():
            home.instead = _put(entry, values)
            return home.instead
        if home.parameter.is_meta:
            home.parameter = _put(entry, values)
        else:
            home.parameter.requires_grad_(False)
            home.parameter.data = values
        home.fetch, home.address = fetch, home.parameter.data_ptr()
        return home.parameter

    def later(self, entry: Entry, fetch: Fetch) -> None:
        """From now on `fetch` gives the values back. They take no memory of the parameter's own any more."""
        empty = torch.empty(0, dtype=entry.given, device="cpu")
        self.adopt(entry, empty, fetch)

    def move_buffers(self, model: nn.Module, device: torch.device, staying: Collection[nn.Module]) -> None:
        """Move buffers to the device, except those of modules that compute on the host."""
        kept = set(map(id, staying))
        moved: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is None or id(module) in kept or buffer.device == device:
                    continue
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[key] = moved[id(buffer)]
                self._buffers.append(_BufferOrigin(module._buffers, key, buffer, moved[id(buffer)]))

    def convert_buffers(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Convert buffers that are bfloat16."""
        converted: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is None or buffer.dtype is not torch.bfloat16:
                    continue
                made = converted.setdefault(id(buffer), buffer.to(dtype))
                module._buffers[key] = made
                self._buffers.append(_BufferOrigin(module._buffers, key, buffer, made))

    def guard(self, module: nn.Module, make: Callable[[Callable[..., Any]], ForwardHook]) -> None:
        """Let the module's forward be the guard that `make` makes of it."""
        before = module.__dict__.get("forward")
        guard = make(module.forward)
        module.__dict__["forward"] = guard
        self._forwards.append((module, guard, before))

    def refuse_changes(self, model: nn.Module) -> None:
        """Refuse what would change weights one after another, and stop at the first that moves."""
        for module, name in itertools.product(model.modules(), _CHANGES):
            if "merge" not in name or _is_adapted(module):
                self._exchange(module, name, partial(_refuse_change, name))

    def leave_weights_apart(self, model: nn.Module) -> None:
        """Let recurrent modules not join their weights for cuDNN.

        That gives weights memory of their own instead of where they come and go: VRAM that no plan counts,
        and addresses that a recorded pass would read when others have them. Without biases they have to: on
        an H200, an LSTM without biases whose weights were apart gave other outputs (torch 2.11).
        """
        for module in model.modules():
            if isinstance(module, nn.RNNBase) and module.bias:
                self._exchange(module, "flatten_parameters", _leave_apart)
                self._recurrent.append(module)

    def save_values(self, model: nn.Module) -> None:
        """Let state dicts have the values of weights that move."""
        for module in model.modules():
            save = module._save_to_state_dict
            self._exchange(module, "_save_to_state_dict", partial(_saved, module, save))

    def _exchange(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        if name not in module.__dict__:
            module.__dict__[name] = method
            self._methods.append((module, name))

    def unguard(self) -> None:
        """Give modules their own forwards back, and let weights be changed again."""
        for model, name in self._methods:
            model.__dict__.pop(name, None)
        self._methods.clear()
        for module, guard, before in reversed(self._forwards):
            if module.__dict__.get("forward") is not guard:
                continue  # it has been exchanged since: it's the user's
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
        self._forwards.clear()

    def parameter(self, entry: Entry) -> nn.Parameter:
        """The parameter as an object, wherever its values are."""
        home = self._homes.get(id(entry))
        return home.parameter if home else entry.parameter

    def wanted(self, entry: Entry, *, gradients: bool) -> None:
        """Gradients of the parameter were asked for, or not, since the model was placed."""
        self._homes[id(entry)].requires_grad = gradients

    def bring_back(self, entry: Entry, values: torch.Tensor) -> None:
        """Copy the values to the host now, if they have left it."""
        home = self._homes.get(id(entry))
        if home is not None and home.fetch is not None and home.instead is None:
            home.parameter.data, home.fetch = on_host(entry, values), None

    def keep_written(self, entry: Entry, values: torch.Tensor) -> None:
        """A forward gave the parameter these values, by `.data =`: it keeps them."""
        home = self._homes[id(entry)]
        if home.instead is None:
            home.parameter.data, home.fetch = values.cpu(), None

    def restore(self) -> None:
        """Bring all values back to the host.

        Where some can't be found any more, the others come back, and the first error is raised. This can be
        tried again.
        """
        failed: Exception | None = None
        for home in self._homes.values():
            try:
                home.back()
            except Exception as error:  # of the disk, or of the GPU
                failed = failed or error
        if failed:
            raise failed
        for buffer in reversed(self._buffers):
            buffer.back()
        for module in self._recurrent:  # it noted those that calls had
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
        self._recurrent.clear()
        self._homes.clear()
        self._buffers.clear()


class WeightSource(Protocol):
    """The source of one block's bytes, laid out as its `Stored` says."""

    def announce(self) -> None:
        """The block is called soon: begin to get its bytes, in another thread. Returns at once."""

    def ready(self) -> bool:
        """Whether `send` wouldn't make the calling thread wait."""

    def send(self, target: torch.Tensor, lane: Stream) -> None:
        """Append to the lane a copy of all bytes into `target`. Waits for the bytes where they aren't ready.

        What the copy reads stays unchanged until the lane has done it.
        """

    def whole(self) -> torch.Tensor:
        """All bytes, on whatever device they are. For reads that no call announced; may be slow."""

    def recover(self) -> None:
        """A step was interrupted, perhaps here: forget what was announced. All copies have been made."""


class MemorySource:
    """Bytes that stay in memory, of the host or in VRAM."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def announce(self) -> None:
        """Nothing to get."""

    def ready(self) -> bool:
        """Always."""
        return True

    def send(self, target: torch.Tensor, lane: Stream) -> None:
        """One copy; asynchronous where the bytes are pinned."""
        lane.run(partial(target.copy_, self._flat, non_blocking=True))

    def whole(self) -> torch.Tensor:
        """The bytes themselves."""
        return self._flat

    def recover(self) -> None:
        """Nothing changes here."""


class PackedValues(Protocol):
    """A packed tensor that may be elsewhere: its outline, and how its bytes come to their places."""

    @property
    def outline(self) -> Packed:
        """The tensor, its parts perhaps on meta, all but `starts`."""

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Write parts of the outline into buffers; False where the values aren't what they were."""


class ModelWeights(Protocol):
    """Where a model's values come from: the module itself, or a checkpoint.

    `again`: values may be asked for twice, so packed ones aren't kept in memory until they have their place.
    """

    again: bool

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """Write the values into `target`, of the entry's shape, on the host or in VRAM.

        They are converted where its dtype isn't the model's. Raises PlacementError for a number that it can't
        hold.
        """

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """The values packed, dimensions as in memory (`as_stored`); None where that saves nothing.

        `dense`: with 3-bit codes.
        """

    def way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """How the model's own values are found again once `view` has them converted."""

    def wire(self, stored: StoredBlock, lanes: Streams) -> WeightSource:
        """For the tier `disk`: what reads the block in each pass. Raises PlacementError if nothing can."""

    def close(self) -> None:
        """Nothing is asked for any more."""


def given_values(source: ModelWeights, entry: Entry) -> torch.Tensor:
    """The model's own values in host memory of their own."""
    view = raw_view(entry, torch.empty(entry.given_bytes, dtype=torch.uint8, device="cpu"), entry.given)
    source.fill(entry, view)
    return view


_BECOMES = {"float16": torch.float16, "float32": torch.float32}
_BITS = {2: torch.int16, 4: torch.int32}
_FIRST_BEYOND = 143  # the biased exponent of 2^16 in bfloat16; float16 ends below it


def bfloat16_target(plan: Plan) -> torch.dtype | None:
    """What bfloat16 is converted to, if it is."""
    return _BECOMES.get(plan.bfloat16_becomes)


def converting_modules(model: nn.Module, blocks: Iterable[tuple[Block, object]]) -> list[nn.Module]:
    """Where inputs of another dtype may come in: the blocks, which any method may call, and the model."""
    found = [*(module for block, _ in blocks for module in block.modules), model]
    return list({id(module): module for module in found}.values())


@dataclass(frozen=True, eq=False)
class Correction:
    """The numbers that a conversion changes: where they are, and what they were.

    From bfloat16 to float16 these are numbers below 2^-17 with bits that float16 doesn't hold, to float32
    only those that aren't numbers. So it is small as a rule, and the converted values need no copy.
    """

    places: tuple[torch.Tensor, ...]
    values: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor, dtype: torch.dtype) -> "Correction":
        """What converting these values changes."""
        bits = _BITS[values.dtype.itemsize]
        plain = values.contiguous()
        lost = plain.view(bits) != plain.to(dtype).to(values.dtype).view(bits)
        places = lost.nonzero(as_tuple=True)  # of a single number, too, as if it had a dimension
        return Correction(places, torch.atleast_1d(plain)[places])

    def undo(self, entry: Entry, converted: torch.Tensor) -> torch.Tensor:
        """The values as the model had them, in host memory."""
        found = raw_view(entry, torch.empty(entry.given_bytes, dtype=torch.uint8, device="cpu"), entry.given)
        found.copy_(converted)
        torch.atleast_1d(found)[self.places] = self.values
        return found


def require_range(values: torch.Tensor, wanted: torch.dtype) -> None:
    """Raise OverflowError where a finite number would become infinite, as 70,000 does in float16."""
    if not wanted.is_floating_point or torch.finfo(wanted).max >= torch.finfo(values.dtype).max:
        return
    lost = values.isfinite() & values.to(wanted).isinf()
    if lost.any():
        worst = float(values[lost].abs().max())
        raise OverflowError(f"{int(lost.sum()):,} of its numbers don't fit into {wanted}, up to {worst:.4g}")


def require_entry_range(entry: Entry, values: torch.Tensor) -> None:
    """Raise PlacementError, naming the parameter, where what it computes in doesn't hold the values."""
    if entry.dtype is torch.float16 and entry.converts:
        try:
            require_range(values, entry.dtype)
        except OverflowError as error:
            raise conversion_error(entry.name, error) from error


def require_packed_range(entry: Entry, packed: Packed) -> None:
    """The same of packed values, which are unpacked only where their exponents leave a doubt."""
    if entry.dtype is not torch.float16 or not entry.converts:
        return
    if packed.table:
        largest, others = max(packed.table), packed.parts["exponents"]
    else:
        largest, others = packed.base + 15, (packed.parts["values"] >> 7) & 255
    if largest >= _FIRST_BEYOND or bool((others >= _FIRST_BEYOND).any()):
        require_entry_range(entry, unpack(packed.to("cpu")))


def conversion_error(name: str, why: object) -> PlacementError:
    """The error for a tensor with a number that is too large."""
    return PlacementError(
        f"{name} can't be converted: {why}",
        "plan with compute='float32' (--compute float32), or build the model in float32, which holds all of "
        "them, or in the checkpoint's own dtype",
    )


class ModuleWeights:
    """A model that is already built. Its tensors are packed on `device` where they fit there.

    Its own values are released when they have been packed.
    """

    again = False

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """The parameter's own."""
        values = self._values(entry)
        if target.dtype is not entry.given:
            require_entry_range(entry, values)
        target.copy_(values)

    def _values(self, entry: Entry) -> torch.Tensor:
        if entry.parameter.is_meta:
            raise PlacementError(
                f"{entry.name} has no values yet (it is on meta)", "load a checkpoint: load()"
            )
        return entry.parameter.detach()

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """Packed now."""
        packed = _packed_on(self._device, as_stored(entry, self._values(entry)), dense=dense)
        return _PackedInMemory(packed) if packed else None

    def way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Converted back; what the conversion changed is noted now."""
        return partial(Correction.of(self._values(entry), entry.dtype).undo, entry, view)

    def wire(self, stored: StoredBlock, _lanes: Streams) -> WeightSource:
        """A module that is built has no file."""
        raise PlacementError(
            f"{stored.block.name} can't be read from disk: a model that is already built has no file",
            "load the model from its checkpoint with load(), or plan with more host memory",
        )

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class _PackedInMemory:
    """One that is in memory."""

    outline: Packed

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Copy."""
        for part, flat in parts:
            write_into(part, flat)
        return True


def _packed_on(device: torch.device, stored: torch.Tensor, *, dense: bool = False) -> Packed | None:
    """The tensor packed on a GPU, which is quicker, or on the host where that has too little memory."""
    if device.type == "cuda":
        with suppress(torch.cuda.OutOfMemoryError):
            packed = pack(stored.to(device), dense=dense)
            return packed.to("cpu") if packed else None
    return pack(stored.cpu(), dense=dense)
