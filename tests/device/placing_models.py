"""The models of run_placement.sh: random weights, nothing is downloaded. Each is made in VRAM and ends up on
the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

STD = 0.02  # of weights, as the published models are initialised


@dataclass(frozen=True)
class Model:
    """A model to place: how to build it, what goes in, and the tensor of what comes out."""

    name: str
    build: Callable[[], nn.Module]  # with parameters of any values, on the current default device
    inputs: Callable[[int, torch.device], dict[str, Any]]  # of a batch
    output: Callable[[Any], torch.Tensor] = lambda found: found
    tokens: int = 1  # of each row of a batch
    std: float = STD
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)


def filled(model: Model, device: torch.device, seed: int = 0) -> nn.Module:
    """The model on `device`, weights N(0, std), those of norms 1 and biases 0, buffers as the factory makes
    them.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with device:
            made = model.build()
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                std = STD if "embed" in name else model.std
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return made.eval().requires_grad_(False)


def square(layers: int, width: int = 8192, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Square linear layers without bias. In float16 they are smaller: activations stay finite."""
    std = STD if dtype is not torch.float16 else width**-0.5

    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(1)
        return {"input": torch.randn(batch, width, generator=generator, device=device, dtype=dtype)}

    name = f"{layers} x {width}^2 {str(dtype).removeprefix('torch.')}"
    build = lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))  # noqa: E731
    return Model(name, build, inputs, std=std, dtype=dtype)


def tokens_of(vocabulary: int, tokens: int, **more: Any) -> Callable[[int, torch.device], dict[str, Any]]:
    """Inputs of random tokens, for a batch."""

    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(1)
        ids = torch.randint(0, vocabulary, (batch, tokens), generator=generator, device=device)
        return {"input_ids": ids, **more}

    return inputs


def bert(tokens: int = 128) -> Model:
    """BERT-base."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertModel

        return BertModel(BertConfig(), add_pooling_layer=False)

    return Model("BERT-base", build, tokens_of(30522, tokens), lambda o: o.last_hidden_state, tokens=tokens)


def gpt2_xl(tokens: int = 128) -> Model:
    """GPT-2 XL, 1.56 billion weights."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25))

    inputs = tokens_of(50257, tokens, use_cache=False)
    return Model("GPT-2 XL", build, inputs, lambda o: o.logits, tokens=tokens)


def qwen_3b(tokens: int = 32) -> Model:
    """Qwen2.5-3B: sizes of its published configuration, tied embeddings."""

    def build() -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        return Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=2048,
                num_hidden_layers=36,
                num_attention_heads=16,
                num_key_value_heads=2,
                intermediate_size=11008,
                vocab_size=151936,
                tie_word_embeddings=True,
            )
        )

    inputs = tokens_of(151936, tokens, use_cache=False)
    # larger weights than at the start of training: else each token repeats the one before it
    return Model("Qwen2.5-3B", build, inputs, lambda o: o.logits, tokens=tokens, std=0.05)


def experts(tokens: int = 64) -> Model:
    """A mixture of experts in Mixtral's architecture: 12 layers of 8 experts, 2 for each token, 2.9 billion
    weights.
    """

    def build() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(
            MixtralConfig(
                hidden_size=2048,
                intermediate_size=4096,
                num_hidden_layers=12,
                num_attention_heads=16,
                num_key_value_heads=4,
                num_local_experts=8,
                num_experts_per_tok=2,
                vocab_size=32000,
            )
        )

    inputs = tokens_of(32000, tokens, use_cache=False)
    return Model("mixture of experts", build, inputs, lambda o: o.logits, tokens=tokens)


class DitBlock(nn.Module):
    """A diffusion transformer's block: attention and MLP, shifted and scaled by the condition (adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width, elementwise_affine=False)
        self.between = nn.LayerNorm(width, elementwise_affine=False)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """`x` (batch, patches, width), `c` (batch, width)."""
        shift, scale, gate, shift2, scale2, gate2 = self.condition(c).unsqueeze(1).chunk(6, 2)
        h = self.before(x) * (1 + scale) + shift
        parts = self.mix(h).view(*h.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        x = x + gate * self.out(mixed)
        h = self.between(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(nn.functional.gelu(self.up(h), approximate="tanh"))


class Dit(nn.Module):
    """A diffusion transformer (sizes near DiT-XL/2 times two): patches of a latent image, a time step."""

    def __init__(self, width: int = 2304, heads: int = 18, layers: int = 28, channels: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))
        self.final = nn.Linear(width, 4 * channels)
        self.register_buffer("frequencies", torch.exp(-torch.arange(128) * (9.21 / 128)), persistent=False)

    def forward(self, image: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """`image` (batch, 16, 64, 64), `step` (batch,)."""
        angles = step[:, None].to(image.dtype) * self.frequencies.to(image.dtype)
        c = self.time(torch.cat((angles.cos(), angles.sin()), 1))
        x = self.patch(image).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, c)
        found: torch.Tensor = self.final(x)
        return found


def dit() -> Model:
    """A diffusion transformer of 2.7 billion weights, written in plain torch: diffusers isn't needed."""

    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(1)
        image = torch.randn(batch, 16, 64, 64, generator=generator, device=device, dtype=torch.bfloat16)
        return {"image": image, "step": torch.full((batch,), 500.0, device=device)}

    return Model("diffusion transformer", Dit, inputs, tokens=1024)
