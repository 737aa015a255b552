"""A placed model's handle: takes the placement away again, and reports what it takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from probes.placement.runtime.blocks.homes import Homes
from probes.placement.runtime.blocks.hostside import Guard
from probes.placement.runtime.blocks.moving import Moving
from probes.placement.runtime.engine import Engine, refuse_training
from probes.placement.runtime.settling import Settling
from probes.placement.values import Plan


class Called(Guard):
    """The forward of a moving block's module: its weights are there meanwhile."""

    def __init__(self, forward: Callable[..., Any], engine: Engine, one: Moving) -> None:
        super().__init__(forward)
        self._engine, self._one = engine, one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Bring the weights, compute, release them."""
        self._engine.enter(self._one, args, kwargs)
        try:
            return self.forward(*args, **kwargs)
        finally:
            self._engine.leave(self._one)


class WholePass(Guard):
    """The forward of a placed model. Threads take turns."""

    def __init__(
        self, forward: Callable[..., Any], engine: Engine, model: nn.Module, *, trainable: bool
    ) -> None:
        super().__init__(forward)
        self._engine, self._model, self._trainable = engine, model, trainable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One pass."""
        with self._engine.lock:
            if torch.is_grad_enabled():
                refuse_training("", (self._model,), args, kwargs, trainable=self._trainable)
            return self.forward(*args, **kwargs)


class Handle:
    """A placed model: `model` is called as before, `remove()` gives it back as it was."""

    def __init__(
        self, model: nn.Module, plan: Plan, engine: Engine, homes: Homes, settling: Settling
    ) -> None:
        self.model = model
        self.plan = plan
        self.engine = engine
        self._homes = homes
        self._settling = settling

    def remove(self) -> None:
        """Give the model back: the same parameter objects with their values in host memory, and no hooks.

        Twice does no harm. Raises torch's error where the GPU can't give values back any more.
        """
        with self.engine.lock, torch.inference_mode(False), torch.no_grad():
            self.engine.settle()
            self._homes.unguard()
            for one in self.engine.moving:
                for place in one.places:
                    place.give_back(self._homes.parameter(place.entry))
            self._homes.restore()
            self.engine.moving.clear()
            self._settling.clear()
