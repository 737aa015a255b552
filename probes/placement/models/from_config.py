"""transformers' configuration object of a config.json, without the model's own code and without network."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from probes.core.errors import LibraryMissing, ModelUnknown

# `auto_map` names code of the model's own. Names of kernels may be repositories, which would be downloaded.
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


def library() -> Any:
    """The module `transformers`, without network. Raises LibraryMissing."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # a config may name a backbone; the library reads this when imported
    try:
        import transformers
    except ImportError as error:
        raise LibraryMissing(
            f"building the model needs transformers: {error}", "pip install transformers"
        ) from error
    return transformers


def configured(config: Mapping[str, Any]) -> Any:
    """The configuration object. Raises LibraryMissing, and ModelUnknown inside `refusals`."""
    values = _own(config)
    kind = str(values.pop("model_type", ""))
    return library().AutoConfig.for_model(kind, **values)


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is left out, in nested configurations too."""
    return {
        key: _own(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in LEFT_OUT
    }


@contextmanager
def config_refusals(*more: type[Exception]) -> Iterator[None]:
    """What transformers raises for a config that makes no sense, and `more`, becomes ModelUnknown."""
    known: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError, AttributeError, *more)
    try:
        yield
    except known as error:
        raise ModelUnknown(
            f"transformers can't build this model: {str(error)[:200]}", "give the model's own config.json"
        ) from error
