"""Starts a kernel again without Triton looking at its arguments, which takes about 20 us of Python each time.

What decides which compiled kernel is right is known here: whole numbers and constants, which are a part of
the caller's key, and whether addresses are multiples of 16.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

_ALIGNED: Final = 16  # bytes: what Triton compiles another kernel for
_known: dict[Hashable, tuple[Callable[..., object], tuple[Any, ...]]] = {}


class Kernel(Protocol):
    """A kernel as Triton gives it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """What starts it, and returns what was compiled for the arguments."""


def start_again(key: Hashable, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float]) -> bool:
    """Start the kernel that `start` has started with this key; False where that isn't known, or not right."""
    known = _known.get(key)
    if known is None:
        return False
    addresses = [tensor.data_ptr() for tensor in tensors]
    if not _aligned(addresses):
        return False
    begin, constants = known
    begin(*addresses, *numbers, *constants)
    return True


def start(
    kernel: Kernel,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int | float],
    constants: Mapping[str, Any],
    *,
    options: Mapping[str, int],
    key: Hashable,
) -> None:
    """Start `kernel[grid]`, compiled if need be, and remember it under `key`.

    Arguments are in the order of its parameters: tensors, numbers, constants. `options` are Triton's own.
    With the same key, all but the tensors' addresses and the floating-point numbers must be the same.
    """
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    # The interpreter gives no compiled kernel. Triton before 3.3 wants no constants when one is started, and
    # doesn't list them in its signature.
    types = list(getattr(getattr(compiled, "src", None), "signature", {}).values())
    if types.count("constexpr") == len(constants) and _aligned([tensor.data_ptr() for tensor in tensors]):
        _known[key] = compiled[(*grid, 1, 1)[:3]], tuple(constants.values())


def _aligned(addresses: Sequence[int]) -> bool:
    together = 0
    for address in addresses:
        together |= address
    return not together % _ALIGNED
