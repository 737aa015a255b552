"""Weights that aren't trained: packed without loss in host memory, copied and unpacked for each use.

A block's forward is done twice, in the forward pass and again in the backward pass (its activations aren't
kept), and each time its weights are in one of two buffers until the other one is filled for the block after
it. At other times the parameter is NaN: what reads it elsewhere can't mistake another block's numbers for its
own. Blocks are called in the same order in every pass, and in the reverse of it in the backward pass; so what
comes next is known, and is on its way while a block computes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.models.modules import Block
from probes.placement.packing.format import PackedForm, aligned
from probes.placement.packing.packed import Packed, form, packed_in, write_into
from probes.placement.packing.tensors import pack, unpack
from probes.placement.runtime.host_memory import HostArena
from probes.placement.runtime.streams import Event, Streams
from probes.placement.training.activations import in_backward
from probes.placement.training.groups import NeverCopied
from probes.placement.training.plan import packs
from probes.placement.training.weights import placeholder

BUFFERS: Final = 2


@dataclass(eq=False)
class _Weight:
    """One frozen parameter, and where its bytes are in the block's buffers."""

    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device  # where it was
    packed: PackedForm | None
    at: int  # in the packed block
    n_bytes: int
    to: int  # in the unpacked one
    elsewhere: torch.Tensor | None = None  # what the parameter is while its block isn't called


@dataclass(eq=False)
class _Block:
    name: str
    weights: list[_Weight] = field(default_factory=list)
    host: torch.Tensor | None = None
    staged_bytes: int = 0
    decoded_bytes: int = 0


@dataclass(eq=False)
class _Buffer:
    """Packed bytes that have arrived, and the weights unpacked from them."""

    staged: torch.Tensor
    decoded: torch.Tensor
    arrived: Event
    unpacked: Event  # the packed bytes can be overwritten
    block: _Block | None = None  # whose bytes arrive or have arrived
    ready: bool = False
    views: dict[_Weight, torch.Tensor] = field(default_factory=dict)  # of `decoded`
    packed: dict[_Weight, Packed] = field(default_factory=dict)  # of `staged`


