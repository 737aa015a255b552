"""Blocks of a model over several cards: each computes on its own, and what goes in follows it there.

What a block returns goes back to where it was called from, so the code between blocks finds everything on
one card, as in the unplaced model. Where that code only passes it on to other blocks, which the first pass
of such a call shows, it stays where it is: then it crosses once, when the next card takes over.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

from probes.placement.runtime.blocks.hostside import (
    Crossing,
    Guard,
    exchanged,
    is_compiled,
    on_device,
    tensors_in,
    uncompiled,
)

Move = Callable[[Any, int], Any]
MOST_KINDS: Final = 64  # of calls that are remembered
_HARMLESS: Final = frozenset(
    {"size", "dim", "ndimension", "numel", "stride", "element_size", "is_floating_point", "__len__"}
)
_HARMLESS_ATTRIBUTES: Final = frozenset({"shape", "dtype", "ndim", "requires_grad", "layout"})


@dataclass(frozen=True)
class Moment:
    """How things were before a call."""

    now: int | None
    made: "dict[int, tuple[torch.Tensor, OnCard]] | None"
    staying: frozenset[int]
    device: int | None  # torch's current GPU
    watched: bool  # the watcher is torch's current mode


class Cards:
    """Which card computes now. Card 0 is where the code between blocks finds its tensors."""

    def __init__(self, devices: tuple[torch.device, ...], move: Move | None = None) -> None:
        self.devices = devices
        self.move = move or self._moved
        self.now: int | None = None  # None: no block is being called
        self.made: dict[int, tuple[torch.Tensor, OnCard]] | None = None  # in a pass that is watched
        self.used: set[int] = set()  # guards whose outputs are used between blocks, in such a pass
        self.staying: frozenset[int] = frozenset()  # guards whose outputs stay on their card in this pass
        self._watcher: _Watch | None = None  # the last one
        self.seen: dict[Hashable, frozenset[int]] = {}  # the same, for each kind of call

    def _moved(self, thing: Any, card: int) -> Any:
        return exchanged(thing, partial(on_device, device=self.devices[card]))

    def current(self, card: int) -> AbstractContextManager[object]:
        """The card is torch's current one meanwhile: streams and kernels are its own."""
        return on_card(self.devices[card])

    @contextmanager
    def watch(self, call: Hashable) -> Iterator[None]:
        """In the first whole pass of a kind of call, see which blocks' outputs are used between blocks.

        A pass that fails forgets what was seen: the next one is watched again.
        """
        if self.made is not None:
            yield
            return
        before, known = self.staying, self.seen.pop(call, None)
        if known is not None:
            self.staying = known
            try:
                yield
                self.seen[call] = known
            finally:
                self.staying = before
            return
        self.made, self.used, self.staying = {}, set(), frozenset()
        try:
            with _Watch(self) as self._watcher:
                yield
            if len(self.seen) < MOST_KINDS:
                self.seen[call] = frozenset(id(guard) for _, guard in self.made.values()) - self.used
        finally:
            self.made, self.staying = None, before

    def unwatched(self) -> AbstractContextManager[object]:
        """Nobody watches meanwhile: where a mode is active, torch's attention takes another way."""
        if not self._is_watched():
            return nullcontext()
        away: AbstractContextManager[object] = _pop_mode_temporarily()
        return away

    def _is_watched(self) -> bool:
        return self._watcher is not None and _get_current_function_mode() is self._watcher

    def moment(self) -> Moment:
        """How things are now."""
        device = torch.cuda.current_device() if self.devices[0].type == "cuda" else None
        return Moment(self.now, self.made, self.staying, device, self._is_watched())

    def back(self, before: Moment) -> None:
        """Be as before a call that failed: torch's own contexts don't end where their end is interrupted."""
        self.now, self.made, self.staying = before.now, before.made, before.staying
        if before.device is not None:
            torch.cuda.set_device(before.device)
        if self._is_watched() and not before.watched:
            _pop_mode()
        elif before.watched and not self._is_watched():
            _push_mode(self._watcher)


def on_card(device: torch.device) -> AbstractContextManager[object]:
    """The device is torch's current one meanwhile, where it is a GPU."""
    if device.type != "cuda":
        return nullcontext()
    current: AbstractContextManager[object] = torch.cuda.device(device)
    return current


class OnCard(Guard):
    """The forward of a block's module on its card."""

    def __init__(self, forward: Callable[..., Any], cards: Cards, card: int) -> None:
        super().__init__(forward)
        self._cards, self._card = cards, card

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Bring the inputs to the card, compute there, give the output back."""
        if is_compiled():
            return uncompiled(self, args, kwargs)
        cards, before = self._cards, self._cards.moment()
        caller = before.now
        try:
            cards.now = self._card
            trip = Crossing(lambda one: cards.move(one, self._card), lambda one: cards.move(one, caller or 0))
            given, named = trip.go(args), trip.go(kwargs)
            with cards.current(self._card), cards.unwatched():
                output = self.forward(*given, **named)
            cards.now = caller
        except BaseException:
            cards.back(before)
            raise
        if caller is None and id(self) in cards.staying:
            trip.write()
            return output
        output = trip.come(output)
        if caller is None and cards.made is not None:
            cards.made.update((id(tensor), (tensor, self)) for tensor in tensors_in(output))
        return output


class Across(Guard):
    """The forward of a whole model over several cards: its output is on card 0."""

    def __init__(self, forward: Callable[..., Any], cards: Cards) -> None:
        super().__init__(forward)
        self._cards = cards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One pass."""
        cards, before = self._cards, self._cards.moment()
        try:
            with cards.current(0), cards.watch(kind_of(args, kwargs)):
                return cards.move(self.forward(*args, **kwargs), 0)
        except BaseException:
            cards.back(before)
            raise


def kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """What decides, as a rule, how a model goes from block to block: which arguments are given and set."""

    def kind(value: object) -> object:
        return value if value is None or isinstance(value, bool) else type(value)

    return tuple(map(kind, args)), frozenset((name, kind(value)) for name, value in kwargs.items())


class _Watch(TorchFunctionMode):  # type: ignore[misc]
    """Notes which blocks' outputs torch's operations between blocks read."""

    def __init__(self, cards: Cards) -> None:
        super().__init__()
        self._cards = cards

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = self._cards.made
        if self._cards.now is None and made and not _is_harmless(func):
            for tensor in tensors_in((args, kwargs or {})):
                if id(tensor) in made:
                    self._cards.used.add(id(made[id(tensor)][1]))
        return func(*args, **(kwargs or {}))


def _is_harmless(func: Any) -> bool:
    """Whether it gives the same on any card: shapes and types."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    name = getattr(func, "__name__", "")
    return name in _HARMLESS or (name == "__get__" and attribute in _HARMLESS_ATTRIBUTES)
