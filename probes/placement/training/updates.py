"""Updates of weights whose optimizer states are in host memory.

Once the gradients of a group (`training.groups`) are made, its states (and its master weights, where the card
has a copy in another dtype) are copied into one buffer of a ring, the optimizer's own code updates them
there, and they are copied back. Copies to the card are on one stream, updates and copies back on another, so
both directions of the link are busy at once.

Of the groups that wait, the one whose block is called first in a forward pass goes first: during a backward
pass that is the latest whose gradients were made; what is left when it ends is updated while the next
forward pass runs, and each block waits for its own groups only.

The host hands over as many groups as there are buffers and QUEUED more, which wait on the card for theirs:
the link isn't idle while the host waits for something else. It never runs more than AHEAD blocks ahead of
the card: so the order is chosen by what the card has done, and gradients don't pile up.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.runtime.streams import Event, Streams
from probes.placement.training.groups import Group, Part, Span, Trained

QUEUED: Final = 4  # groups that wait on the card for a buffer
AHEAD: Final = 2  # blocks that the host hands over before the card has done the one before them

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
    groups: Sequence[tuple[dict[str, Any], list[torch.Tensor]]],
    states: Mapping[torch.Tensor, dict[str, Any]],
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """Let the optimizer's code update parameters that have gradients. Returns their states afterwards."""
    shadow.param_groups = [{**settings, "params": parameters} for settings, parameters in groups]
    shadow.state = defaultdict(dict, states)
    type(shadow).step(shadow)
    after: Mapping[torch.Tensor, dict[str, Any]] = shadow.state
    shadow.state, shadow.param_groups = defaultdict(dict), []
    return after


