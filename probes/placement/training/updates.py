"""Updates of weights whose optimizer states are in host memory.

A group is some parameters of one block, or parts of them. Once its gradients are made, its states (and its
master weights, where the card has a copy in another dtype) are copied into one buffer of a ring, the
optimizer's own code updates them there, and they are copied back. Copies to the card are on one stream,
updates and copies back on another, so both directions of the link are busy at once.

Of the groups that wait, the one whose block is called first in a forward pass goes first: during a backward
pass that is the latest whose gradients were made; what is left when it ends is updated while the next
forward pass runs, and each block waits for its own groups only.

The host hands over as many groups as there are buffers and QUEUED more, which wait on the card for theirs:
the link isn't idle while the host waits for something else. It never runs more than AHEAD blocks ahead of
the card: so the order is chosen by what the card has done, and gradients don't pile up.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.packing.format import aligned
from probes.placement.runtime.streams import Event, Streams

QUEUED: Final = 4  # groups that wait on the card for a buffer
AHEAD: Final = 2  # blocks that the host hands over before the card has done the one before them
UNIT: Final = 1024  # numbers; parts begin at multiples: vector units of CPUs round the last few otherwise

# Optimizers of torch that treat every number by itself: their parameters can be updated in parts
ELEMENTWISE: Final = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters can be updated in parts."""
    kind = type(optimizer)
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")


def state_names(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[str, ...]:
    """The optimizer's states that are as large as a parameter, by a step of a parameter of six numbers.

    Raises PlacementError where the optimizer can't step one parameter at a time.
    """
    shadow = shadow_of(optimizer)
    names: set[tuple[str, ...]] = set()
    for group in optimizer.param_groups:
        trial = nn.Parameter(torch.zeros(2, 3, device=device))
        trial.grad = torch.zeros_like(trial)
        try:
            state = stepped(shadow, [(_settings(group), [trial])], {}).get(trial, {})
        except (RuntimeError, TypeError, AttributeError, KeyError, ValueError) as error:
            raise PlacementError(
                f"{type(optimizer).__name__} can't update one parameter at a time: {str(error)[:200]}",
                "train with an optimizer of torch.optim",
            ) from error
        names.add(
            tuple(k for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == trial.shape)
        )
    if len(names) > 1:
        raise PlacementError(
            f"parameter groups keep different states: {', '.join(map(str, sorted(names)))}",
            "give all groups the same amsgrad, momentum and centered",
        )
    return names.pop() if names else ()


def shadow_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings, with parameters and states of its own."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # which a scheduler or we have put there
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_step_"):
            shadow.__dict__[name] = OrderedDict() if isinstance(value, Mapping) else value
    return shadow


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters; what changes in place is copied."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def stepped(
    shadow: torch.optim.Optimizer,
    groups: Sequence[tuple[dict[str, Any], list[nn.Parameter]]],
    states: Mapping[nn.Parameter, dict[str, Any]],
) -> Mapping[nn.Parameter, dict[str, Any]]:
    """Let the optimizer's code update parameters that have gradients. Returns their states afterwards."""
    shadow.param_groups = [{**settings, "params": parameters} for settings, parameters in groups]
    shadow.state = defaultdict(dict, states)
    type(shadow).step(shadow)
    after: Mapping[nn.Parameter, dict[str, Any]] = shadow.state
    shadow.state, shadow.param_groups = defaultdict(dict), []
    return after


@dataclass(eq=False)
class Trained:
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
    others: list[dict[str, Any]] = field(default_factory=list)  # of each part, states of other sizes
    begun: list[bool] = field(default_factory=list)  # of each part: it has been updated, and has states
    gradient: torch.Tensor | None = None
    groups_left: int = 0  # that haven't taken the gradient yet
    passes: int = 0  # backward passes since the last update
    uses: int = 0  # of the working copy, in backward passes since the last update
    narrow: torch.Tensor | None = None  # the gradient in the dtype of the working copy

    @property
    def values(self) -> torch.Tensor:
        """The weight in its own dtype."""
        return self.parameter.data if self.master is None else self.master


