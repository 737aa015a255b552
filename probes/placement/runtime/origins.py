"""Where parameters and buffers were before a model was placed, and how they get back there."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.attributes import exchange, other
from probes.placement.models.modules import Entry
from probes.placement.runtime.buffers import PlannedBlock, room_for
from probes.placement.runtime.hooks import ForwardHook, InputConversionHook, converted
from probes.placement.runtime.offloaded import DetachedParameter
from probes.placement.types import Plan

Fetch = Callable[[], torch.Tensor]

_CHANGES: Final = {
    "_apply": "converted or moved",  # this is what to(), half() and cuda() call
    "load_state_dict": "loaded from a state dict",
    "merge": "changed by adapters that are merged into it",
    "unmerge": "changed by adapters that are taken out of it",
}


@dataclass(frozen=True)
class Gate:
    """A hook that stays on a module between two placements, so that no call comes through meanwhile."""

    module: nn.Module
    hook: ForwardHook
    before: Any  # the module's own forward, where it isn't its class's


def _give_back(module: nn.Module, hook: ForwardHook, before: Any) -> None:
    """Let a module have the forward that it had before the hook."""
    hook.__class__ = ForwardHook  # a user's own forward, or a copy of the module, may call it
    if module.__dict__.get("forward") is not hook:
        return  # it has been exchanged since: it's the user's
    if before is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = before


class ParameterOrigins:
    """What a model had before it was placed: values of parameters and buffers, forwards and methods.

    `remove_hooks` gives forwards and methods back, `restore` values. Both may be called twice.
    """

    def __init__(self, gate: "Gate | None" = None) -> None:
        self._gate = gate
        self._origins: dict[int, _ParameterOrigin] = {}
        self._buffers: list[_BufferOrigin] = []
        self._forwards: list[tuple[nn.Module, ForwardHook, Any]] = []
        self._methods: list[tuple[nn.Module, str]] = []  # that are others while the model is placed
        self._recurrent: list[nn.RNNBase] = []
        self._shared: dict[int, _SharedMemory] = {}  # by the identity of entries
        self._held: tuple[nn.Module, list[tuple[Entry, Any]]] | None = None  # what attributes hold meanwhile

    def note_shared(self, entries: Iterable[Entry]) -> None:
        """Note which parameters are views of one memory, such as weights that are tied by `.data =`."""
        by_memory: dict[int, list[Entry]] = defaultdict(list)
        for entry in entries:
            if not entry.parameter.is_meta and entry.n_bytes:
                by_memory[entry.parameter.untyped_storage().data_ptr()].append(entry)
        for sharing in by_memory.values():
            if len(sharing) > 1:
                shared = _SharedMemory(
                    {id(entry): entry.parameter.storage_offset() for entry in sharing},
                    sharing[0].parameter.untyped_storage().nbytes(),
                )
                self._shared |= dict.fromkeys(shared.offsets, shared)

    def adopt(self, entry: Entry, values: torch.Tensor, fetch: Fetch | None = None) -> nn.Parameter:
        """Let the parameter have these values, without gradients. `fetch`: how to get them back to the host.

        A parameter on meta is exchanged for one with values.
        """
        origin = self._origins.get(id(entry))
        if origin is None:
            origin = self._origins[id(entry)] = _ParameterOrigin(
                entry, entry.parameter, entry.parameter.requires_grad, self._shared.get(id(entry))
            )
        if origin.parameter.is_inference():
            origin.instead = _put(entry, values)
            return origin.instead
        if origin.parameter.is_meta:
            origin.parameter = _put(entry, values)
        else:
            origin.parameter.requires_grad_(False)
            origin.parameter.data = values
        origin.fetch, origin.address = fetch, origin.parameter.data_ptr()
        return origin.parameter

    def fetch_with(self, entry: Entry, fetch: Fetch) -> None:
        """From now on `fetch` gives the values back. They take no memory of the parameter's own any more."""
        empty = torch.empty(0, dtype=entry.given, device="cpu")
        self.adopt(entry, empty, fetch)

    def move_buffers(self, model: nn.Module, device: torch.device, staying: Collection[nn.Module]) -> None:
        """Move buffers to the device, except those of modules that compute on the host."""
        kept = set(map(id, staying))
        moving = (module for module in model.modules() if id(module) not in kept)
        self._change_buffers(moving, lambda buffer: buffer.to(device))

    def convert_buffers(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Convert buffers that are bfloat16; None: nothing is converted."""
        if dtype is not None:
            self._change_buffers(model.modules(), partial(converted, dtype=dtype))

    def convert_inputs(
        self, model: nn.Module, blocks: Iterable[PlannedBlock], dtype: torch.dtype | None
    ) -> None:
        """From now on inputs are converted likewise: of blocks, too, which other methods may call."""
        if dtype is not None:
            modules = (*(module for block, _ in blocks for module in block.modules), model)
            for module in {id(module): module for module in modules}.values():
                self.add_hook(module, partial(InputConversionHook, dtype=dtype))

    def _change_buffers(
        self, modules: Iterable[nn.Module], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        changed: dict[int, torch.Tensor] = {}
        for module in modules:
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in changed:
                    changed[id(buffer)] = change(buffer)
                if (new := changed[id(buffer)]) is not buffer:
                    module._buffers[key] = new
                    self._buffers.append(_BufferOrigin(module._buffers, key, buffer, new))

    def add_hook(self, module: nn.Module, make: Callable[[Callable[..., Any]], ForwardHook]) -> None:
        """Replace the module's forward by the hook that `make` makes of it."""
        gate, forward, before = self._gate, module.forward, module.__dict__.get("forward")
        if gate is not None and before is gate.hook:
            before, self._gate = gate.before, None
            forward = type(module).forward.__get__(module) if before is None else before
        hook = make(forward)
        module.__dict__["forward"] = hook
        self._forwards.append((module, hook, before))

    def refuse_changes(self, model: nn.Module) -> None:
        """Refuse what would change weights one after another, and stop at the first that moves."""
        for module, name in itertools.product(model.modules(), _CHANGES):
            # layers with adapters, as peft makes them, can be merged into their weights
            adapted = all(hasattr(module, key) for key in ("merge", "unmerge", "merged_adapters"))
            if name == "_apply":
                self._exchange(module, name, partial(_unchanged, module))
            elif "merge" not in name or adapted:
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

    def exchange_held(self, model: nn.Module, entries: Iterable[Entry]) -> None:
        """Let lists, and what else attributes hold, have what modules have in place of these parameters."""
        held = [(entry, entry.parameter, entry.held()) for entry in entries]
        self._held = model, [(entry, now) for entry, before, now in held if now is not before]
        exchange(model.modules(), other({id(before): now for _, before, now in held if now is not before}))

    def _exchange(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        if name not in module.__dict__:
            module.__dict__[name] = method
            self._methods.append((module, name))

    def remove_hooks(self, *, but: ForwardHook | None = None) -> "Gate | None":
        """Give modules their own forwards and methods back, so that weights can be changed again.

        `but`: a hook that is to stay where it is, for `ParameterOrigins` of the next placement.
        """
        kept, self._gate = self._gate, None
        if kept is not None and but is None:
            _give_back(kept.module, kept.hook, kept.before)
            kept = None
        for model, name in self._methods:
            model.__dict__.pop(name, None)
        self._methods.clear()
        for module, hook, before in reversed(self._forwards):
            if but is not None and hook is but and module.__dict__.get("forward") is hook:
                own = next(forward for owner, _, forward in self._forwards if owner is module)
                kept = Gate(module, hook, own)
            elif kept is None or module is not kept.module:
                _give_back(module, hook, before)
        self._forwards.clear()
        self._gate = kept  # a second taking down, after an interruption, finds it
        return kept

    def parameter(self, entry: Entry) -> nn.Parameter:
        """The parameter as an object, wherever its values are."""
        origin = self._origins.get(id(entry))
        return origin.parameter if origin else entry.parameter

    def wanted(self, entry: Entry, gradients: bool) -> None:
        """Gradients of the parameter are asked for, or not, while the model is placed."""
        if (origin := self._origins.get(id(entry))) is not None:
            origin.requires_grad = gradients

    def bring_back(self, entry: Entry, values: torch.Tensor) -> None:
        """Copy the values to the host now, if they have left it."""
        origin = self._origins.get(id(entry))
        if origin is not None and origin.fetch is not None and origin.instead is None:
            origin.parameter.data, origin.fetch = origin.on_host(values), None

    def keep_written(self, entry: Entry, values: torch.Tensor) -> None:
        """A forward gave the parameter these values, by `.data =`: it keeps them."""
        origin = self._origins[id(entry)]
        if origin.instead is None:
            origin.parameter.data, origin.fetch = values.cpu(), None

    def leave_values(self) -> None:
        """Forget values that can be read again, from now on nowhere: parameters are on meta as before."""
        for origin in self._origins.values():
            if origin.entry.parameter.is_meta:
                for holder, key in origin.entry.holders():
                    holder[key] = origin.entry.parameter
                origin.parameter, origin.fetch = origin.entry.parameter, None

    def restore(self) -> None:
        """Bring all values back to the host.

        Where some can't be found any more, the others come back, and the first error is raised. This can be
        tried again.
        """
        first_error: Exception | None = None
        for origin in self._origins.values():
            try:
                origin.back()
            except Exception as error:  # of the disk, or of the GPU
                first_error = first_error or error
        if first_error:
            raise first_error
        for origin in self._origins.values():
            origin.share()
        self._shared.clear()
        for buffer in reversed(self._buffers):
            buffer.back()
        for module in self._recurrent:  # it noted those that calls had
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
        if self._held is not None:
            model, held = self._held
            exchange(model.modules(), other({id(now): self.parameter(entry) for entry, now in held}))
            self._held = None
        self._recurrent.clear()
        self._origins.clear()
        self._buffers.clear()


@dataclass(eq=False)
class _SharedMemory:
    """Memory of which several parameters are views, and where: they are so again once they are back."""

    offsets: dict[int, int]  # in numbers, by the identity of entries
    n_bytes: int
    memory: torch.UntypedStorage | None = None

    def room(self, entry: Entry) -> torch.Tensor:
        """The parameter's view."""
        if self.memory is None:
            self.memory = torch.UntypedStorage(self.n_bytes)
        empty = torch.empty(0, dtype=entry.given, device="cpu")
        return empty.set_(self.memory, self.offsets[id(entry)], entry.shape, entry.stride)


@dataclass(eq=False)
class _ParameterOrigin:
    """A parameter as an object, whether it wanted gradients, and how its values get back to the host."""

    entry: Entry
    parameter: nn.Parameter
    requires_grad: bool
    shared: "_SharedMemory | None" = None
    fetch: Fetch | None = None  # None: its values are on the host
    address: int = 0  # of the values that it has meanwhile
    instead: nn.Parameter | None = None  # of one made under inference mode, which can't be given other values

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        """The model's own values in host memory, in the parameter's order of dimensions."""
        room = self.shared.room(self.entry) if self.shared else room_for(self.entry, "cpu", self.entry.given)
        return room.copy_(values)

    def back(self) -> None:
        """Give back the values, and whether gradients are wanted: by what was asked for last, if known."""
        if self.instead is not None:
            for owner, key in self.entry.owners:
                if owner._parameters.get(key) is self.instead:
                    owner._parameters[key] = self.parameter
            return
        if self.fetch is not None:
            if self.parameter.data_ptr() == self.address:
                self.parameter.data = self.on_host(self.fetch())
            else:  # it was given others, by `.data =`
                self.parameter.data = self.parameter.data.cpu()
            self.fetch = None
        if self.parameter.is_inference():  # a forward gave it values under inference mode, by `.data =`
            self.parameter.data = self.parameter.detach().clone()
        self.parameter.requires_grad_(self.requires_grad or self.parameter.requires_grad)

    def share(self) -> None:
        """Let it be a view of the memory of others that are back, if it never left its own."""
        has_left = self.instead is not None or self.parameter.data_ptr() != self.address
        if self.shared and self.shared.memory is not None and not has_left:
            self.parameter.data = self.on_host(self.parameter.data)


@dataclass(frozen=True, eq=False)
class _BufferOrigin:
    holder: dict[str, Any]
    key: str
    origin: torch.Tensor
    moved: torch.Tensor

    def back(self) -> None:
        now, moved = self.holder.get(self.key), self.moved
        if now is moved:
            if not self._is_converted_only(moved):
                with torch.inference_mode(self.origin.is_inference()):
                    self.origin.copy_(moved)
            self.holder[self.key] = self.origin  # the last step: before it, this can be done again
        elif now is not None:
            self.holder[self.key] = now.to(self.origin.device, self.origin.dtype)

    def _is_converted_only(self, moved: torch.Tensor) -> bool:
        """Whether nothing was written to it: converting it back may lose bits."""
        return moved.dtype is not self.origin.dtype and torch.equal(
            moved.to(self.origin.device), self.origin.to(moved.dtype)
        )


def _refuse_change(name: str, *_args: Any, **_options: Any) -> NoReturn:
    raise PlacementError(
        f"a placed model can't be {_CHANGES[name]}: the weights of a placed model are only read",
        "call remove() of the handle first",
    )


def _unchanged(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """The module, where all that it has is as `to()`, `half()` or `cuda()` would make it, as routers ask."""
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    kinds = {(tensor.dtype, tensor.device, tensor.dim()) for tensor in tensors}
    trials = [torch.empty((2,) * n, dtype=dtype, device=device) for dtype, device, n in kinds]
    if "share_memory" in getattr(change, "__qualname__", "") or any(change(one) is not one for one in trials):
        _refuse_change("_apply")
    return module


def joins_its_weights(block: nn.Module) -> bool:
    """Whether it has a recurrent module that joins its weights for cuDNN (see `leave_weights_apart`)."""
    return any(isinstance(module, nn.RNNBase) and not module.bias for module in block.modules())


def _leave_apart() -> None:
    """Do nothing, where torch's RNN modules would join their weights."""


def _saved(
    module: nn.Module,
    save: Callable[..., None],
    destination: dict[str, Any],
    prefix: str,
    keep_vars: bool,
) -> None:
    """Save a module's part of a state dict, with the values of offloaded weights in host memory."""
    save(destination, prefix, keep_vars)
    for key in (prefix + name for name in module._parameters):
        value = destination.get(key)
        if isinstance(value, DetachedParameter):
            destination[key] = value.access.fetch_to_host()


def _put(entry: Entry, values: torch.Tensor) -> nn.Parameter:
    parameter = entry.like(values)
    for holder, key in entry.holders():
        holder[key] = parameter
    return parameter


def bfloat16_target(plan: Plan) -> torch.dtype | None:
    """What bfloat16 is converted to, if it is."""
    return _BECOMES.get(plan.bfloat16_becomes)


_BECOMES = {"float16": torch.float16, "float32": torch.float32}