class Slot:
    """One buffer of the ring."""

    def __init__(self, memory: torch.Tensor, streams: Streams) -> None:
        self.memory = memory
        self.arrived, self.free = streams.event(), streams.event()


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
        self._gradient_bytes = 0  # of groups that wait, or are under way
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
        complete = False
        for group in self.of[one]:
            group.missing.discard(one)
            if not group.missing:
                self.push(group)
                complete = True
        if complete:
            self.hold_back()

    def push(self, group: Group) -> None:
        """Let a group wait for the ring."""
        if group.waits or group.handed:
            return
        group.handed = True
        if not group.spans:
            with _outside(self._streams.device):
                self._update_in_place(group)
            return
        group.waits = True
        group.settings = self.settings()
        group.taken_bytes = group.gradient_bytes
        self._gradient_bytes += group.taken_bytes
        group.is_made = False
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
        while self._gradient_bytes > self._backlog and (self._waiting or self._under_way):
            if self._under_way:
                self._under_way[0].updated.block()
                self._released()
            else:
                self._slots[0].free.block()
            self.pump()

    def _released(self) -> None:
        while self._under_way and self._under_way[0].updated.reached():
            group = self._under_way.popleft()
            self._gradient_bytes -= group.taken_bytes
            group.held.clear()

    # ---- the ring ------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hand over groups, as many as the card is to know of."""
        self._released()
        while self._waiting and len(self._under_way) < len(self._slots) + QUEUED:
            self._begin(self._chosen())

    def _chosen(self) -> Group:
        ready = []
        for group in self._waiting:  # in the order in which the computing stream makes them
            group.is_made = group.is_made or group.made.reached()
            if not group.is_made:
                break
            ready.append(group)
        return min(ready or self._waiting[:1], key=lambda group: group.order)

    def ready(self, groups: Iterable[Group]) -> None:
        """Let the computing stream wait for groups, which are handed over first if need be."""
        for group in groups:
            if group.waits:
                self._slots[0].free.block()
                self._begin(group)
            if group.spans:
                self._streams.compute.wait(group.updated)

    def finish(self) -> None:
        """Wait until everything is updated and home."""
        while self._waiting:
            self._slots[0].free.block()
            self._begin(self._chosen())
        self._streams.finish()
        self._released()

    def _begin(self, group: Group) -> None:
        with _outside(self._streams.device):
            self._hand_over(group)

    def _hand_over(self, group: Group) -> None:
        self._waiting.remove(group)
        group.waits = False
        streams, slot = self._streams, self._slots[0]
        brought: list[dict[str, torch.Tensor]] = []
        self._slots.rotate(-1)
        streams.copy.wait(slot.free)
        streams.copy.wait(group.home)
        at = 0
        for span in group.spans:
            brought.append(span.views(slot.memory, at))
            at += span.slot_bytes
        streams.copy.run(partial(_copy_all, _on_their_way(group.spans, brought)))
        streams.copy.record(slot.arrived)
        streams.unpack.wait(slot.arrived)
        streams.unpack.wait(group.made)
        gradients = {part: part.of.gradient for part in group.parts}
        updated: list[_Update] = []
        streams.unpack.run(partial(self._update, group, gradients, brought, group.settings, updated))
        streams.unpack.record(group.updated)
        streams.unpack.run(partial(self._bring_home, updated))
        streams.unpack.record(group.home)
        streams.unpack.record(slot.free)
        group.held = [gradient for gradient in gradients.values() if gradient is not None]
        self._under_way.append(group)
        self._taken(group)

    def _update_in_place(self, group: Group) -> None:
        """Update parts whose states are on the card there and then: neither link nor buffer is needed."""
        gradients = {part: part.of.gradient for part in group.parts}
        updated: list[_Update] = []
        streams = self._streams
        streams.compute.run(partial(self._update, group, gradients, (), self.settings(), updated))
        streams.compute.run(partial(self._bring_home, updated))
        self._taken(group)

    def _taken(self, group: Group) -> None:
        """A group has its gradients."""
        group.again()
        for one in group.missing:
            one.groups_left -= 1
            if one.groups_left <= 0:
                one.gradient = None

    def _update(
        self,
        group: Group,
        gradients: Mapping[Part, torch.Tensor | None],
        brought: Sequence[Mapping[str, torch.Tensor]],
        settings: Sequence[dict[str, Any]],
        updated: "list[_Update]",
    ) -> None:
        for span, views in zip(group.spans, brought, strict=True):
            for parts in _together(span, gradients):
                updated.append(_in_slot(span, views, parts, gradients))
        for part in group.resident:
            gradient = gradients[part]
            if gradient is not None:
                values = part.cut(part.of.parameter.data)
                states = {name: part.cut(state) for name, state in part.of.states.items()}
                updated.append(_Update((part,), values, part.cut(gradient), states, None))
        if not updated:
            return
        by_setting: dict[int, list[torch.Tensor]] = defaultdict(list)
        states = {}
        for each in updated:
            each.values.grad = each.gradient
            by_setting[each.parts[0].of.setting].append(each.values)
            if each.begun:
                states[each.values] = {**each.others(), **each.states}
        after = stepped(self._shadow, [(settings[n], by_setting[n]) for n in sorted(by_setting)], states)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for each in updated:
            each.after = dict(after.get(each.values, {}))
            each.values.grad = None
            if each.span is not None and each.span.narrow:
                at = 0
                flat = each.values.view(-1)
                for part in each.parts:
                    assert part.of.working is not None
                    n = part.last - part.first
                    copies.append((part.cut(part.of.working), part.shaped(flat[at : at + n])))
                    at += n
        if copies:
            torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])

    def _bring_home(self, updated: "Sequence[_Update]") -> None:
        for each in updated:
            span = each.span
            if span is not None and span.narrow:
                span.cut(span.homes["master"], each.parts).copy_(each.values.view(-1), non_blocking=True)
            others = {k: v for k, v in each.after.items() if k not in self._names}
            for name in self._names:
                state = each.after.get(name)
                if state is None:
                    continue
                if span is not None:
                    span.cut(span.homes[name], each.parts).copy_(state.view(-1), non_blocking=True)
                    continue
                (part,) = each.parts  # on the card, where it was made
                if name not in part.of.states:
                    whole = part.whole
                    part.of.states[name] = state if whole else torch.empty_like(part.of.parameter.data)
                home = part.cut(part.of.states[name])
                if home.data_ptr() != state.data_ptr():
                    home.copy_(state, non_blocking=True)
            for part in each.parts:
                part.of.others[part.number] = others
                part.of.begun[part.number] = True
                self._say(part.of, each.after)

    def _say(self, one: Trained, after: Mapping[str, Any]) -> None:
        """Let the optimizer's own `state` have what it would have, in the same order."""
        if not after:  # as plain SGD
            return
        others = one.others[0]
        self._optimizer.state[one.parameter] = {
            k: one.states[k] if k in self._names else others.get(k, after[k]) for k in after
        }

    def update_at_once(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """Update parameters by their gradients as plain torch does. `parameters`: of each parameter group."""
        pairs = zip(self._optimizer.param_groups, parameters, strict=True)
        self._shadow.param_groups = [{**group, "params": list(chosen)} for group, chosen in pairs if chosen]
        if self._shadow.param_groups:
            self._shadow.state = self._optimizer.state
            type(self._shadow).step(self._shadow)
        self._shadow.state, self._shadow.param_groups = defaultdict(dict), []

    def share(self) -> None:
        """Let neighbours whose other states, such as a step's number, are equal have them in common."""
        for span in (span for group in self.groups for span in group.spans):
            for part, after in pairwise(span.parts):
                one, other = part.of.others[part.number], after.of.others[after.number]
                if one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one):
                    after.of.others[after.number] = one