@dataclass(frozen=True, eq=False)
class Part:
    """Some of a parameter's numbers, in their order in memory; `whole` where that is all of them."""

    of: Trained
    number: int
    first: int
    last: int

    @property
    def whole(self) -> bool:
        """Whether it is the parameter as it is."""
        return (self.first, self.last) == (0, self.of.parameter.numel())

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its numbers of a tensor that has the parameter's shape: a view."""
        return tensor if self.whole else tensor.view(-1)[self.first : self.last]


class Group:
    """Parts that are updated together, in one buffer of the ring."""

    def __init__(self, parts: Sequence[Part], block: str, streams: Streams) -> None:
        self.parts, self.block = tuple(parts), block
        self.order = 0  # of its block in a forward pass
        self.waits = False
        self.handed = False  # to the ring, since the last step
        self.settings: list[dict[str, Any]] = []  # of the step that it waits for
        self.missing = {part.of for part in parts}  # whose gradients aren't made yet
        self.made, self.updated, self.home = streams.event(), streams.event(), streams.event()
        self.held: list[torch.Tensor] = []  # gradients, until the card has used them

    def again(self) -> None:
        """Wait for the gradients of the next step."""
        self.missing = {part.of for part in self.parts}


class Slot:
    """One buffer of the ring."""

    def __init__(self, memory: torch.Tensor, streams: Streams) -> None:
        self.memory = memory
        self.arrived, self.free = streams.event(), streams.event()


