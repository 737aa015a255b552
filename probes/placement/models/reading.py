"""A model's description from what a user has: a known name, a config.json, a safetensors file or folder.

`describe` takes any of them. A config is described by `families.py`; a checkpoint without a
config that has a rule, by guesses from the names and shapes in its headers.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from probes.core import files
from probes.core.codec import load
from probes.core.errors import CheckpointUnreadable, ModelUnknown, UsageError
from probes.core.spelling import guess
from probes.hardware.cards import is_card
from probes.placement.models.description import (
    BlockDescription,
    ModelDescription,
    TensorDescription,
    Use,
    block_name,
)
from probes.placement.models.families import from_config
from probes.placement.models.headers import (
    DTYPES,
    PICKLES,
    StoredTensor,
    read_checkpoint,
    require_regular,
)

_TRAINED: Final = re.compile(r"(-(instruct|base|chat|hf|it|v[0-9.]+))+$")
KNOWN: Final = Path(__file__).with_name("known.json")
MOST_CONFIG_BYTES: Final = 4 << 20
MOST_NAME: Final = 200  # characters
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def named_path(named: object, what: str) -> Path:
    """The path that a caller gave for `what`. Raises UsageError for what can't be a path."""
    if isinstance(named, str | os.PathLike) and isinstance(text := os.fspath(named), str):
        with suppress(UnicodeEncodeError):
            if text and b"\0" not in os.fsencode(text):
                return Path(text)
    raise UsageError(f"the {what} is {ascii(named)[:40]}, which isn't a path", "give a str or a pathlib.Path")


@cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Configs of a few published models, by name: the facts of their config.json, nothing else."""
    configs: Mapping[str, Mapping[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return configs


def known_name(model: str) -> str:
    """A model's name in lower case; of a hub's name, such as Qwen/Qwen2.5-3B-Instruct, the known one if any.

    What was trained further has the shapes of what it began as.
    """
    name = model.lower()
    if HUB_NAME.fullmatch(model):
        short = _TRAINED.sub("", name.rpartition("/")[2])
        return short if short in known_configs() else name
    return name


def describe(model: str) -> ModelDescription:
    """The description of a known model's name, or of a path: a config.json, safetensors, or a folder of them.

    Raises UsageError, CheckpointUnreadable and ModelUnknown.
    """
    path = named_path(model, "model")
    if is_known(model):
        name = known_name(model)
        return from_config(known_configs()[name], name=name, where=f"the config of {name}")
    if path.is_dir():
        return _folder(path)
    if path.name.endswith(".safetensors") or path.name.endswith(".safetensors.index.json"):
        return _files(path, beside=path.parent / "config.json")
    if path.suffix == ".json":
        return _config(path)
    if is_card(model):
        raise UsageError(
            f"{model} is a card, not a model",
            "the model comes first: `weir fits qwen2.5-3b CARD`, `weir probe plan qwen2.5-3b --machine CARD`",
        )
    give = "give a config.json, a *.safetensors file or a folder that has one"
    give = f"{guess(model, known_configs())}{give}"
    is_on_hub = HUB_NAME.fullmatch(model) and not path.parent.exists()
    fetch = f"fetch its config: `hf download {model} config.json --local-dir FOLDER`, then give the folder"
    raise UsageError(
        f"{model} is neither the name of a known model nor a model's file",
        f"{fetch if is_on_hub else give}; known names are {', '.join(known_configs())}",
    )


def is_known(model: str) -> bool:
    """Whether it is the name of a known model, and no path of one."""
    return known_name(model) in known_configs() and not holds_a_model(Path(model))


def holds_a_model(path: Path) -> bool:
    """Whether the path is a file, or a folder with a config or weights. Known names give way to such."""
    if not path.is_dir():
        return path.exists()
    kinds = {".safetensors", *PICKLES}
    return any(file.name == "config.json" or file.suffix in kinds for file in path.glob("*"))


def _folder(path: Path) -> ModelDescription:
    config = path / "config.json"
    if any(path.glob("*.safetensors")) or not config.exists():
        return _files(path, beside=config)
    return _config(config)


def _files(path: Path, *, beside: Path) -> ModelDescription:
    stored = read_checkpoint(path)
    config = None
    if beside.exists():
        with suppress(CheckpointUnreadable, ModelUnknown):  # the headers say enough
            config = _config(beside)
    tensors = [tensor for file in stored for tensor in file.tensors]
    name = path.name if path.is_dir() or len(stored) > 1 else path.stem
    return from_headers(tensors, name=name, source="safetensors headers", known=config)


def config_of(model: str) -> Mapping[str, Any]:
    """The config.json of what `describe` takes. Raises UsageError and CheckpointUnreadable."""
    path = named_path(model, "model")
    if is_known(model):
        return known_configs()[known_name(model)]
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or config.name.endswith(".safetensors.index.json"):
        config = path.parent / "config.json"
    if not config.exists():
        raise UsageError(
            f"{model} has no config.json, which says how to build it", "put the model's own there"
        )
    return _values(config)


def _config(path: Path) -> ModelDescription:
    values = _values(path)
    name = values.get("_name_or_path")
    return from_config(
        values, name=name[:MOST_NAME] if isinstance(name, str) and name else path.parent.name, where=str(path)
    )


def _values(path: Path) -> Mapping[str, Any]:
    """The content of a config.json. Raises CheckpointUnreadable."""
    require_regular(path)
    try:
        values = load(files.read_text(path, most_bytes=MOST_CONFIG_BYTES))
    except OSError as error:
        raise CheckpointUnreadable(
            f"can't read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from error
    except ValueError as error:
        raise CheckpointUnreadable(f"can't read {path}: it is not JSON: {str(error)[:120]}") from error
    if not isinstance(values, dict):
        raise CheckpointUnreadable(
            f"can't read {path}: it is not a JSON object", "give the model's own config.json"
        )
    return values


# From the names and shapes in headers

_TABLE: Final = re.compile(r"(^|[._])(embed\w*|wte|wpe|word_embeddings|\w+_embeddings?|shared)\.weight$")
_FIRST: Final = re.compile(
    r"embed|wte|wpe|^shared|conv_in|patch|stem|time_|x_embedder|context_embedder", re.IGNORECASE
)
_NORM: Final = re.compile(r"(^|\.)(final_\w*norm\w*|ln_f|norm|norm_out|conv_norm_out)$", re.IGNORECASE)
_LAST: Final = re.compile(
    r"lm_head|embed_out|^head|classifier|pooler|conv_out|proj_out|project_out", re.IGNORECASE
)
_DIGITS: Final = re.compile(r"(\d+)")


def from_headers(
    stored: Iterable[StoredTensor], *, name: str, source: str, known: ModelDescription | None = None
) -> ModelDescription:
    """The description of a model with these tensors; `known` is what the config.json beside them says."""
    groups: dict[str, list[TensorDescription]] = {}
    for tensor in stored:
        described = TensorDescription(tensor.name, tensor.shape, DTYPES[tensor.dtype], _use(tensor))
        groups.setdefault(block_name(tensor.name), []).append(described)
    blocks = [BlockDescription(at, tuple(groups[at])) for at in sorted(groups, key=_order)]
    if known is not None:
        matched = _matched(blocks, known)
        if matched is not None:
            return replace(known, name=name, blocks=matched, source=f"{source} and its config.json")
    notes = ["order of calls and attention are guessed from names; keys and values of a cache aren't counted"]
    blocks, tied = _tied(blocks)
    if tied:
        notes.append(f"{tied[0][0]} is taken for the output's weights too: no tensor is named like a head")
    return ModelDescription(name, tuple(blocks), source, tied, tuple(notes))


def _use(tensor: StoredTensor) -> Use:
    if len(tensor.shape) < 2:
        return "elementwise"
    return "lookup" if len(tensor.shape) == 2 and _TABLE.search(tensor.name) else "product"


def _order(block: str) -> tuple[int, tuple[tuple[int, int | str], ...]]:
    """The key that sorts blocks: tables first, the last norm and heads last, numbered ones between."""
    numbered = bool(_DIGITS.search(block))
    place = 0 if _FIRST.search(block) else 1 if numbered else 3 if _LAST.search(block) else 1
    if place == 1 and not numbered and _NORM.search(block):
        place = 2
    parts = tuple((0, int(p)) if p.isdecimal() else (1, p) for p in _DIGITS.split(block[:200]) if p)
    return place, parts


def _tied(blocks: list[BlockDescription]) -> tuple[list[BlockDescription], tuple[tuple[str, ...], ...]]:
    """The blocks, and the tied tensors: without a head, the largest table is the output's weights too."""
    tables = [
        (tensor.n_bytes, place)
        for place, block in enumerate(blocks)
        for tensor in block.tensors
        if tensor.use == "lookup" and len(block.tensors) == 1
    ]
    if not tables or any(re.search(r"head|embed_out|classifier|output\b", block.name) for block in blocks):
        return blocks, ()
    place = max(tables)[1]
    tensor = blocks[place].tensors[0]
    shared = BlockDescription(
        tensor.name,
        (replace(tensor, use="product"),),
        looked_up=True,
    )
    return [*blocks[:place], shared, *blocks[place + 1 :]], ((tensor.name,),)


def _matched(
    blocks: Sequence[BlockDescription], known: ModelDescription
) -> tuple[BlockDescription, ...] | None:
    """The config's blocks in the files' dtypes; None unless they are the files' blocks, of the same sizes."""
    stored = {block.name: block for block in blocks}
    result = []
    for block in known.blocks:
        at = block.name if block.name in stored else block_name(block.name)
        match = stored.pop(at, None)
        if match is None or sum(t.numbers for t in match.tensors) != sum(t.numbers for t in block.tensors):
            return None
        dtype = max(match.tensors, key=lambda tensor: tensor.n_bytes).dtype
        tensors = tuple(replace(tensor, dtype=dtype) for tensor in block.tensors)
        result.append(replace(block, tensors=tensors))
    return tuple(result) if not stored else None
