"""transformers' configuration object for a config.json, without the model's own code and without network."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from probes.core.errors import Failure, LibraryMissing, ModelUnknown
from probes.placement.models.families import families

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

MOST_LAYERS: Final = 1_000  # of a model that is built


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
def config_refusals() -> Iterator[None]:
    """Turn what transformers raises for a senseless config, errors of any kind, into ModelUnknown."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        raise ModelUnknown(
            f"transformers can't build this model: {str(error)[:200]}", "give the model's own config.json"
        ) from error


def model_class(config: Any, name: str) -> Any:  # a class of models, or None
    """The class that a config.json names, if it is one for this configuration."""
    transformers = import_transformers()
    named: Any = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return named if is_model and named.config_class is type(config) else None


def instantiated(kind: Any, config: Any, dtype: Any) -> Any:
    """A model of a class, or of the bare one of its type; on the current default device."""
    if kind is None:
        return import_transformers().AutoModel.from_config(config, dtype=dtype, trust_remote_code=False)
    return kind._from_config(config, dtype=dtype)


def model_on_meta(values: Mapping[str, Any], dtype: str) -> Any:
    """The model of a config.json, without weights, for inference. `dtype`: torch's name; empty: the config's.

    Raises LibraryMissing without transformers or torch, and ModelUnknown for what transformers can't build.
    """
    transformers = import_transformers()
    try:
        import torch
    except ImportError as error:
        raise LibraryMissing(f"building the model needs torch: {error}", "pip install torch") from error
    if (layers := _most_layers(values)) > MOST_LAYERS:
        raise ModelUnknown(f"it has {layers:,} layers, more than the {MOST_LAYERS:,} that are built here")
    name = dtype or str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    with config_refusals(), silently():
        config = config_object(values)
        named = values.get("architectures") or [""]
        kind = model_class(config, str(named[0]))
        family = families().get(config.model_type)
        whole = family is None or family.whole
        if kind is None and whole and not str(named[0]).endswith("Model"):
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        with torch.device("meta"):
            return instantiated(kind, config, getattr(torch, name)).eval()


def _most_layers(values: Mapping[str, Any]) -> int:
    """The largest number that a config, or one in it, has under a key of layers."""
    numbers = [0]
    for key, value in values.items():
        if isinstance(value, dict):
            numbers.append(_most_layers(value))
        elif "layer" in key and type(value) is int:
            numbers.append(value)
        elif key == "depths" and isinstance(value, list):
            numbers.append(sum(number for number in value if type(number) is int))
    return max(numbers)


@contextmanager
def silently() -> Iterator[None]:
    """Without what transformers tells about a config: its readers didn't ask."""
    log = import_transformers().utils.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)
