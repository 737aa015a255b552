"""The shape of a BERT sequence classifier, and the name and shape of every parameter that follows from it."""

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BertShape:
    """Sizes as Hugging Face's `config.json` names them; the defaults are FinBERT's (ProsusAI/finbert)."""

    num_hidden_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    vocab_size: int = 30522
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    labels: tuple[str, ...] = ("positive", "negative", "neutral")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


def _affine(name: str, shape: Shape) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _layer(prefix: str, shape: BertShape) -> dict[str, Shape]:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    return (
        _affine(f"{prefix}.attention.self.query", (hidden, hidden))
        | _affine(f"{prefix}.attention.self.key", (hidden, hidden))
        | _affine(f"{prefix}.attention.self.value", (hidden, hidden))
        | _affine(f"{prefix}.attention.output.dense", (hidden, hidden))
        | _affine(f"{prefix}.attention.output.LayerNorm", (hidden,))
        | _affine(f"{prefix}.intermediate.dense", (wide, hidden))
        | _affine(f"{prefix}.output.dense", (hidden, wide))
        | _affine(f"{prefix}.output.LayerNorm", (hidden,))
    )


def parameter_shapes(shape: BertShape) -> dict[str, Shape]:
    """Every parameter of `BertForSequenceClassification` by its Hugging Face name, in a fixed order."""
    hidden = shape.hidden_size
    shapes: dict[str, Shape] = {
        "bert.embeddings.word_embeddings.weight": (shape.vocab_size, hidden),
        "bert.embeddings.position_embeddings.weight": (shape.max_position_embeddings, hidden),
        "bert.embeddings.token_type_embeddings.weight": (shape.type_vocab_size, hidden),
    }
    shapes |= _affine("bert.embeddings.LayerNorm", (hidden,))
    for number in range(shape.num_hidden_layers):
        shapes |= _layer(f"bert.encoder.layer.{number}", shape)
    shapes |= _affine("bert.pooler.dense", (hidden, hidden))
    shapes |= _affine("classifier", (len(shape.labels), hidden))
    return shapes


def parameter_count(shape: BertShape) -> int:
    """Number of parameters (elements, not bytes)."""
    return sum(math.prod(each) for each in parameter_shapes(shape).values())
