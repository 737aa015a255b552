"""With the objective `fast`: few rows are multiplied with experts straight where the table says that they
are.

Nothing is gathered or unpacked: two kernels a layer read the chosen experts, packed or not, in VRAM or over
the link. Sums are float32's, rounded once, so outputs aren't those of the library to the last bit. Other
calls are the module's own.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from probes.placement.packing import launch
from probes.placement.packing.format import NARROWEST_PRODUCT
from probes.placement.runtime.experts import ExpertGroup, ExpertTensor, PlacedExperts
from probes.placement.runtime.hooks import ForwardHook, call_uncompiled, is_compiled

MOST_TOKENS: Final = 8  # of one call
_SILU: Final = ("SiLU", "SiLUActivation", "silu")
_NAMES: Final = ("gate_up_proj", "down_proj")


class ExpertsHook(ForwardHook):
    """The forward of a module of fused experts, whose calls of few tokens read them in place."""

    def __init__(self, forward: Callable[..., Any], placed: PlacedExperts, group: ExpertGroup) -> None:
        super().__init__(forward)
        self._placed, self._group = placed, group
        self._gate_up, self._down = _matrices(group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The sum of the chosen experts' outputs, by the kernels where they can compute it."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        if len(args) == 3 and not kwargs and self._can_multiply(*args):
            return self._multiplied(*args)
        return self.forward(*args, **kwargs)

    def _can_multiply(self, x: Any, ids: Any, shares: Any) -> bool:
        if not all(isinstance(one, torch.Tensor) for one in (x, ids, shares)):
            return False
        tokens = x.shape[0] if x.dim() == 2 else 0
        return (
            0 < tokens <= MOST_TOKENS
            and x.dtype is self._down.entry.dtype
            and x.shape[1] == self._down.shape[0]
            and ids.dim() == 2
            and ids.shape == shares.shape
            and ids.shape[0] == tokens
            and ids.shape[1] > 0
            and x.device == ids.device == shares.device
            and not (torch.is_grad_enabled() and (x.requires_grad or shares.requires_grad))
            and not torch.is_autocast_enabled()
        )

    def _multiplied(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        cache, group = self._placed.cache, self._group
        rows = slice(group.first, group.first + len(group.experts))
        forms = self._gate_up.item.form, self._down.item.form
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch.multiply_experts(
            x.contiguous(),
            ids.reshape(-1).to(torch.int64),
            shares.reshape(-1).contiguous(),
            out,
            gate_up=cache.table[rows, self._gate_up.column :],
            down=cache.table[rows, self._down.column :],
            counts=cache.counts[rows],
            inner=self._down.shape[1],
            bases=(forms[0].base, forms[1].base) if forms[0] and forms[1] else None,
        )
        return out


def can_be_multiplied(placed: PlacedExperts, group: ExpertGroup) -> bool:
    """Whether the kernels compute what the module does: gate and up projections behind one another, and SiLU.

    Modules of transformers' registry say so.
    """
    module = group.module
    layout = (("has_gate", True), ("is_concatenated", True), ("is_transposed", False), ("has_bias", False))
    if not placed.by_kernel or not group.fused or getattr(module, "has_post_expert_norm", False):
        return False
    if any(getattr(module, name, None) is not value for name, value in layout):
        return False
    act = getattr(module, "act_fn", None)
    gate = getattr(getattr(type(module), "_apply_gate", None), "__name__", "")
    if getattr(act, "__name__", type(act).__name__) not in _SILU or gate != "_default_apply_gate":
        return False
    if {tensor.entry.owners[0][1] for tensor in group.tensors} != set(_NAMES):
        return False
    gate_up, down = _matrices(group)
    outputs, inner = down.shape
    if gate_up.shape != (2 * inner, outputs) or (gate_up.item.form is None) != (down.item.form is None):
        return False
    return gate_up.item.form is None or min(outputs, inner) >= NARROWEST_PRODUCT


def _matrices(group: ExpertGroup) -> tuple[ExpertTensor, ExpertTensor]:
    by_name = {tensor.entry.owners[0][1]: tensor for tensor in group.tensors}
    return by_name[_NAMES[0]], by_name[_NAMES[1]]
