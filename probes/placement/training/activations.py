"""Activations that a block doesn't keep for its backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose saved tensors are made again in the backward pass, by torch's own checkpoint."""

    @functools.wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the forward has them
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again
