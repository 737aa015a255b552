"""BERT's forward pass over a mapping of tensors under Hugging Face's parameter names, plain and compiled.

Devlin et al. 2018, as `BertForSequenceClassification` computes it without dropout. Needs torch.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
import torch.nn.functional as nn

from service.inference.checkpoint import BertShape, parameter_shapes

Weights = Mapping[str, torch.Tensor]
_INITIAL_STD = 0.02  # of BERT's own initialisation


def random_weights(shape: BertShape, seed: int) -> dict[str, torch.Tensor]:
    """Return untrained float32 weights on the CPU, by BERT's initialisation and this seed."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, size in parameter_shapes(shape).items():
        if name.endswith("LayerNorm.weight"):
            weights[name] = torch.ones(size)
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(size)
        else:
            weights[name] = torch.empty(size).normal_(std=_INITIAL_STD, generator=generator)
    return weights


def forward(
    weights: Weights,
    shape: BertShape,
    ids: torch.Tensor,
    mask: torch.Tensor,
    types: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits [rows, labels] of `ids` [rows, tokens] (int64); `mask` [rows, tokens]: False on padding.

    `types` [rows, tokens] (int64): which text of a pair each token belongs to; None: the first.
    """
    return classified(weights, hidden_states(weights, shape, ids, mask, types))


def hidden_states(
    weights: Weights,
    shape: BertShape,
    ids: torch.Tensor,
    mask: torch.Tensor,
    types: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the last layer's output [rows, tokens, hidden]; arguments as in `forward`."""
    hidden = embed(weights, shape, ids, types)
    attended = mask[:, None, None, :]  # over heads and queries
    for number in range(shape.num_hidden_layers):
        hidden = layer(weights, shape, f"bert.encoder.layer.{number}", hidden, attended)
    return hidden


def classified(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits [rows, labels] of hidden states [rows, tokens, hidden]."""
    pooled = torch.tanh(_linear(weights, "bert.pooler.dense", hidden[:, 0]))
    return _linear(weights, "classifier", pooled)


def embedded(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return embeddings [rows, hidden] of length 1: the mean over each row's own tokens, in float32."""
    kept = mask[:, :, None].float()
    return nn.normalize((hidden.float() * kept).sum(1) / kept.sum(1), dim=-1)


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return nn.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: Weights, shape: BertShape, name: str, x: torch.Tensor) -> torch.Tensor:
    return nn.layer_norm(
        x, (shape.hidden_size,), weights[f"{name}.weight"], weights[f"{name}.bias"], shape.layer_norm_eps
    )


def embed(weights: Weights, shape: BertShape, ids: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
    """Return the embedding layer's hidden states [rows, tokens, hidden]."""
    prefix = "bert.embeddings"
    words = nn.embedding(ids, weights[f"{prefix}.word_embeddings.weight"])
    positions = weights[f"{prefix}.position_embeddings.weight"][: ids.shape[1]]
    segments = weights[f"{prefix}.token_type_embeddings.weight"]
    segment = segments[0] if types is None else nn.embedding(types, segments)
    return _norm(weights, shape, f"{prefix}.LayerNorm", words + positions + segment)


def layer(
    weights: Weights, shape: BertShape, prefix: str, x: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """Return a layer's output [rows, tokens, hidden]; `attended` [rows, 1, 1, tokens]: False on padding."""
    mixed = _attend(weights, shape, f"{prefix}.attention.self", x, attended)
    x = _residual(weights, shape, f"{prefix}.attention.output", mixed, x)
    wide = nn.gelu(_linear(weights, f"{prefix}.intermediate.dense", x))
    return _residual(weights, shape, f"{prefix}.output", wide, x)


def _residual(
    weights: Weights, shape: BertShape, prefix: str, x: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    return _norm(weights, shape, f"{prefix}.LayerNorm", _linear(weights, f"{prefix}.dense", x) + before)


def _attend(
    weights: Weights, shape: BertShape, prefix: str, x: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    rows, tokens, _ = x.shape

    def heads(name: str) -> torch.Tensor:
        projected = _linear(weights, f"{prefix}.{name}", x)
        return projected.view(rows, tokens, shape.num_attention_heads, shape.head_size).transpose(1, 2)

    mixed = nn.scaled_dot_product_attention(heads("query"), heads("key"), heads("value"), attn_mask=attended)
    return mixed.transpose(1, 2).reshape(rows, tokens, shape.hidden_size)


class CompiledBert:
    """`hidden_states` through torch.compile: one program for a single row, one for several, of any length.

    Compiled at the first calls. Batches have a new shape all the time, and a program takes seconds to make.
    Sizes of 1 always get programs of their own, so this avoids them: there are always types, and never rows
    of one token.
    """

    @cached_property
    def _run(self) -> Callable[..., torch.Tensor]:
        compiled: Callable[..., torch.Tensor] = torch.compile(hidden_states, dynamic=True)
        return compiled

    def __call__(
        self,
        weights: Weights,
        shape: BertShape,
        ids: torch.Tensor,
        mask: torch.Tensor,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `hidden_states`."""
        types = torch.zeros_like(ids) if types is None else types
        n_tokens = ids.shape[1]
        if n_tokens == 1 and shape.max_position_embeddings > 1:
            ids, mask, types = (nn.pad(tensor, (0, 1)) for tensor in (ids, mask, types))
        hidden: torch.Tensor = self._run(weights, shape, ids, mask, types)
        return hidden[:, :n_tokens]