def groups_of(
    trained: Sequence[Trained], block: str, streams: Streams, *, numbers: int, divides: bool
) -> list[Group]:
    """Groups of at most so many numbers each where parameters can be divided, else of whole parameters."""
    groups: list[Group] = []
    parts: list[Part] = []
    room = numbers
    for one in trained:
        n, first, number = one.parameter.numel(), 0, 0
        if not divides and n > room and parts:
            groups.append(Group(parts, block, streams))
            parts, room = [], numbers
        while first < n:
            last = min(first + room // UNIT * UNIT, n) if divides and n - first > room else n
            if last == first:  # too little room for a part: another group
                groups.append(Group(parts, block, streams))
                parts, room = [], numbers
                continue
            parts.append(Part(one, number, first, last))
            one.others.append({})
            one.begun.append(False)
            room, first, number = room - (last - first), last, number + 1
            if room <= 0:
                groups.append(Group(parts, block, streams))
                parts, room = [], numbers
    if parts:
        groups.append(Group(parts, block, streams))
    return groups


def slot_bytes(group: Group, names: Sequence[str]) -> int:
    """Bytes that a group takes in a buffer: its states, its master weights and its gradients."""
    total = 0
    for part in group.parts:
        if part.of.streams:
            n_bytes = aligned((part.last - part.first) * part.of.parameter.element_size())
            vectors = len(names) + (2 if part.of.working is not None else 0)
            total += vectors * n_bytes
    return total


class Updates:
    """The ring and the groups that wait for it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Group],
        slots: Sequence[torch.Tensor],
        streams: Streams,
        *,
        names: Sequence[str],
        backlog_bytes: int,
    ) -> None:
        self._optimizer, self._shadow = optimizer, shadow_of(optimizer)
        self.groups, self._streams, self._names = tuple(groups), streams, tuple(names)
        self._slots = deque(Slot(memory, streams) for memory in slots)
        self._backlog = backlog_bytes
        self._waiting: list[Group] = []
        self._under_way: deque[Group] = deque()
        self._pace: deque[Event] = deque()
        self._spare: list[Event] = []
        self._settings: list[dict[str, Any]] | None = None
        self.of: dict[Trained, list[Group]] = defaultdict(list)
        for group in groups:
            for one in {part.of for part in group.parts}:
                self.of[one].append(group)

    # ---- settings of a step --------------------------------------------------------------------------------

    def settings(self) -> list[dict[str, Any]]:
        """Those of this step: learning rates and the like, as they are when they are first asked for."""
        if self._settings is None:
            self._settings = [_settings(group) for group in self._optimizer.param_groups]
        return self._settings

    def end_step(self) -> None:
        """The next update takes the settings of its own time. Raises PlacementError where they changed."""
        for group in self.groups:
            group.handed = False
        before, self._settings = self._settings, None
        if before is None:
            return
        for old, new in zip(before, map(_settings, self._optimizer.param_groups), strict=True):
            changed = [k for k in new if not _same(old.get(k), new[k])]
            if changed:
                raise PlacementError(
                    f"{changed[0]} was changed between backward() and step(): weights that were updated in "
                    "the backward pass have the old one",
                    'set it before backward(), or plan with updates="step"',
                )

    def restart(self) -> None:
        """Forget gradients that were made since the last step; none waits for the ring."""
        self._settings = None
        for group in self.groups:
            group.handed = False
            group.again()
        for one in self.of:
            one.gradient = one.narrow = None
            one.passes = one.uses = one.groups_left = 0

    # ---- gradients -----------------------------------------------------------------------------------------

    def made(self, one: Trained) -> None:
        """A gradient is there: groups that have all of theirs wait for the ring from now on."""
        for group in self.of[one]:
            group.missing.discard(one)
            if not group.missing:
                self.push(group)
        self.pump()

    def push(self, group: Group) -> None:
        """Let a group wait for the ring."""
        if group.waits or group.handed:
            return
        group.waits = group.handed = True
        group.settings = self.settings()
        self._streams.compute.record(group.made)
        self._waiting.append(group)

    def hold_back(self) -> None:
        """Wait until the host isn't far ahead, and gradients take no more than planned."""
        mark = self._spare.pop() if self._spare else self._streams.event()
        self._streams.compute.record(mark)
        self._pace.append(mark)
        while len(self._pace) > AHEAD:
            mark = self._pace.popleft()
            mark.block()
            self._spare.append(mark)
        self.pump()
        while self._held_bytes() > self._backlog and (self._waiting or self._under_way):
            if self._under_way:
                self._under_way[0].updated.block()
                self._released()
            else:
                self._slots[0].free.block()
            self.pump()

    def _held_bytes(self) -> int:
        held = {
            id(part.of): part.of.gradient.nbytes
            for group in self._waiting
            for part in group.parts
            if part.of.gradient is not None
        }
        held |= {id(tensor): tensor.nbytes for group in self._under_way for tensor in group.held}
        return sum(held.values())

    def _released(self) -> None:
        while self._under_way and self._under_way[0].updated.reached():
            self._under_way.popleft().held.clear()

    # ---- the ring ------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hand over groups, as many as the card is to know of."""
        self._released()
        while self._waiting and len(self._under_way) < len(self._slots) + QUEUED:
            self._begin(self._chosen())

    def _chosen(self) -> Group:
        ready = [group for group in self._waiting if group.made.reached()]
        return min(ready or self._waiting[:1], key=lambda group: group.order)

    def ready(self, groups: Iterable[Group]) -> None:
        """Let the computing stream wait for groups, which are handed over first if need be."""
        for group in groups:
            if group.waits:
                self._slots[0].free.block()
                self._begin(group)
            self._streams.compute.wait(group.updated)

    def finish(self) -> None:
        """Wait until everything is updated and home."""
        while self._waiting:
            self._slots[0].free.block()
            self._begin(self._chosen())
        self._streams.finish()
        self._released()

    def _begin(self, group: Group) -> None:
        self._waiting.remove(group)
        group.waits = False
        streams, slot = self._streams, self._slots[0]
        brought = self._laid_out(group, slot.memory)
        if any(part.of.streams for part in group.parts):
            self._slots.rotate(-1)
            streams.copy.wait(slot.free)
            streams.copy.wait(group.home)
            for part, views in zip(group.parts, brought, strict=True):
                for name, view in views.items():
                    source = _home(part, name)
                    if source is not None:
                        streams.copy.run(partial(_copy, view, part.cut(source)))
            streams.copy.record(slot.arrived)
            streams.unpack.wait(slot.arrived)
        streams.unpack.wait(group.made)
        results: list[tuple[Part, dict[str, Any]]] = []
        gradients = [part.of.gradient for part in group.parts]
        streams.unpack.run(partial(self._update, group, gradients, brought, group.settings, results))
        streams.unpack.record(group.updated)
        streams.unpack.run(partial(self._bring_home, results))
        streams.unpack.record(group.home)
        streams.unpack.record(slot.free)
        group.held = [gradient for gradient in gradients if gradient is not None]
        self._under_way.append(group)
        group.again()
        for one in group.missing:
            one.groups_left -= 1
            if one.groups_left <= 0:
                one.gradient = None

    def _laid_out(self, group: Group, memory: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Places of a buffer for a group's parts, by name: states, `master` and `gradient`."""
        places: list[dict[str, torch.Tensor]] = []
        at = 0
        for part in group.parts:
            views: dict[str, torch.Tensor] = {}
            if part.of.streams:
                names = [*self._names] + (["master", "gradient"] if part.of.working is not None else [])
                for name in names:
                    dtype = part.of.parameter.dtype
                    end = at + (part.last - part.first) * dtype.itemsize
                    flat = memory[at:end].view(dtype)
                    views[name] = flat.view(part.of.parameter.shape) if part.whole else flat
                    at += aligned(end - at)
            places.append(views)
        return places

    def _update(
        self,
        group: Group,
        gradients: Sequence[torch.Tensor | None],
        brought: Sequence[Mapping[str, torch.Tensor]],
        settings: Sequence[dict[str, Any]],
        results: list[tuple[Part, dict[str, Any]]],
    ) -> None:
        parameters: dict[nn.Parameter, tuple[Part, Mapping[str, torch.Tensor]]] = {}
        by_setting: dict[int, list[nn.Parameter]] = defaultdict(list)
        states = {}
        for part, made, views in zip(group.parts, gradients, brought, strict=True):
            one = part.of
            if made is None:
                continue
            values = views["master"] if "master" in views else part.cut(one.parameter.data)
            shadow = nn.Parameter(values)
            gradient = part.cut(made)
            if gradient.dtype is not shadow.dtype:
                views["gradient"].copy_(gradient)
                gradient = views["gradient"]
            shadow.grad = gradient
            if one.begun[part.number]:
                states[shadow] = dict(one.others[part.number])
                for name in self._names:
                    if name in one.states:
                        states[shadow][name] = views[name] if name in views else part.cut(one.states[name])
            parameters[shadow] = part, views
            by_setting[one.setting].append(shadow)
        if not parameters:
            return
        after = stepped(self._shadow, [(settings[n], by_setting[n]) for n in sorted(by_setting)], states)
        for shadow, (part, _) in parameters.items():
            one = part.of
            if one.working is not None:
                part.cut(one.working).copy_(shadow.data)
            results.append((part, {**after.get(shadow, {}), "master": shadow.data}))
            shadow.grad = None

    def _bring_home(self, results: Sequence[tuple[Part, dict[str, Any]]]) -> None:
        for part, after in results:
            one = part.of
            master = after.pop("master")
            if one.master is not None:
                part.cut(one.master).copy_(master, non_blocking=True)
            for name in self._names:
                state = after.get(name)
                if state is None:
                    continue
                if name not in one.states:  # on the card, where it was made
                    one.states[name] = state if part.whole else torch.empty_like(one.parameter.data)
                home = part.cut(one.states[name])
                if home.data_ptr() != state.data_ptr():
                    home.copy_(state, non_blocking=True)
            one.others[part.number] = {k: v for k, v in after.items() if k not in self._names}
            one.begun[part.number] = True
            self._say(one, after)

    def _say(self, one: Trained, after: Mapping[str, Any]) -> None:
        """Let the optimizer's own `state` have what it would have, in the same order."""
        if not after:  # as plain SGD
            return
        others = one.others[0]
        self._optimizer.state[one.parameter] = {
            k: one.states[k] if k in self._names else others.get(k, after[k]) for k in after
        }


def _home(part: Part, name: str) -> torch.Tensor | None:
    if name == "master":
        return part.of.master
    return part.of.states.get(name) if part.of.begun[part.number] else None


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _same(a: Any, b: Any) -> bool:  # noqa: ANN401  # settings of any kind
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(torch.equal(a, b))
    return bool(a == b)
