"""Models with random weights for run_training_beyond.sh, and how a loss is had from each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer for images of 224 x 224 in patches of 14."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, *, checkpointing: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 257, width) * 0.02)
        self.layers = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)
        self.checkpointing = checkpointing

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(self.norm(x[:, 0]))


@dataclass
class Case:
    """A model on the card, and its loss for a batch whose numbers follow from a seed."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    batch: Callable[[int, int], dict[str, torch.Tensor]]  # size, seed


def vit(device: str, *, small: bool, checkpointing: bool = False) -> Case:
    """1.1B parameters: 44 blocks of width 1408, as ViT-g's."""
    torch.manual_seed(0)
    sizes = (256, 6, 4, 1024) if small else (1408, 44, 16, 6144)
    with torch.device(device):
        model = ViT(*sizes, checkpointing=checkpointing)

    def batch(size: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator("cpu").manual_seed(seed)
        images = torch.randn(size, 3, 224, 224, generator=generator)
        return {"images": images.to(device), "labels": torch.arange(size, device=device) % 1000}

    def loss(module: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(module(given["images"]).float(), given["labels"])

    return Case("ViT 1.1B", model, loss, batch)


def qwen(device: str, *, small: bool, billions: str = "1.5", tokens: int = 1024) -> Case:
    """Qwen2.5's shapes with random weights; `3` in bfloat16, for LoRA."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    large = {
        "1.5": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
        | {"num_attention_heads": 12, "num_key_value_heads": 2},
        "3": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 2},
    }[billions]
    tiny = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(
        **(tiny if small else large),
        vocab_size=2048 if small else 151936,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        use_cache=False,
    )
    tokens = 128 if small else tokens
    dtype = torch.bfloat16 if billions == "3" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train()

    def batch(size: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator("cpu").manual_seed(seed)
        ids = torch.randint(0, config.vocab_size, (size, tokens), generator=generator)
        return {"input_ids": ids.to(device)}

    def loss(module: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        out: Any = module(input_ids=given["input_ids"], labels=given["input_ids"], use_cache=False)
        return out.loss

    return Case(f"Qwen2.5-{billions}B", model, loss, batch)


def with_lora(case: Case) -> Case:
    """Adapters of rank 16 on all seven linear layers of each block; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=names)
    return Case(f"{case.name} with LoRA", get_peft_model(case.model, config), case.loss, case.batch)
