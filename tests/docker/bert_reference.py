"""Runs inside the image: is `service.inference.bert` the BERT that torch's own encoder layers compute?"""

import sys

import torch
from service.inference import bert
from service.inference.checkpoint import BertShape, parameter_count, parameter_shapes

SHAPE = BertShape(
    num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=99
)


def scrambled(shape: BertShape) -> dict[str, torch.Tensor]:
    """Weights where nothing is 0 or 1, so that a forgotten bias or norm shows."""
    torch.manual_seed(1)
    return {name: torch.randn(size) * 0.3 + 0.1 for name, size in parameter_shapes(shape).items()}


def reference_layer(weights: dict[str, torch.Tensor], prefix: str) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(
        SHAPE.hidden_size,
        SHAPE.num_attention_heads,
        SHAPE.intermediate_size,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=SHAPE.layer_norm_eps,
        batch_first=True,
    )
    state = {}
    for kind in ("weight", "bias"):
        self_attention = [
            weights[f"{prefix}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")
        ]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(self_attention)
        state[f"self_attn.out_proj.{kind}"] = weights[f"{prefix}.attention.output.dense.{kind}"]
        state[f"norm1.{kind}"] = weights[f"{prefix}.attention.output.LayerNorm.{kind}"]
        state[f"linear1.{kind}"] = weights[f"{prefix}.intermediate.dense.{kind}"]
        state[f"linear2.{kind}"] = weights[f"{prefix}.output.dense.{kind}"]
        state[f"norm2.{kind}"] = weights[f"{prefix}.output.LayerNorm.{kind}"]
    layer.load_state_dict(state)
    return layer.train()  # the fused path of eval() would be another implementation to trust


def reference(weights: dict[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    name = "bert.embeddings"
    x = weights[f"{name}.word_embeddings.weight"][ids]
    x = x + weights[f"{name}.position_embeddings.weight"][torch.arange(ids.shape[1])]
    x = x + weights[f"{name}.token_type_embeddings.weight"][torch.zeros_like(ids)]
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    x = (x - mean) / torch.sqrt(variance + SHAPE.layer_norm_eps)
    x = x * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]
    for number in range(SHAPE.num_hidden_layers):
        x = reference_layer(weights, f"bert.encoder.layer.{number}")(x, src_key_padding_mask=~mask)
    pooled = torch.tanh(x[:, 0] @ weights["bert.pooler.dense.weight"].T + weights["bert.pooler.dense.bias"])
    return pooled @ weights["classifier.weight"].T + weights["classifier.bias"]


ids = torch.randint(0, SHAPE.vocab_size, (3, 11))
mask = torch.arange(11) < torch.tensor([[11], [7], [2]])
with torch.no_grad():
    ours = bert.forward(scrambled(SHAPE), SHAPE, ids, mask)
    theirs = reference(scrambled(SHAPE), ids, mask)
torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

finbert = bert.random_weights(BertShape(), seed=0)
assert sum(tensor.numel() for tensor in finbert.values()) == parameter_count(BertShape()) == 109_484_547
sys.stdout.write("same\n")