class FrozenBlocks(NeverCopied):
    """The frozen weights of all blocks that have them in host memory."""

    def __init__(self, streams: Streams, arena: HostArena) -> None:
        self._streams, self._arena = streams, arena
        self._blocks: dict[str, _Block] = {}
        self._parameters: set[int] = set()
        self._buffers: list[_Buffer] = []
        self._next: dict[str, str] = {}  # in a forward pass
        self._previous: dict[str, str] = {}
        self._seen: set[str] = set()
        self._last = ""
        self._computing: _Buffer | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is a frozen weight in host memory."""
        return id(tensor) in self._parameters

    def add(self, block: Block, trained: Mapping[int, int]) -> None:
        """Pack a block's frozen weights into host memory; the card keeps nothing of them."""
        device = self._streams.device
        held = _Block(block.name)
        flats = []
        for entry in block.entries:
            parameter = entry.parameter
            if parameter.requires_grad and id(parameter) in trained:
                continue
            value = parameter.data.to(device).contiguous()
            packed = pack(value, dense=True) if packs(value) else None
            made = form(packed) if packed else None
            n_bytes = made.n_bytes if made else value.nbytes
            held.weights.append(
                _Weight(
                    parameter,
                    parameter.shape,
                    parameter.dtype,
                    parameter.device,
                    made,
                    held.staged_bytes,
                    n_bytes,
                    held.decoded_bytes,
                )
            )
            flat = torch.zeros(aligned(n_bytes), dtype=torch.uint8, device=device)
            if packed:
                write_into(packed, flat)
            else:
                flat[:n_bytes].copy_(value.view(-1).view(torch.uint8))
            flats.append(flat)
            held.staged_bytes += aligned(n_bytes)
            held.decoded_bytes += aligned(value.nbytes)
        if not held.weights:
            return
        self._arena.widen(held.staged_bytes)
        held.host = self._arena.take(held.staged_bytes)
        torch.cat([flat.cpu() for flat in flats], out=held.host)
        for weight in held.weights:
            self._parameters.add(id(weight.parameter))
            weight.parameter.data = torch.empty(0, dtype=weight.dtype, device=device)
        self._blocks[block.name] = held

    def allocate(self) -> None:
        """Take the buffers."""
        if not self._blocks:
            return
        staged = max(block.staged_bytes for block in self._blocks.values())
        decoded = max(block.decoded_bytes for block in self._blocks.values())
        for _ in range(BUFFERS):
            memory = [
                torch.empty(size, dtype=torch.uint8, device=self._streams.device)
                for size in (staged, decoded)
            ]
            events = [self._streams.event() for _ in range(2)]
            self._buffers.append(_Buffer(*memory, *events))
        for block in self._blocks.values():
            for weight in block.weights:
                view = self._view(self._buffers[0], weight)
                weight.elsewhere = placeholder(view, view.device) if view.is_floating_point() else view
                weight.parameter.data = weight.elsewhere

    def _view(self, buffer: _Buffer, weight: _Weight) -> torch.Tensor:
        view = buffer.views.get(weight)
        if view is None:
            size = weight.shape.numel() * weight.dtype.itemsize
            view = buffer.decoded[weight.to : weight.to + size].view(weight.dtype).view(weight.shape)
            buffer.views[weight] = view
        return view

    def computed(self, block: Block, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward with its weights there."""
        if block.name not in self._blocks:
            return forward
        held = self._blocks[block.name]

        @functools.wraps(forward)
        def with_weights(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the forward has them
            self._enter(held)
            try:
                return forward(*args, **kwargs)
            finally:
                for weight in held.weights:
                    weight.parameter.data = weight.elsewhere

        return with_weights

    def _enter(self, block: _Block) -> None:
        backward = in_backward()
        if not backward:
            if block.name not in self._seen:
                self._seen.add(block.name)
                if self._last:
                    self._next[self._last] = block.name
                    self._previous[block.name] = self._last
            self._last = block.name
        buffer = next((b for b in self._buffers if b.block is block), None)
        if buffer is None:
            buffer = self._bring(block)
        if not buffer.ready:
            self._streams.compute.wait(buffer.arrived)
            self._streams.compute.run(partial(self._unpack, buffer))
            self._streams.compute.record(buffer.unpacked)
            buffer.ready = True
        for weight in block.weights:
            weight.parameter.data = self._view(buffer, weight)
        self._computing = buffer
        follows = (self._previous if backward else self._next).get(block.name)
        if follows and not any(b.block is self._blocks[follows] for b in self._buffers):
            self._bring(self._blocks[follows])

    def _bring(self, block: _Block) -> _Buffer:
        """Copy a block's packed bytes into the buffer that isn't computed with."""
        buffer = next(b for b in self._buffers if b is not self._computing)
        self._streams.copy.wait(buffer.unpacked)
        assert block.host is not None
        to = buffer.staged[: block.staged_bytes]
        self._streams.copy.run(partial(to.copy_, block.host, non_blocking=True))
        self._streams.copy.record(buffer.arrived)
        buffer.block, buffer.ready = block, False
        return buffer

    def _unpack(self, buffer: _Buffer) -> None:
        assert buffer.block is not None
        for weight in buffer.block.weights:
            view = self._view(buffer, weight)
            if weight.packed is None:
                flat = buffer.staged[weight.at : weight.at + weight.n_bytes]
                view.view(-1).view(torch.uint8).copy_(flat)
                continue
            if weight not in buffer.packed:
                flat = buffer.staged[weight.at : weight.at + aligned(weight.n_bytes)]
                buffer.packed[weight] = packed_in(weight.packed, flat)
            unpack(buffer.packed[weight], view)

    # ---- values --------------------------------------------------------------------------------------------

    def _value(self, block: _Block, weight: _Weight) -> torch.Tensor:
        """A weight's values, in memory of their own."""
        assert block.host is not None
        device = self._streams.device
        value = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        flat = block.host[weight.at : weight.at + aligned(weight.n_bytes)].to(device)
        if weight.packed is None:
            value.view(-1).view(torch.uint8).copy_(flat[: weight.n_bytes])
        else:
            unpack(packed_in(weight.packed, flat), value)
        return value

    def _of(self, module: nn.Module) -> Iterator[tuple[str, _Block, _Weight]]:
        """A module's own weights that are here, by their keys."""
        for key, parameter in module._parameters.items():
            if id(parameter) in self._parameters:
                yield from (
                    (key, block, weight)
                    for block in self._blocks.values()
                    for weight in block.weights
                    if weight.parameter is parameter
                )

    def into_states(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Let a state dict have the values, on the CPU."""
        for key, block, weight in self._of(module):
            state[f"{prefix}{key}"] = self._value(block, weight).cpu()

    def open(self, module: nn.Module) -> None:
        """Values are about to be loaded into a module."""
        self._streams.finish()
        for _, block, weight in self._of(module):
            weight.parameter.data = self._value(block, weight)

    def close(self, module: nn.Module) -> None:
        """Raises PlacementError where other values were loaded: those here are packed."""
        for key, block, weight in self._of(module):
            loaded, weight.parameter.data = weight.parameter.data, weight.elsewhere
            if not torch.equal(_bits(loaded), _bits(self._value(block, weight))):
                raise PlacementError(
                    f"{key} of {block.name} isn't trained and is packed: other values were loaded into it",
                    "remove() the training, load, and train again",
                )

    def remove(self) -> None:
        """Give the weights back to where they were."""
        self._streams.finish()
        for block in self._blocks.values():
            for weight in block.weights:
                weight.parameter.data = self._value(block, weight).to(weight.device)
        self._blocks.clear()
        self._buffers.clear()


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
