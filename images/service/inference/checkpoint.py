"""What a BERT sequence classifier's files hold: sizes (`BertShape`), the name and shape of every parameter,
and the checks of config.json and of the header of model.safetensors, before any weight is read. Without
torch.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.placement import Checkpoint, CheckpointUnreadable, open_checkpoint
from service.errors import ModelUnreadable

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BertShape:
    """Sizes as Hugging Face's `config.json` names them; the defaults are FinBERT's (ProsusAI/finbert)."""

    num_hidden_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    vocab_size: int = 30522
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    labels: tuple[str, ...] = ("positive", "negative", "neutral")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


def _affine(name: str, shape: Shape) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _layer(prefix: str, shape: BertShape) -> dict[str, Shape]:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    return (
        _affine(f"{prefix}.attention.self.query", (hidden, hidden))
        | _affine(f"{prefix}.attention.self.key", (hidden, hidden))
        | _affine(f"{prefix}.attention.self.value", (hidden, hidden))
        | _affine(f"{prefix}.attention.output.dense", (hidden, hidden))
        | _affine(f"{prefix}.attention.output.LayerNorm", (hidden,))
        | _affine(f"{prefix}.intermediate.dense", (wide, hidden))
        | _affine(f"{prefix}.output.dense", (hidden, wide))
        | _affine(f"{prefix}.output.LayerNorm", (hidden,))
    )


def parameter_shapes(shape: BertShape) -> dict[str, Shape]:
    """Return the shape of every parameter of `BertForSequenceClassification` by its Hugging Face name."""
    hidden = shape.hidden_size
    shapes: dict[str, Shape] = {
        "bert.embeddings.word_embeddings.weight": (shape.vocab_size, hidden),
        "bert.embeddings.position_embeddings.weight": (shape.max_position_embeddings, hidden),
        "bert.embeddings.token_type_embeddings.weight": (shape.type_vocab_size, hidden),
    }
    shapes |= _affine("bert.embeddings.LayerNorm", (hidden,))
    for number in range(shape.num_hidden_layers):
        shapes |= _layer(f"bert.encoder.layer.{number}", shape)
    shapes |= _affine("bert.pooler.dense", (hidden, hidden))
    shapes |= _affine("classifier", (len(shape.labels), hidden))
    return shapes


def parameter_count(shape: BertShape) -> int:
    """Return the number of parameters (elements, not bytes)."""
    return sum(math.prod(size) for size in parameter_shapes(shape).values())


FLOATS = frozenset({"F32", "F16", "BF16"})  # types of weights
IGNORED = frozenset({"bert.embeddings.position_ids"})  # a buffer of older exports: 0 to 511
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
_MAX_LAYERS = 1 << 10  # each has sixteen tensors, which are listed before the file is read
_MAX_LABEL_CHARS = 1000  # every answer has every label
MAX_TEXT_BYTES = 64 << 20  # of config.json or a tokenizer; the largest known have some 30 MB
_SHOWN = 4


@dataclass(frozen=True)
class Stored:
    """A tensor as the file's header describes it."""

    dtype: str
    shape: Shape


def is_present(directory: Path) -> bool:
    """Return whether the directory holds a model. Raises ModelUnreadable if it holds only a part of one."""
    try:
        there = [name for name in _FILES if is_file(directory / name)]
        others = sorted(path.name for path in directory.glob("*.bin")) if directory.is_dir() else []
    except OSError as error:  # unreadable, which mustn't lead to random weights
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
    """Return the UTF-8 text of a regular file of at most MAX_TEXT_BYTES. Doesn't wait for a pipe.

    Raises OSError and UnicodeDecodeError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES:,} bytes", str(path))
    return data.decode("utf-8")


def is_file(path: Path) -> bool:
    """Return whether a file is there. Raises ModelUnreadable for a dangling link, a pipe or a directory."""
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    raise ModelUnreadable(
        f"{path} is not a regular file" + (", but a link that leads nowhere" if path.is_symlink() else ""),
        "mount the files themselves; links of a hub's cache lead out of a mounted snapshot",
    )


def read_shape(path: Path) -> BertShape:
    """Read the model's sizes and labels from config.json. Raises ModelUnreadable for anything but a BERT."""
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
        config = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(config, dict):
        raise ModelUnreadable(f"{path} must hold a JSON object, not {type(config).__name__}")
    return config


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
    """Return the labels in the order of their classes, of Hugging Face's {"0": "positive", ...}."""
    by_number = config.get("id2label")
    if not isinstance(by_number, dict) or not by_number:
        raise ModelUnreadable(f"{path}: id2label is missing, so the classes have no names")
    numbers = [str(number) for number in range(len(by_number))]
    if set(by_number) != set(numbers) or not all(isinstance(name, str) for name in by_number.values()):
        raise ModelUnreadable(
            f"{path}: id2label must name the classes 0 to {len(by_number) - 1}, each with a string"
        )
    labels = tuple(by_number[number] for number in numbers)
    seen: set[str] = set()
    for number, label in enumerate(labels):
        if len(label) > _MAX_LABEL_CHARS:
            raise ModelUnreadable(f"{path}: the label of class {number} has {len(label)} characters")
        try:
            label.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, which no answer can hold
            raise ModelUnreadable(f"{path}: the label of class {number} is no text") from error
        if label in seen:
            raise ModelUnreadable(f"{path}: id2label names two classes {label!r}; scores are by label")
        seen.add(label)
    return labels


@contextmanager
def open_weights(path: Path) -> Iterator[Checkpoint]:
    """Open a safetensors file with its header checked, and close it after the block.

    Raises ModelUnreadable for another or a truncated file, and if the file changes within the block.
    """
    try:
        with open_checkpoint(path) as file:
            yield file
    except CheckpointUnreadable as error:
        if isinstance(error.__cause__, OSError):
            raise _unreadable(path, error.__cause__) from error
        raise ModelUnreadable(error.message, error.hint) from error


def stored_tensors(file: Checkpoint) -> dict[str, Stored]:
    """Return the type and shape of every tensor of the header by its name."""
    return {name: Stored(tensor.dtype, tensor.shape) for name, tensor in file.tensors.items()}


def check_tensors(shape: BertShape, stored: Mapping[str, Stored], path: Path) -> None:
    """Check that a file has every parameter of the model, in its shape, and nothing else.

    Raises ModelUnreadable, which names the first few differences of each kind.
    """
    expected = parameter_shapes(shape)
    tensors = {name: tensor for name, tensor in stored.items() if name not in IGNORED}
    shared = [name for name in expected if name in tensors]
    differences = (
        _list("missing", [name for name in expected if name not in tensors]),
        _list("not part of this model", [name for name in tensors if name not in expected]),
        _list(
            "of another shape",
            [
                f"{name} {list(tensors[name].shape)} instead of {list(expected[name])}"
                for name in shared
                if tensors[name].shape != expected[name]
            ],
        ),
        _list(
            "of an unsupported type",
            [f"{name} {tensors[name].dtype}" for name in shared if tensors[name].dtype not in FLOATS],
        ),
    )
    if any(differences):
        raise ModelUnreadable(
            f"{path} doesn't fit its config.json: {'; '.join(filter(None, differences))}",
            "mount config.json and model.safetensors of one and the same BERT sequence classifier",
        )


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"
