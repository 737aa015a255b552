"""Finds out whether a call of a moving block keeps weights, to whose place others come soon.

What it keeps, or a view of it, would show other numbers then. Later calls are only asked for new views.
"""

import gc
from collections.abc import Callable
from sys import getrefcount
from typing import Any, Final

import torch

from probes.core.errors import PlacementError
from probes.placement.attributes import exchange
from probes.placement.runtime.offloaded import MovingBlock

# of a tensor by its views, and whatever else refers to it outside Python; older torch doesn't say
_USES: Final[Callable[[torch.Tensor], int]] = getattr(torch.Tensor, "_use_count", lambda _: 0)


def count_references(block: MovingBlock) -> int:
    """References to the weights of a block's present call; 0 where they don't come and go."""
    present = block.inside.present if block.inside is not None and block.spans else []
    return sum([getrefcount(weight) + _USES(weight) for weight in present])


def require_let_go(block: MovingBlock) -> None:
    """Require of a block's call that has ended that it keeps no weight.

    What attributes of its modules hold becomes a copy. Raises PlacementError where one of its first calls
    keeps weights elsewhere.
    """
    if block.uses() <= block.references[0] and count_references(block) <= block.references[1]:
        block.checks -= block.checks > 0
        return

    def own(thing: Any) -> Any:
        return thing.clone() if isinstance(thing, torch.Tensor) and block.holds(thing) else thing

    is_kept = exchange([module for top in block.stored.block.modules for module in top.modules()], own)
    if not block.checks:
        return
    block.checks -= not is_kept  # else it may do so again
    for collect in (int, gc.collect):  # errors and closures may refer to themselves
        collect()
        if count_references(block) <= block.references[1]:
            return
    raise PlacementError(
        f"a call of {block.name} keeps a weight, or a view of one, where others come to its place",
        "let it keep a copy, weight.clone(); or call remove() of the handle",
    )
