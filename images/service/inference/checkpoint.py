"""Checks a mounted model before its weights are read: config.json and the header of model.safetensors."""

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.placement import Checkpoint, CheckpointUnreadable, open_checkpoint
from service.errors import ModelUnreadable
from service.inference.architecture import BertShape, Shape, parameter_shapes

FLOATS = frozenset({"F32", "F16", "BF16"})  # the types that are taken as weights
# Buffers in older exports without information (0..511)
IGNORED = frozenset({"bert.embeddings.position_ids"})
_FILES = ("config.json", "model.safetensors")
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
)
_MAX_SIZE = 1 << 20
_MAX_LAYERS = 1 << 10  # each has sixteen tensors, which are listed before the file is asked for them
_MAX_LABEL_CHARS = 1000  # every answer holds every label
MOST_TEXT_BYTES = 64 << 20  # of config.json or a tokenizer; the largest ones known have some 30 MB
_SHOWN = 4


@dataclass(frozen=True)
class Stored:
    """One tensor as the file describes it."""

    dtype: str
    shape: Shape


def is_present(directory: Path) -> bool:
    """Whether a model was mounted. Raises ModelUnreadable when only a part of one is there."""
    try:
        there = [name for name in _FILES if is_file(directory / name)]
        others = sorted(path.name for path in directory.glob("*.bin")) if directory.is_dir() else []
    except OSError as error:  # not absent but unreadable: random weights instead would be misleading
        raise _unreadable(directory, error) from error
    if len(there) == len(_FILES):
        return True
    if not there and not others:
        return False
    missing = ", ".join(name for name in _FILES if name not in there)
    raise ModelUnreadable(
        f"{directory} has {', '.join(there + others)} but not {missing}",
        "mount a directory with config.json, model.safetensors and vocab.txt or tokenizer.json "
        "(a pytorch_model.bin must be converted to safetensors first)",
    )


def read_text(path: Path) -> str:
    """The UTF-8 text of a regular file of at most MOST_TEXT_BYTES: a pipe would be waited for.

    Raises OSError and UnicodeDecodeError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        data = file.read(MOST_TEXT_BYTES + 1)
    if len(data) > MOST_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_TEXT_BYTES:,} bytes", str(path))
    return data.decode("utf-8")


def is_file(path: Path) -> bool:
    """Whether a file is there. Raises ModelUnreadable for what isn't one: a link to nowhere, a pipe."""
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    raise ModelUnreadable(
        f"{path} is not a regular file" + (", but a link that leads nowhere" if path.is_symlink() else ""),
        "mount the files themselves; links of a hub's cache lead out of a mounted snapshot",
    )


def read_shape(path: Path) -> BertShape:
    """The model's sizes and labels from config.json. Raises ModelUnreadable for anything but a BERT."""
    config = _read_object(path)
    for key, expected in (
        ("model_type", "bert"),
        ("hidden_act", "gelu"),
        ("position_embedding_type", "absolute"),
    ):
        if config.get(key, expected) != expected:
            raise ModelUnreadable(
                f"{path}: {key} is {config[key]!r}; only {expected!r} is supported", "mount a BERT classifier"
            )
    sizes = {key: _size(path, config, key) for key in _SIZES}
    eps = config.get("layer_norm_eps", 1e-12)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < 1:
        raise ModelUnreadable(f"{path}: layer_norm_eps is {eps!r}; a number between 0 and 1 is needed")
    shape = BertShape(**sizes, layer_norm_eps=float(eps), labels=_labels(path, config))
    if shape.hidden_size % shape.num_attention_heads:
        raise ModelUnreadable(
            f"{path}: hidden_size {shape.hidden_size} isn't a multiple of "
            f"num_attention_heads {shape.num_attention_heads}"
        )
    return shape


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise ModelUnreadable(f"{path} must hold a JSON object, not {type(found).__name__}")
    return found


def _unreadable(path: Path, error: Exception) -> ModelUnreadable:
    hint = "the service runs as user 10001: `chmod -R a+rX` the directory"
    return ModelUnreadable(
        f"{path} can't be read: {error}", hint if isinstance(error, PermissionError) else ""
    )


def _size(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    most = _MAX_LAYERS if key == "num_hidden_layers" else _MAX_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ModelUnreadable(f"{path}: {key} is {value!r}; a whole number from 1 to {most} is needed")
    return value


def _labels(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Labels by class number: Hugging Face writes {"0": "positive", ...}."""
    named = config.get("id2label")
    if not isinstance(named, dict) or not named:
        raise ModelUnreadable(f"{path}: id2label is missing, so the classes have no names")
    numbers = [str(number) for number in range(len(named))]
    if set(named) != set(numbers) or not all(isinstance(name, str) for name in named.values()):
        raise ModelUnreadable(
            f"{path}: id2label must name the classes 0 to {len(named) - 1}, each with a string"
        )
    labels = tuple(named[number] for number in numbers)
    seen: set[str] = set()
    for number, label in enumerate(labels):
        if len(label) > _MAX_LABEL_CHARS:
            raise ModelUnreadable(f"{path}: the label of class {number} has {len(label)} characters")
        try:
            label.encode()
        except UnicodeEncodeError as error:  # JSON's escapes may write it, and no answer could
            raise ModelUnreadable(f"{path}: the label of class {number} is no text") from error
        if label in seen:
            raise ModelUnreadable(f"{path}: id2label names two classes {label!r}; scores are by label")
        seen.add(label)
    return labels


@contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
    """A safetensors file with its header checked, closed after the block.

    Raises ModelUnreadable for a file that is none, was cut short, or changes within the block.
    """
    try:
        with open_checkpoint(path) as file:
            yield file
    except CheckpointUnreadable as error:
        if isinstance(error.__cause__, OSError):
            raise _unreadable(path, error.__cause__) from error
        raise ModelUnreadable(error.message, error.hint) from error


def stored_in(file: Checkpoint) -> dict[str, Stored]:
    """Name, type and shape of every tensor, as the header has them."""
    return {name: Stored(each.dtype, each.shape) for name, each in file.tensors.items()}


def check(shape: BertShape, stored: Mapping[str, Stored], path: Path) -> None:
    """Every parameter of the model must be there, in its shape, and nothing else (strict).

    Raises ModelUnreadable that names the first few differences of each kind.
    """
    expected = parameter_shapes(shape)
    found = {name: tensor for name, tensor in stored.items() if name not in IGNORED}
    shared = [name for name in expected if name in found]
    complaints = (
        _list("missing", [name for name in expected if name not in found]),
        _list("not part of this model", [name for name in found if name not in expected]),
        _list(
            "of another shape",
            [
                f"{name} {list(found[name].shape)} instead of {list(expected[name])}"
                for name in shared
                if found[name].shape != expected[name]
            ],
        ),
        _list(
            "of an unsupported type",
            [f"{name} {found[name].dtype}" for name in shared if found[name].dtype not in FLOATS],
        ),
    )
    if any(complaints):
        raise ModelUnreadable(
            f"{path} doesn't fit its config.json: {'; '.join(filter(None, complaints))}",
            "mount config.json and model.safetensors of one and the same BERT sequence classifier",
        )


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"
