"""Architectures of every kind, by configurations of transformers and diffusers, or in plain torch: what the
planner is judged by. Sizes are near published ones; weights are random, and nothing is downloaded.

The rule, written on 2026-11-24 before any of these was measured: all of `every()`, each at both of BATCHES,
in both of SHARES of its weights' bytes, captured and eager. No case is replaced or left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from placing_models import Model
from torch import nn

BATCHES = (1, 4)
SHARES = (0.6, 0.85)
HALF = torch.bfloat16


def _of(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builds a model of transformers from its configuration."""

    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        return made

    return build


def _tensors(**shapes: Any) -> Callable[[int, torch.device], dict[str, Any]]:
    """Inputs by name: a tuple is the shape of random numbers for one of a batch, a number that of tokens."""

    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        made: dict[str, Any] = {}
        drawn = torch.Generator(device).manual_seed(1)
        for name, shape in shapes.items():
            if isinstance(shape, tuple):
                made[name] = torch.randn(batch, *shape, generator=drawn, device=device, dtype=HALF)
            elif isinstance(shape, bool):
                made[name] = shape
            else:
                made[name] = torch.randint(0, 1000, (batch, shape), generator=drawn, device=device)
        return made

    return inputs


def _last(output: Any) -> torch.Tensor:
    """The first tensor of an output of transformers or diffusers."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


def _text(name: str, kind: str, config: str, *, tokens: int = 64, words: int = 32000, **sizes: Any) -> Model:
    more = {"use_cache": False} if kind.endswith(("CausalLM", "LMHeadModel")) else {}
    build = _of(kind, config, vocab_size=words, **sizes)
    return Model(name, build, _tensors(input_ids=tokens, **more), _last, tokens=tokens)


class Recurrent(nn.Module):
    """A recurrent network over embeddings, with a head."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(8000, width)
        self.loop = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 8000)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`input_ids` (batch, tokens)."""
        found: torch.Tensor = self.head(self.loop(self.table(input_ids))[0])
        return found


class Residual(nn.Module):
    """A convolutional network with residual blocks and batch normalisation, wide as a detector's backbone."""

    def __init__(self, widths: tuple[int, ...] = (256, 512, 1024, 2048), depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 7, stride=4, padding=3, bias=False)
        stages, before = [], widths[0]
        for width in widths:
            stages.append(nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False))
            stages += [_Bottleneck(width) for _ in range(depth)]
            before = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """`image` (batch, 3, height, width)."""
        found: torch.Tensor = self.head(self.stages(self.stem(image)).mean((2, 3)))
        return found


class _Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 2
        self.parts = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.parts(x))


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    made: nn.Module = UNet2DConditionModel(cross_attention_dim=768, sample_size=32, attention_head_dim=8)
    return made


def _vae() -> nn.Module:
    from diffusers import AutoencoderKL

    made: nn.Module = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=2,
    )
    return made


def _unet_inputs(batch: int, device: torch.device) -> dict[str, Any]:
    shapes = {"sample": (4, 32, 32), "encoder_hidden_states": (77, 768)}
    return {
        **_tensors(**shapes)(batch, device),
        "timestep": torch.full((batch,), 500, device=device),
        "return_dict": False,
    }


WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}
DECODER = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 12}
IMAGE = _tensors(pixel_values=(3, 224, 224))


def every() -> list[Model]:
    """The list: 24 architectures."""
    gated = {**DECODER, "intermediate_size": 5632, "num_key_value_heads": 4}
    routed = {"num_local_experts": 8, "num_experts_per_tok": 2}
    whisper = {
        "d_model": 1024,
        "encoder_layers": 24,
        "decoder_layers": 24,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
    }
    t5 = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16}
    bart = {**{k: v for k, v in whisper.items() if "layers" not in k}, "encoder_layers": 12}
    swin = {"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48]}
    convnext = {"depths": [3, 3, 27, 3], "hidden_sizes": [256, 512, 1024, 2048]}
    return [
        Model("UNet of 860 M", _unet, _unet_inputs, _last),
        Model("VAE", _vae, _tensors(sample=(3, 256, 256), return_dict=False), _last),
        Model("residual network", Residual, _tensors(image=(3, 512, 512))),
        Model("ConvNeXt", _of("ConvNextModel", "ConvNextConfig", **convnext), IMAGE, _last),
        Model("Swin", _of("SwinModel", "SwinConfig", **swin), IMAGE, _last),
        Model("ViT", _of("ViTModel", "ViTConfig", **WIDE), IMAGE, _last),
        Model("YOLOS, for detection", _of("YolosModel", "YolosConfig", **WIDE, image_size=[512, 512]),
              _tensors(pixel_values=(3, 512, 512)), _last),
        _text("BERT-large", "BertModel", "BertConfig", tokens=128, **WIDE),
        _text("DeBERTa v2", "DebertaV2Model", "DebertaV2Config", tokens=128, **WIDE),
        _text("ELECTRA", "ElectraModel", "ElectraConfig", tokens=128, embedding_size=1024, **WIDE),
        Model("Whisper medium", _of("WhisperForConditionalGeneration", "WhisperConfig", **whisper),
              _tensors(input_features=(80, 3000), decoder_input_ids=16, use_cache=False), _last),
        Model("T5 large", _of("T5ForConditionalGeneration", "T5Config", **t5),
              _tensors(input_ids=128, decoder_input_ids=32, use_cache=False), _last),
        Model("BART", _of("BartForConditionalGeneration", "BartConfig", **bart, decoder_layers=12),
              _tensors(input_ids=128, decoder_input_ids=32, use_cache=False), _last),
        _text("StableLM", "StableLmForCausalLM", "StableLmConfig", **gated),
        _text("Falcon", "FalconForCausalLM", "FalconConfig", **DECODER),
        _text("BLOOM", "BloomForCausalLM", "BloomConfig", hidden_size=2048, n_layer=12, n_head=16),
        _text("GPT-J", "GPTJForCausalLM", "GPTJConfig", n_embd=2048, n_layer=12, n_head=16, rotary_dim=64),
        _text("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", **gated),
        _text("Cohere", "CohereForCausalLM", "CohereConfig", **gated),
        _text("Mamba", "MambaForCausalLM", "MambaConfig", tokens=32, hidden_size=1024, num_hidden_layers=24),
        _text("RecurrentGemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
              tokens=32, hidden_size=1024, num_attention_heads=8, num_hidden_layers=9, intermediate_size=6144,
              lru_width=1024),
        Model("LSTM, 4 layers of 4096", lambda: Recurrent(nn.LSTM, 4096, 4), _tensors(input_ids=32)),
        Model("GRU, 6 layers of 2048", lambda: Recurrent(nn.GRU, 2048, 6), _tensors(input_ids=64)),
        _text("mixture of experts", "MixtralForCausalLM", "MixtralConfig", **routed, hidden_size=1024,
              num_attention_heads=16, num_key_value_heads=4, intermediate_size=3584, num_hidden_layers=8),
    ]  # fmt: skip
