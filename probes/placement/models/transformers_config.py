"""transformers' configuration object for a config.json, without the model's own code and without network."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from probes.core.errors import LibraryMissing, ModelUnknown

# Keys left out: `auto_map` names the model's own code; names of kernels may be repositories to download.
LEFT_OUT: Final = frozenset(
    {
        "auto_map",
        "dtype",
        "torch_dtype",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
    }
)


def import_transformers() -> Any:
    """Import transformers, with its network access off. Raises LibraryMissing."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # a config may name a backbone; the library reads this when imported
    try:
        import transformers
    except ImportError as error:
        raise LibraryMissing(
            f"building the model needs transformers: {error}", "pip install transformers"
        ) from error
    return transformers


def config_object(config: Mapping[str, Any]) -> Any:
    """The configuration object. Raises LibraryMissing; inside `config_refusals`, ModelUnknown."""
    values = _cleaned(config)
    kind = str(values.pop("model_type", ""))
    return import_transformers().AutoConfig.for_model(kind, **values)


def _cleaned(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the keys that are left out, in nested configs too."""
    return {
        key: _cleaned(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in LEFT_OUT
    }


@contextmanager
def config_refusals(*more: type[Exception]) -> Iterator[None]:
    """Turn what transformers raises for a senseless config, and `more`, into ModelUnknown."""
    errors: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError, AttributeError, *more)
    try:
        yield
    except errors as error:
        raise ModelUnknown(
            f"transformers can't build this model: {str(error)[:200]}", "give the model's own config.json"
        ) from error