@dataclass(eq=False)
class _Update:
    """Numbers that the optimizer sees as one parameter: parts of a span, or one part on the card."""

    parts: Sequence[Part]
    values: torch.Tensor  # on the card, and all that follow
    gradient: torch.Tensor
    states: Mapping[str, torch.Tensor]
    span: Span | None
    after: dict[str, Any] = field(default_factory=dict)  # the optimizer's states of it

    @property
    def begun(self) -> bool:
        """Whether there are states."""
        first = self.parts[0]
        return first.of.begun[first.number]

    def others(self) -> dict[str, Any]:
        """States of other sizes, such as a step's number; its own, if parts that have them wait."""
        first = self.parts[0]
        others = first.of.others[first.number]
        sharing = 1 if self.span is None else sum(p.of.others[p.number] is others for p in self.span.parts)
        if sharing > len(self.parts):
            return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in others.items()}
        return dict(others)


@contextmanager
def _outside(device: torch.device) -> Iterator[None]:
    """Leave autocast and inference mode of the pass that is under way: updates are the same in any."""
    with torch.inference_mode(mode=False), ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def _on_their_way(
    spans: Sequence[Span], brought: Sequence[Mapping[str, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies to the card, as destination and source."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for span, views in zip(spans, brought, strict=True):
        begun = any(part.of.begun[part.number] for part in span.parts)
        copies += [(views[name], span.homes[name]) for name in span.names if begun or name == "master"]
    return copies


def _copy_all(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, source in copies:
        to.copy_(source, non_blocking=True)


def _together(span: Span, gradients: Mapping[Part, torch.Tensor | None]) -> list[list[Part]]:
    """The parts of a span that have gradients, those together that can be updated as one tensor."""
    runs: list[list[Part]] = []
    before: Part | None = None
    for part in span.parts:
        if gradients[part] is None:
            before = None
            continue
        if before is not None and span.narrow and _alike(before, part):
            runs[-1].append(part)
        else:
            runs.append([part])
        before = part
    return runs


def _alike(one: Part, other: Part) -> bool:
    begun = one.of.begun[one.number]
    if begun is not other.of.begun[other.number]:
        return False
    return not begun or one.of.others[one.number] is other.of.others[other.number]


def _in_slot(
    span: Span,
    views: Mapping[str, torch.Tensor],
    parts: Sequence[Part],
    gradients: Mapping[Part, torch.Tensor | None],
) -> _Update:
    """Parts of a span in a buffer, their gradients in their own dtype."""
    first = parts[0]
    shaped = first.shaped if len(parts) == 1 else torch.Tensor.detach
    held = [gradients[part] for part in parts]
    made = [part.cut(gradient) for part, gradient in zip(parts, held, strict=True) if gradient is not None]
    states = {
        name: shaped(span.cut(views[name], parts))
        for name in span.names
        if name != "master" and name in first.of.states
    }
    if not span.narrow:
        return _Update(parts, first.cut(first.of.parameter.data), made[0], states, span)
    values = shaped(span.cut(views["master"], parts))
    if len(parts) == 1 and made[0].dtype is span.dtype:
        return _Update(parts, values, made[0], states, span)
    numbers = span.cut(views["gradient"], parts)
    places = list(numbers.split([part.last - part.first for part in parts]))
    torch._foreach_copy_(places, [gradient.reshape(-1) for gradient in made])
    return _Update(parts, values, shaped(numbers), states, span)


def _same(a: Any, b: Any) -> bool:  # noqa: ANN401  # settings of any kind
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(torch.equal(a, b))
    return bool(a == b)
