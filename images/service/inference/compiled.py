"""BERT's forward pass through torch.compile: one program for a single row, one for several, of any length.

Batches have a new shape all the time, and a program takes seconds to make. Sizes of 1 always get programs of
their own, so the rest is kept from them: there are always types, and never rows of one token.
"""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as nn

from service.inference import bert
from service.inference.architecture import BertShape


class Compiled:
    """`bert.hidden_states`, compiled at its first calls."""

    @cached_property
    def _run(self) -> Callable[..., torch.Tensor]:
        made: Callable[..., torch.Tensor] = torch.compile(bert.hidden_states, dynamic=True)
        return made

    def __call__(
        self,
        weights: bert.Weights,
        shape: BertShape,
        ids: torch.Tensor,
        mask: torch.Tensor,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `bert.hidden_states`."""
        types = torch.zeros_like(ids) if types is None else types
        n_tokens = ids.shape[1]
        if n_tokens == 1 and shape.max_position_embeddings > 1:
            ids, mask, types = (nn.pad(each, (0, 1)) for each in (ids, mask, types))
        found = self._run(weights, shape, ids, mask, types)
        return found[:, :n_tokens]
