"""Parameters that are trained, and the groups of their parts whose states come to the card together.

A group is some parameters of one block, or parts of them. Parts that are neighbours in host memory are a
span: one copy brings the states of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.packing.format import aligned
from probes.placement.runtime.streams import Streams

UNIT: Final = 1024  # numbers; parts begin at multiples: vector units of CPUs round the last few otherwise


class NeverCopied:
    """What hooks of a model in training hold: copies of them would compute with this model's weights."""

    def __reduce_ex__(self, _: object) -> str:
        """Raises PlacementError."""
        raise PlacementError(
            "a model in training beyond VRAM can't be copied or pickled",
            "copy it before train() or after remove(), or load its state_dict() into another one",
        )


@dataclass(eq=False)
class Trained(NeverCopied):
    """One parameter that is trained.

    `master` is in host memory where the card has only `working`, a copy in the dtype of autocast; else the
    parameter itself is on the card. `states` are whole, in host memory or on the card.
    """

    name: str
    parameter: nn.Parameter
    setting: int  # the number of its parameter group
    streams: bool  # its states are in host memory
    master: torch.Tensor | None = None
    working: torch.Tensor | None = None
    cast: tuple[int, torch.Tensor] | None = None  # the working copy as products use it, and since when
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    homes: dict[str, torch.Tensor] = field(default_factory=dict)  # bytes of states and masters of a block
    at: int = 0  # where its own begin in each of them
    others: list[dict[str, Any]] = field(default_factory=list)  # of each part, states of other sizes
    begun: list[bool] = field(default_factory=list)  # of each part: it has been updated, and has states
    gradient: torch.Tensor | None = None
    gone: torch.Tensor | None = None  # in place of a gradient that has been used
    groups_left: int = 0  # that haven't taken the gradient yet
    passes: int = 0  # backward passes since the last update
    uses: int = 0  # of the working copy, in backward passes since the last update
    narrow: torch.Tensor | None = None  # the gradient in the dtype of the working copy


class Part:
    """Some of a parameter's numbers, in their order in memory; `whole` where that is all of them."""

    def __init__(self, of: Trained, number: int, first: int, last: int) -> None:
        self.of, self.number, self.first, self.last = of, number, first, last
        self.whole = (first, last) == (0, of.parameter.numel())

    @property
    def n_bytes(self) -> int:
        """In the parameter's own dtype."""
        return (self.last - self.first) * int(self.of.parameter.element_size())

    @property
    def at(self) -> int:
        """Where its bytes begin in the block's homes."""
        return self.of.at + self.first * int(self.of.parameter.element_size())

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its numbers of a tensor that has the parameter's shape: a view."""
        return tensor if self.whole else tensor.view(-1)[self.first : self.last]

    def shaped(self, numbers: torch.Tensor) -> torch.Tensor:
        """Its numbers, one behind the other, in the parameter's shape if they are all of it."""
        return numbers.view(self.of.parameter.shape) if self.whole else numbers


class Span:
    """Parts of a group whose states are neighbours in host memory: one copy brings those of all.

    Where their master weights are, too, and the optimizer treats every number by itself, the parts are
    updated as one tensor.
    """

    def __init__(self, parts: Sequence[Part], names: Sequence[str]) -> None:
        self.parts = tuple(parts)
        first, last = parts[0], parts[-1]
        self.dtype, self.setting = first.of.parameter.dtype, first.of.setting
        self.narrow = first.of.working is not None
        self.n_bytes = last.at + last.n_bytes - first.at
        self.names = (*(["master"] if self.narrow else []), *names)
        self.homes = {
            name: first.of.homes[name][first.at : first.at + self.n_bytes].view(self.dtype)
            for name in self.names
        }
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def slot_bytes(self) -> int:
        """What it takes in a buffer: its states, its master weights and their gradients."""
        return (len(self.names) + self.narrow) * aligned(self.n_bytes)

    def views(self, memory: torch.Tensor, at: int) -> dict[str, torch.Tensor]:
        """Places in a buffer from byte `at` on, by name: states, `master` and `gradient`."""
        known = self._views.get(memory.data_ptr())
        if known is None:
            known = {}
            for name in (*self.names, *(["gradient"] if self.narrow else [])):
                known[name] = memory[at : at + self.n_bytes].view(self.dtype)
                at += aligned(self.n_bytes)
            self._views[memory.data_ptr()] = known
        return known

    def cut(self, numbers: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        """Those of neighbouring parts, of all numbers of the span."""
        if len(parts) == len(self.parts):
            return numbers
        size = numbers.element_size()
        first = (parts[0].at - self.parts[0].at) // size
        return numbers[first : first + sum(part.n_bytes for part in parts) // size]


class Group:
    """Parts that are updated together, in one buffer of the ring."""

    def __init__(
        self, parts: Sequence[Part], block: str, streams: Streams, names: Sequence[str], *, divides: bool
    ) -> None:
        self.parts, self.block = tuple(parts), block
        self.spans = _spans([part for part in parts if part.of.streams], names, divides=divides)
        self.resident = [part for part in parts if not part.of.streams]
        self.order = 0  # of its block in a forward pass
        self.waits = False
        self.handed = False  # to the ring, since the last step
        self.settings: list[dict[str, Any]] = []  # of the step that it waits for
        self.missing = {part.of for part in parts}  # whose gradients aren't made yet
        self.made, self.updated, self.home = streams.event(), streams.event(), streams.event()
        self.held: list[torch.Tensor] = []  # gradients, until the card has used them
        self.taken_bytes = 0  # of these
        self.is_made = False  # as far as the host has asked

    @property
    def slot_bytes(self) -> int:
        """What it takes in a buffer."""
        return sum(span.slot_bytes for span in self.spans)

    @property
    def gradient_bytes(self) -> int:
        """Of its gradients that are there."""
        gradients = ((part, part.of.gradient) for part in self.parts)
        return sum((part.last - part.first) * g.element_size() for part, g in gradients if g is not None)

    def again(self) -> None:
        """Wait for the gradients of the next step."""
        self.missing = {part.of for part in self.parts}


def _spans(parts: Sequence[Part], names: Sequence[str], *, divides: bool) -> list[Span]:
    spans: list[list[Part]] = []
    for part in parts:
        last = spans[-1][-1] if spans else None
        if (
            last is not None
            and divides
            and (last.last - last.first) % UNIT == 0
            and last.at + last.n_bytes == part.at
            and (last.of.working is None) is (part.of.working is None)
            and last.of.setting == part.of.setting
            and last.of.parameter.dtype is part.of.parameter.dtype
        ):
            spans[-1].append(part)
        else:
            spans.append([part])
    return [Span(each, names) for each in spans]


def groups_of(
    trained: Sequence[Trained],
    block: str,
    streams: Streams,
    names: Sequence[str],
    *,
    numbers: int,
    divides: bool,
) -> list[Group]:
    """Groups of at most so many numbers each where parameters can be divided, else of whole parameters."""
    groups: list[list[Part]] = [[]]
    room = numbers
    for one in trained:
        n, first, number = one.parameter.numel(), 0, 0
        if not divides and n > room and groups[-1]:
            groups.append([])
            room = numbers
        while first < n:
            last = min(first + room // UNIT * UNIT, n) if divides and n - first > room else n
            if last == first:  # too little room for a part: another group
                groups.append([])
                room = numbers
                continue
            groups[-1].append(Part(one, number, first, last))
            one.others.append({})
            one.begun.append(False)
            room, first, number = room - (last - first), last, number + 1
            if room <= 0:
                groups.append([])
                room = numbers
    return [Group(parts, block, streams, names, divides=divides) for parts in groups if parts]
