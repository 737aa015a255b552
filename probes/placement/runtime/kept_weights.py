"""Finds out whether a call of a moving block keeps weights, to whose place others come soon.

What it keeps, or a view of it, would show other numbers then. Only a block's first calls are asked.
"""

import gc
from collections.abc import Callable
from operator import gt
from sys import getrefcount
from typing import Any, Final

import torch

from probes.core.errors import PlacementError
from probes.placement.held import exchange
from probes.placement.runtime.offloaded import MovingBlock

# Of a tensor, its views and whatever else refers to it outside Python; of a storage, its tensors. Older torch
# doesn't say.
_USES: Final[Callable[[torch.Tensor], int]] = getattr(torch.Tensor, "_use_count", lambda _: 0)
_STORAGE_USES: Final[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


def count_references(block: MovingBlock) -> tuple[int, ...]:
    """References to the weights of a block's present call, and to the memory of all buffers."""
    buffers = [buffer for buffer in (*block.staging, block.decode_buffer) if buffer is not None]
    if block.inside is None or not buffers:
        return ()
    of_weights = sum(getrefcount(present) + _USES(present) for present in block.inside.present)
    return of_weights, _STORAGE_USES(buffers[0].memory.untyped_storage()._cdata)


def require_let_go(block: MovingBlock) -> None:
    """Require of a block's call that has ended that it keeps no weight.

    What attributes of its modules hold becomes a copy. Raises PlacementError for weights that are kept
    elsewhere.
    """

    def own(thing: Any) -> Any:
        return thing.clone() if isinstance(thing, torch.Tensor) and block.holds(thing) else thing

    block.checks -= 1
    if not any(map(gt, count_references(block), block.references)):
        return
    if exchange([module for top in block.stored.block.modules for module in top.modules()], own):
        block.checks += 1  # it may do so again
    for collect in (int, gc.collect):  # errors and closures may refer to themselves
        collect()
        if count_references(block)[0] <= block.references[0]:
            return
    raise PlacementError(
        f"a call of {block.name} keeps a weight, or a view of one, where others come to its place",
        "let it keep a copy, weight.clone(); or call remove() of the handle",
    )
