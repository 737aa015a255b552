"""Copies of a block's weights while `torch.func` transforms what it computes (jvp, vmap, jacfwd)."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch._functorch import pyfunctorch

# the innermost transform under way, or None; each call of a block asks
transform: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack


def untransformed(step: Callable[..., None]) -> Callable[..., None]:
    """The same step outside all transforms, which refuse writes into memory that they don't know."""

    @wraps(step)
    def plain(*args: Any, **kwargs: Any) -> None:
        with pyfunctorch.temporarily_clear_interpreter_stack():
            step(*args, **kwargs)

    return plain
