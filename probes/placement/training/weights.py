"""Weights in the dtype that autocast computes in, whose master weights are in host memory.

Under autocast a linear layer's weight is cast before each product, and the cast is kept until the backward
pass. Here the cast is all that the card has: it is made once, when the weight is updated. Products have the
same operands as before, so they have the same bits.

The parameter itself has its shape, dtype and device, and NaN for every number: what reads it elsewhere can't
mistake it for a value. Its gradient is in its own dtype, as ever.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.runtime.packed_tables import autocast_dtype
from probes.placement.training.activations import in_backward
from probes.placement.training.groups import Trained

# Modules all of whose uses of `weight` are products that autocast casts it for, by their exact class
CAST_BY_AUTOCAST: Final = frozenset(
    {
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.conv.Conv1d",
        "torch.nn.modules.conv.Conv2d",
        "torch.nn.modules.conv.Conv3d",
        "transformers.pytorch_utils.Conv1D",
    }
)


def is_cast(owner: nn.Module, key: str) -> bool:
    """Whether autocast casts a module's parameter whenever it is used."""
    kind = type(owner)
    return key == "weight" and f"{kind.__module__}.{kind.__qualname__}" in CAST_BY_AUTOCAST


def placeholder(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One NaN, repeated to a shape: the bytes of one number."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)


class GoneGradient(torch.Tensor):  # type: ignore[misc]
    """In place of a gradient that has been used: whatever asks for its numbers gets PlacementError.

    With nothing there, `clip_grad_norm_` would do nothing, and say nothing.
    """

    @staticmethod
    def __new__(cls: type["GoneGradient"], parameter: torch.Tensor) -> "GoneGradient":  # noqa: D102
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Say what it is."""
        return "GoneGradient()"

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Any,  # noqa: ANN401  # torch's OpOverload
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: object = None,
    ) -> Any:  # noqa: ANN401
        """Raise, except where autograd looks at it without its numbers."""
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise PlacementError(
            f"the gradient was used for the update and is gone ({function})",
            "call zero_grad() after each step(), without set_to_none=False; plan with accumulate= as many "
            "backward passes as a step has; to clip gradients or look at them, plan with updates='step'",
        )


class _Use(torch.autograd.Function):  # type: ignore[misc]
    """The working copy as the parameter's values; the gradient goes to the parameter, in its dtype."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, one: Trained) -> torch.Tensor:  # noqa: ANN401
        ctx.one = one
        assert one.working is not None
        return one.working.detach()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        (gradient,) = given
        one: Trained = ctx.one
        one.uses += 1
        hooks = one.parameter._backward_hooks or len(one.parameter._post_accumulate_grad_hooks or ()) > 1
        one.narrow = gradient if one.uses == 1 and not hooks else None  # hooks may change it in its own dtype
        return gradient.to(one.parameter.dtype), None


class Casts:
    """How long autocast keeps its casts: gradients of all uses of one cast are added up in its dtype."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._probe = nn.Parameter(torch.zeros(1, 1, device=device))
        self._cast: object = None  # the probe's, as the graph has it
        self._number = 0

    def begin(self) -> None:
        """The model is called: casts of the call before stay as long as torch's own cache has them."""
        before, self._cast = self._cast, torch.mm(self._probe, self._probe).grad_fn.next_functions[0][0]
        self._number += before is not self._cast

    def of(self, one: Trained) -> torch.Tensor:
        """The working copy, the same tensor for all uses of one cast."""
        if not torch.is_grad_enabled() or in_backward() or not torch.is_autocast_cache_enabled():
            made: torch.Tensor = _Use.apply(one.parameter, one)
            return made
        if one.cast is None or one.cast[0] != self._number:
            one.cast = self._number, _Use.apply(one.parameter, one)
        return one.cast[1]


def computed_with(one: Trained, owner: nn.Module, key: str, casts: Casts) -> Callable[..., Any]:
    """A forward of the owner with the working copy. Outside autocast it raises PlacementError."""
    forward, device = owner.forward, casts.device
    assert one.working is not None
    dtype = one.working.dtype

    @functools.wraps(forward)
    def with_copy(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the forward has them
        if autocast_dtype(device.type) != dtype:
            raise PlacementError(
                f"{one.name} is on the card as {dtype}, and its layer was called outside autocast",
                f"call the model under torch.autocast({device.type!r}, dtype={dtype}), or plan without",
            )
        held = owner._parameters
        before = held[key]
        if before is not one.parameter:
            raise PlacementError(
                f"{one.name} was replaced by another parameter", "remove() the training, plan and train again"
            )
        held[key] = casts.of(one)
        try:
            return forward(*args, **kwargs)
        finally:
            held[key] = before

    return with_copy
