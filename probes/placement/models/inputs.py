"""What a model of transformers is called with, by its configuration: tokens, images or sound."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from probes.core.errors import ModelUnknown


@dataclass(frozen=True)
class Inputs:
    """Tokens of a vocabulary, images of channels x height x width, or spectra of bands x times."""

    vocabulary: int = 0
    image: tuple[int, int, int] | None = None
    decodes: bool = False  # an encoder, and a decoder that goes on with as many tokens
    spectrum: tuple[int, int] | None = None


def cache_name(module: Any) -> str:  # noqa: ANN401  # of transformers
    """What its forward calls its cache: `past_key_values` until transformers 5.23, `cache` since."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def inputs_of(module: Any) -> Inputs:  # noqa: ANN401  # of transformers
    """The inputs of a model of transformers. Raises ModelUnknown for others."""
    whole = module.config
    config, name = whole.get_text_config(), str(module.main_input_name)
    words = getattr(config, "vocab_size", None)
    decodes = bool(whole.is_encoder_decoder)
    if name == "input_ids" and type(words) is int:
        return Inputs(words, decodes=decodes)
    size, channels = getattr(whole, "image_size", None), getattr(whole, "num_channels", 3)
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    if name == "pixel_values" and len(sides) == 2 and all(type(n) is int for n in (*sides, channels)):
        return Inputs(image=(channels, sides[0], sides[1]))
    bands, times = getattr(whole, "num_mel_bins", None), getattr(whole, "max_source_positions", None)
    if name == "input_features" and decodes and type(bands) is type(times) is type(words) is int:
        return Inputs(words, decodes=True, spectrum=(bands, 2 * times))
    raise ModelUnknown(
        f"it takes {name[:60]}, and passes are made here with tokens or with images of one size",
        "give the config.json of a model of text or images",
    )


def example(takes: Inputs, *, batch: int, tokens: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of one pass, under the names that the model has for them: all kinds of tokens, empty images."""
    count = torch.arange(batch * tokens, device=device)
    ids = count.remainder_(max(takes.vocabulary, 1)).view(batch, tokens)
    if takes.spectrum is not None:
        sound = torch.zeros(batch, *takes.spectrum, device=device, dtype=dtype)
        return {"input_features": sound, "decoder_input_ids": ids}
    if takes.image is not None:
        return {"pixel_values": torch.zeros(batch, *takes.image, device=device, dtype=dtype)}
    return {"input_ids": ids, "decoder_input_ids": ids} if takes.decodes else {"input_ids": ids}
