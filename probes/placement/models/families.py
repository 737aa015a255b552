"""What a `config.json` alone says of a model: blocks and tensors, named as transformers names them.

`families.toml` lists the tensors of each architecture. So a plan made from a config fits the module.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from probes.core.errors import CheckpointUnreadable, ModelUnknown
from probes.placement.models.description import (
    DTYPE_BITS,
    POSITIONS,
    Attention,
    BlockDescription,
    ModelDescription,
    TensorDescription,
    Use,
    block_name,
    is_position_table,
)
from probes.placement.models.operations import AROUND

FILE: Final = Path(__file__).with_name("families.toml")
MOST: Final = 2**40  # of any number in a config: a larger one is a mistake or worse
MOST_LAYERS: Final = 10_000
HEADER_HINT: Final = "give its safetensors file or folder, whose header says what it consists of"


class ConfigFields:
    """The fields of a config, checked as they are read. A wrong one raises CheckpointUnreadable."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the key is there, and not null."""
        return self._values.get(name) is not None

    def number(self, *names: str, default: int | None = None) -> int:
        """The number under the first of these keys that is there, else the default, if there is one."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                if type(value) is not int or not 0 < value <= MOST:
                    raise CheckpointUnreadable(
                        f"{self.where}: {name} is {str(value)[:40]!r}, not a number from 1 to {MOST:,}"
                    )
                return value
        if default is None:
            raise CheckpointUnreadable(
                f"{self.where}: the key {names[0]} is missing", "give the model's own config.json"
            )
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name, default)
        if value is not None and type(value) is not bool:
            raise CheckpointUnreadable(f"{self.where}: {name} is {str(value)[:40]!r}, not true or false")
        return default if value is None else value

    def text(self, name: str) -> str:
        """A text; empty where the key isn't there."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise CheckpointUnreadable(f"{self.where}: {name} is {str(value)[:40]!r}, not a text")
        return value or ""


@dataclass(frozen=True)
class Family:
    """An architecture: the lines of its tensors in call order, before the layers, in each, and after them."""

    layer: Sequence[str]
    before: str = "embed"
    after: str = "norm"
    top: str = "model."  # before names of a model with its output
    bare: str = ""  # before those of the base alone
    layers: str = "layers"
    table: str = "embed_tokens"  # whose weights the output may share; empty: the output depends on the task
    tied: bool = False  # by default
    head_bias: bool = False
    whole: bool = True  # with an output where the config names no class
    window: bool = False  # its key sliding_window limits attention; else only with use_sliding_window
    head_width: int | None = None  # by default; None: the width over the number of heads
    # more sizes: keys of the config, and the default, which may be another size
    numbers: Mapping[str, tuple[Sequence[str], int | str]] = field(default_factory=dict)
    # conditions of lines: whether it holds always, or a key of the config and its default
    flags: Mapping[str, bool | tuple[str, bool]] = field(default_factory=dict)


@cache
def families() -> Mapping[str, Family]:
    """All architectures, by model_type."""
    table = _table()["families"]

    def entry(name: str) -> dict[str, Any]:
        own = dict(table[name])
        like = own.pop("like", None)
        return {**entry(like), **own} if like else own

    return {name: Family(**entry(name)) for name in table}


@cache
def _table() -> Mapping[str, Any]:
    with FILE.open("rb") as file:
        return tomllib.load(file)


def from_config(values: Mapping[str, Any], *, name: str, where: str) -> ModelDescription:
    """The description of a config's model.

    Raises ModelUnknown for an architecture without a family here, CheckpointUnreadable for a wrong field.
    """
    fields = ConfigFields(values, where)
    kind = fields.text("model_type")
    if values.get("quantization_config"):
        raise ModelUnknown(f"{where}: it is a quantised model", HEADER_HINT)
    if kind not in families():
        listed = ", ".join(sorted(families()))
        raise ModelUnknown(
            f"{where}: the architecture {kind[:40]!r} has no rule here; known are {listed}", HEADER_HINT
        )
    family = families()[kind]
    maker = _Maker(fields, family, _is_whole(values, family))
    named = fields.has("dtype") or fields.has("torch_dtype")
    return ModelDescription(
        name or kind,
        maker.blocks(),
        f"config.json of {kind}",
        maker.tied,
        () if named else ("the config names no dtype: float32",),
        positions=fields.number(*POSITIONS) if any(map(fields.has, POSITIONS)) else None,
    )


def _is_whole(values: Mapping[str, Any], family: Family) -> bool:
    """Whether a config's model has a head for a task, or is the bare stack of layers."""
    names = values.get("architectures")
    first = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not first:
        return family.whole
    return not first.endswith("Model") or first.endswith("LMHeadModel")


