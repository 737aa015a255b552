"""The scenarios' models in torch, with random weights: nothing is downloaded.

Sizes are those of the published configurations; transformers is imported when one of its models is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from probes.core.errors import Unsupported
from probes.measure.stacks import DTYPE_BYTES, TOKENS, Shape, StackPlan

PLAIN_WIDTH, PLAIN_LAYERS, PLAIN_HEADS = 2048, 24, 16
QWEN = {  # hidden, layers, heads, key-value heads, intermediate, vocabulary
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008, 151936),
    "qwen2.5-7b": (3584, 28, 28, 4, 18944, 152064),
}


@dataclass(frozen=True)
class Built:
    """A model, its parts of equal size, and how to call it."""

    module: nn.Module
    layers: tuple[nn.Module, ...]
    width: int
    vocabulary: int  # of token ids; 0 for a model that takes activations
    call: Callable[[torch.Tensor], torch.Tensor]


class Linear(nn.Module):  # type: ignore[misc]
    """A square linear layer with ReLU. He's scale keeps activations through ReLU, so float16 holds them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * (2.0 / width) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer."""
        return functional.relu(functional.linear(x, self.weight))


class Block(nn.Module):  # type: ignore[misc]
    """A plain pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        batch, tokens, width = x.shape
        parts = self.mix(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.between(x))))


def shape(model: str, *, dtype: str, width: int) -> Shape:
    """What the plan needs to know about a model. Raises Unsupported when this image can't build it."""
    if model == "mlp":
        return Shape(model, dtype, width, width * width * DTYPE_BYTES[dtype])
    with torch.device("meta"):
        built = _build(model, layers=0, width=width)
    each = _numbers(built.layers[0]) * DTYPE_BYTES[dtype]
    rest = _numbers(built.module) * DTYPE_BYTES[dtype] - each * len(built.layers)
    return Shape(model, dtype, built.width, each, rest, len(built.layers), TOKENS)


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def build(plan: StackPlan, device: str, seed: int) -> Built:
    """The model of a plan on a device, in evaluation mode, weights drawn from the seed."""
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(getattr(torch, plan.shape.dtype))
    try:
        with torch.device(device):
            built = _build(plan.shape.model, layers=plan.layers, width=plan.shape.width)
    finally:
        torch.set_default_dtype(before)
    built.module.eval()
    return built


def _build(model: str, *, layers: int, width: int) -> Built:
    if model == "mlp":
        return _sequence(nn.Sequential(*(Linear(width) for _ in range(layers))), width)
    if model == "transformer":
        blocks = (Block(PLAIN_WIDTH, PLAIN_HEADS) for _ in range(PLAIN_LAYERS))
        return _sequence(nn.Sequential(*blocks), PLAIN_WIDTH)
    return _published(model)


def plain_layers(count: int, width: int, heads: int, *, dtype: torch.dtype, device: str) -> nn.Module:
    """Plain transformer layers one after another, for inference, with random weights."""
    layers = nn.Sequential(*(Block(width, heads) for _ in range(count)))
    return layers.to(device, dtype).eval().requires_grad_(False)


def _sequence(stack: nn.Sequential, width: int) -> Built:
    return Built(stack, tuple(stack), width, 0, stack)


def _published(model: str) -> Built:
    try:
        import transformers
    except ImportError as error:
        raise Unsupported(f"{model} needs transformers: {error}", "add it to the image") from error
    if model == "bert-base":
        config = transformers.BertConfig()
        module = transformers.BertModel(config, add_pooling_layer=False)
        layers = module.encoder.layer
    elif model == "gpt2-xl":
        config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
        module = transformers.GPT2Model(config)
        layers = module.h
    else:
        hidden, count, heads, key_heads, intermediate, vocabulary = QWEN[model]
        config = transformers.Qwen2Config(
            hidden_size=hidden,
            num_hidden_layers=count,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            intermediate_size=intermediate,
            vocab_size=vocabulary,
        )
        module = transformers.Qwen2Model(config)
        layers = module.layers
    options = {} if model == "bert-base" else {"use_cache": False}

    def call(tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = module(input_ids=tokens, **options).last_hidden_state
        return output

    return Built(module, tuple(layers), int(config.hidden_size), int(config.vocab_size), call)
