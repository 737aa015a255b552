"""The model of a checkpoint's folder, built by transformers without weights."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from probes.errors import PlacementError, Unsupported, UsageError
from probes.placement.architectures import Built
from probes.placement.loading.skeleton import build
from probes.placement.models.checkpointfolder import CheckpointFolder
from probes.placement.models.fromconfig import configured, library, refusals


def built(folder: CheckpointFolder, dtype: str, tokens: int) -> Built:
    """The model with its parameters on meta, to be called with token ids of shape (batch, tokens).

    Its class is the one that `architectures` in config.json names, or else the bare model of its type.
    Raises LibraryMissing without transformers, ModelUnknown for what it can't build, Unsupported for a model
    that doesn't take token ids alone, and UsageError where it has positions for fewer tokens.
    """
    library()
    with refusals(ImportError, OSError, RuntimeError):
        config = configured(folder.config)
        named = folder.config.get("architectures") or [""]
        kind = _named(config, str(named[0]))
    if kind is not None:
        _require_tokens(kind, config)
    with refusals(ImportError, OSError, RuntimeError):
        module = build(lambda: _made(kind, config, getattr(torch, dtype)))
    _require_tokens(module, module.config)
    text = module.config.get_text_config()
    _require_positions(getattr(text, "max_position_embeddings", None), tokens)
    text.use_cache = module.config.use_cache = False
    return Built(module, (), int(text.hidden_size), int(text.vocab_size), _call(module))


def ignored(module: nn.Module, folder: CheckpointFolder) -> tuple[str, ...]:
    """The stored tensors that the model's class declares as not needed."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return tuple(name for name in folder.names if any(re.search(pattern, name) for pattern in patterns))


def _named(config: Any, name: str) -> Any:  # a class of models, or None
    transformers = library()
    found: Any = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and found.config_class is type(config) else None


def _made(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    made: nn.Module = (
        library().AutoModel.from_config(config, dtype=dtype, trust_remote_code=False)
        if kind is None
        else kind._from_config(config, dtype=dtype)
    )
    return made


def _require_tokens(model: Any, config: Any) -> None:
    """`model` is one or its class."""
    takes = str(model.main_input_name)
    if takes != "input_ids" or config.is_encoder_decoder:
        takes = "the tokens of an encoder and of a decoder" if config.is_encoder_decoder else takes
        raise Unsupported(
            f"this model takes {takes}: place gives token ids and nothing else",
            "place it in Python, with probes.placement.load",
        )


def _require_positions(most: object, tokens: int) -> None:
    if isinstance(most, int) and tokens > most:
        raise UsageError(f"{tokens} tokens, and this model has positions for {most}", f"--tokens {most}")


def _call(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(tokens: torch.Tensor) -> torch.Tensor:
        try:
            found: torch.Tensor = module(input_ids=tokens)[0]
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise PlacementError(
                f"a pass of the model fails: {type(error).__name__}: {str(error)[:200]}",
                "try fewer --tokens or --batch 1; other inputs can be given in Python: probes.placement.load",
            ) from error
        return found

    return call