class _Maker:
    """Makes the blocks of one model. Raises CheckpointUnreadable for a wrong field of its config."""

    def __init__(self, fields: ConfigFields, family: Family, whole: bool) -> None:
        self._fields, self._family, self._whole = fields, family, whole
        width = fields.number("hidden_size", "n_embd", "d_model", "dim")
        heads = fields.number("num_attention_heads", "n_head", "n_heads")
        layers = fields.number("num_hidden_layers", "n_layer", "n_layers")
        if layers > MOST_LAYERS:
            raise CheckpointUnreadable(
                f"{fields.where}: {layers:,} layers are more than the {MOST_LAYERS:,} read here"
            )
        key_heads = fields.number("num_key_value_heads", default=heads)
        head_width = fields.number("head_dim", default=family.head_width or max(width // heads, 1))
        self._layers = layers
        self._sizes = {
            "width": width,
            "queries": heads * head_width,
            "keys": key_heads * head_width,
            "head_width": head_width,
            "inner": fields.number(
                "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * width
            ),
            "vocabulary": fields.number("vocab_size"),
        }
        dtype = (fields.text("dtype") or fields.text("torch_dtype")).removeprefix("torch.") or "float32"
        if dtype not in DTYPE_BITS:
            raise CheckpointUnreadable(f"{fields.where}: the dtype {dtype[:40]!r} is unknown")
        self._dtype, window = dtype, None
        if family.window or fields.flag("use_sliding_window", default=False):
            window = fields.number("sliding_window") if fields.has("sliding_window") else None
        for name, (keys, default) in family.numbers.items():
            usual = self._sizes[default] if isinstance(default, str) else default
            self._sizes[name] = fields.number(*keys, default=usual)
        self._sizes.setdefault("word", width)
        self._attention = Attention(heads, key_heads, head_width, window)
        self._top = family.top if whole else family.bare
        self._has_head = whole and bool(family.table)
        tied = self._has_head and fields.flag("tie_word_embeddings", default=family.tied)
        self.tied = ((f"{self._top}{family.table}.weight", "lm_head.weight"),) if tied else ()
        self._flags = {**family.flags, "bare": not whole, "tied": tied, "head_bias": family.head_bias}

    def blocks(self) -> tuple[BlockDescription, ...]:
        """All blocks, in call order. A tied table is a block of its own, both table and product."""
        family, top = self._family, self._top
        before = tuple(self._tensors(family.before, top))
        attention = replace(self._attention, rotary=not any(map(is_position_table, before)))
        blocks = [*self._grouped(before)]
        for index in range(self._layers):
            at = f"{top}{family.layers}.{index}"
            tensors = (tensor for part in family.layer for tensor in self._tensors(part, f"{at}."))
            blocks.append(BlockDescription(at, tuple(tensors), attention=attention))
        head = self._tensors("head", "") if self._has_head else ()
        blocks += self._grouped((*self._tensors(family.after, top), *head))
        return replace(blocks[0], around=AROUND), *blocks[1:]

    def _grouped(self, tensors: Sequence[TensorDescription]) -> Iterator[BlockDescription]:
        """Tensors outside the layers, by block."""
        shared = {group[0] for group in self.tied}
        groups: dict[str, list[TensorDescription]] = {}
        for tensor in tensors:
            at = tensor.name if tensor.name in shared else block_name(tensor.name)
            groups.setdefault(at, []).append(tensor)
        for name, members in groups.items():
            if name in shared:
                yield BlockDescription(name, (replace(members[0], use="product"),), looked_up=True)
            else:
                yield BlockDescription(name, tuple(members))

    def _tensors(self, lines: str, top: str) -> Iterator[TensorDescription]:
        """The tensors of some lines of the table, below the module `top`."""
        for line in filter(None, _table()["lines"][lines].splitlines()):
            kind, name, *words = line.split()
            if not all(self._holds(word[1:]) for word in words if word[0] == "?"):
                continue
            shape = tuple(self._size(word) for word in words if word[0] not in "+?")
            if kind in ("one", "expert"):
                yield self._tensor(top + name, shape, active=self._active() if kind == "expert" else 1.0)
                continue
            stored = shape[::-1] if kind == "linear" else shape
            use: Use | None = "lookup" if kind == "table" else None
            weight = self._tensor(f"{top}{name}.weight", stored, use)
            yield replace(weight, inputs_first=True) if kind == "turned" else weight
            if any(self._holds(word[1:]) for word in words if word[0] == "+"):
                yield self._tensor(f"{top}{name}.bias", shape[-1:])

    def _tensor(
        self, name: str, shape: tuple[int, ...], use: Use | None = None, *, active: float = 1.0
    ) -> TensorDescription:
        usual: Use = "elementwise" if len(shape) == 1 else "product"
        return TensorDescription(name, shape, self._dtype, use or usual, active)

    def _size(self, text: str) -> int:
        terms = (term.split("*") for term in text.split("+"))
        return sum(math.prod(int(n) if n.isdecimal() else self._sizes[n] for n in term) for term in terms)

    def _holds(self, condition: str) -> bool:
        one, differ, other = condition.partition("!=")
        if differ:
            return self._sizes[one] != self._sizes[other]
        known = self._flags.get(condition.lstrip("!"), not condition)
        holds = known if isinstance(known, bool) else self._fields.flag(known[0], default=known[1])
        return holds != condition.startswith("!")

    def _active(self) -> float:
        """The share of experts that a row chooses."""
        experts = self._sizes["experts"]
        chosen = self._fields.number("num_experts_per_tok", default=min(2, experts))
        if chosen > experts:
            raise CheckpointUnreadable(
                f"{self._fields.where}: num_experts_per_tok is {chosen:,}, and there are {experts:,} experts",
                "give the model's own config.json",
            )
        return chosen / experts
