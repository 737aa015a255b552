"""Where a model's parameters and buffers were before it was placed, and how they get back there."""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import nn

from probes.errors import PlacementError
from probes.placement.models.modules import Entry
from probes.placement.runtime.blocks.blockstore import raw_view
from probes.placement.runtime.blocks.hostside import Guard

Fetch = Callable[[], torch.Tensor]
_CHANGES: Final = ("_apply", "load_state_dict")  # the first is what to(), half() and cuda() call


@dataclass(eq=False)
class _Home:
    """One parameter: the object, whether it wanted gradients, and how its values come to the host again."""

    entry: Entry
    parameter: nn.Parameter
    requires_grad: bool
    fetch: Fetch | None = None  # None: its values are on the host
    instead: nn.Parameter | None = None  # of one made under inference mode, which can't be given other values

    def back(self) -> None:
        if self.instead is not None:
            for owner, key in self.entry.owners:
                if owner._parameters.get(key) is self.instead:
                    owner._parameters[key] = self.parameter
            return
        if self.fetch is not None:
            self.parameter.data = on_host(self.entry, self.fetch())
            self.fetch = None
        self.parameter.requires_grad_(self.requires_grad)


@dataclass(frozen=True, eq=False)
class _MovedBuffer:
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
    what = "converted or moved" if name == "_apply" else "loaded from a state dict"
    raise PlacementError(
        f"a placed model can't be {what}: the weights of a placed model are only read",
        "call remove() of the handle first",
    )


def on_host(entry: Entry, values: torch.Tensor) -> torch.Tensor:
    """The model's own values in host memory of their own, in the parameter's order of dimensions."""
    made = raw_view(entry, torch.empty(entry.given_bytes, dtype=torch.uint8, device="cpu"), entry.given)
    return made.copy_(values)


def _put(entry: Entry, values: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(values, requires_grad=False)
    for owner, key in entry.owners:
        owner._parameters[key] = made
    return made


class Homes:
    """What has been taken from a model. `restore` gives it back; twice does no harm."""

    def __init__(self) -> None:
        self._homes: dict[int, _Home] = {}
        self._buffers: list[_MovedBuffer] = []
        self._forwards: list[tuple[nn.Module, Guard, Any]] = []
        self._refusing: list[tuple[nn.Module, str]] = []

    def adopt(self, entry: Entry, values: torch.Tensor, fetch: Fetch | None = None) -> nn.Parameter:
        """Let the parameter have these values, without gradients. `fetch`: how to get them back to the host.

        A parameter on meta is exchanged for one with values.
        """
        home = self._homes.get(id(entry))
        if home is None:
            home = self._homes[id(entry)] = _Home(entry, entry.parameter, entry.parameter.requires_grad)
        if home.parameter.is_inference():
            home.instead = _put(entry, values)
            return home.instead
        if home.parameter.is_meta:
            home.parameter = _put(entry, values)
        else:
            home.parameter.requires_grad_(False)
            home.parameter.data = values
        home.fetch = fetch
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
                self._buffers.append(_MovedBuffer(module._buffers, key, buffer, moved[id(buffer)]))

    def convert_buffers(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Convert buffers that are bfloat16."""
        converted: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is None or buffer.dtype is not torch.bfloat16:
                    continue
                made = converted.setdefault(id(buffer), buffer.to(dtype))
                module._buffers[key] = made
                self._buffers.append(_MovedBuffer(module._buffers, key, buffer, made))

    def guard(self, module: nn.Module, make: Callable[[Callable[..., Any]], Guard]) -> None:
        """Let the module's forward be the guard that `make` makes of it."""
        before = module.__dict__.get("forward")
        guard = make(module.forward)
        module.__dict__["forward"] = guard
        self._forwards.append((module, guard, before))

    def refuse_changes(self, model: nn.Module) -> None:
        """Refuse what would change weights one after another, and stop at the first that moves."""
        for module, name in itertools.product(model.modules(), _CHANGES):
            if name not in module.__dict__:
                module.__dict__[name] = partial(_refuse_change, name)
                self._refusing.append((module, name))

    def unguard(self) -> None:
        """Give modules their own forwards back, and let weights be changed again."""
        for model, name in self._refusing:
            model.__dict__.pop(name, None)
        self._refusing.clear()
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

    def bring_back(self, entry: Entry, values: torch.Tensor) -> None:
        """Copy the values to the host now, if they have left it."""
        home = self._homes.get(id(entry))
        if home is not None and home.fetch is not None and home.instead is None:
            home.parameter.data = on_host(entry, values)
            home.fetch = None

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
        self._homes.clear()
        self._buffers.clear()
