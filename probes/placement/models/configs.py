"""What the rules of `families.py` are made of: checked fields of a config.json, sizes, tensors and parts.

A rule gives the `Parts` of an architecture, and `build_description` makes a model of them. Names of tensors
and blocks are those of transformers' modules, so that a plan made from a config fits the module.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from probes.core.errors import CheckpointUnreadable
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

MOST: Final = 2**40  # of any number in a config: a larger one is a mistake or worse
MOST_LAYERS: Final = 10_000
HEADER_HINT: Final = "give its safetensors file or folder, whose header says what it consists of"

Shape = tuple[int, ...]
Tensors = Iterator[TensorDescription]


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

    def positions(self) -> int | None:
        """Tokens of the longest sequence, by one of the usual keys; None where there is none of them."""
        return self.number(*POSITIONS) if any(map(self.has, POSITIONS)) else None

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
class Sizes:
    """The sizes of a transformer."""

    width: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    inner: int  # of the feed-forward layer
    vocabulary: int
    dtype: str
    window: int | None

    @property
    def queries(self) -> int:
        """Numbers of all heads together."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Numbers of all key heads together."""
        return self.key_heads * self.head_width


def read_sizes(fields: ConfigFields, *, head_width: int | None = None) -> Sizes:
    """The sizes under their usual keys; `head_width` is the architecture's own default."""
    width = fields.number("hidden_size", "n_embd", "d_model", "dim")
    heads = fields.number("num_attention_heads", "n_head", "n_heads")
    layers = fields.number("num_hidden_layers", "n_layer", "n_layers")
    if layers > MOST_LAYERS:
        raise CheckpointUnreadable(
            f"{fields.where}: {layers:,} layers are more than the {MOST_LAYERS:,} read here"
        )
    return Sizes(
        width=width,
        layers=layers,
        heads=heads,
        key_heads=fields.number("num_key_value_heads", default=heads),
        head_width=fields.number("head_dim", default=head_width or max(width // heads, 1)),
        inner=fields.number("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * width),
        vocabulary=fields.number("vocab_size"),
        dtype=_dtype(fields),
        window=_window(fields),
    )


def _window(fields: ConfigFields) -> int | None:
    """How many tokens attention looks back on, where all layers have the same limit; None: no limit."""
    kind = fields.text("model_type")
    if kind in ("mistral", "mixtral", "phi3") or fields.flag("use_sliding_window", default=False):
        return fields.number("sliding_window") if fields.has("sliding_window") else None
    return None


def _dtype(fields: ConfigFields) -> str:
    name = (fields.text("dtype") or fields.text("torch_dtype")).removeprefix("torch.") or "float32"
    if name not in DTYPE_BITS:
        raise CheckpointUnreadable(f"{fields.where}: the dtype {name[:40]!r} is unknown")
    return name


class TensorMaker:
    """Makes tensors of one dtype."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def one(self, name: str, *shape: int, active: float = 1.0) -> TensorDescription:
        """A tensor: a product's, or elementwise where it has a single dimension."""
        use: Use = "elementwise" if len(shape) == 1 else "product"
        return TensorDescription(name, shape, self._dtype, use, active)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> Tensors:
        """The weight of a linear layer as torch stores it, and its bias."""
        yield self.one(f"{name}.weight", outputs, inputs)
        if bias:
            yield self.one(f"{name}.bias", outputs)

    def inputs_first(self, name: str, inputs: int, outputs: int) -> Tensors:
        """The weight of a linear layer that stores it transposed, and its bias."""
        yield replace(self.one(f"{name}.weight", inputs, outputs), inputs_first=True)
        yield self.one(f"{name}.bias", outputs)

    def norm(self, name: str, width: int, *, bias: bool = False) -> Tensors:
        """A normalisation's scale, and its shift if it has one."""
        yield self.one(f"{name}.weight", width)
        if bias:
            yield self.one(f"{name}.bias", width)

    def table(self, name: str, rows: int, width: int) -> Tensors:
        """A lookup table."""
        yield TensorDescription(f"{name}.weight", (rows, width), self._dtype, "lookup")


@dataclass(frozen=True)
class Parts:
    """The parts of a model, in call order."""

    before: tuple[TensorDescription, ...]
    prefix: str  # of a layer's name: model.layers
    layer: Callable[[str], Tensors]  # the tensors of the layer with this name; all are alike
    after: tuple[TensorDescription, ...]
    tied: tuple[tuple[str, ...], ...] = ()  # names of one tensor, the first of which is in `before`


def output_head(
    fields: ConfigFields,
    size: Sizes,
    make: TensorMaker,
    whole: bool,
    *,
    table: str,
    tied: bool,
    bias: bool = False,
) -> tuple[tuple[TensorDescription, ...], tuple[tuple[str, ...], ...]]:
    """The output's tensors, and the names it shares with a table; nothing unless the model is `whole`.

    `tied`: the architecture's default for sharing.
    """
    if not whole:
        return (), ()
    if not fields.flag("tie_word_embeddings", default=tied):
        return tuple(make.linear("lm_head", size.width, size.vocabulary, bias=bias)), ()
    own = (make.one("lm_head.bias", size.vocabulary),) if bias else ()
    return own, ((f"{table}.weight", "lm_head.weight"),)


def build_description(
    parts: Parts,
    size: Sizes,
    *,
    name: str,
    source: str,
    notes: tuple[str, ...] = (),
    positions: int | None = None,
) -> ModelDescription:
    """The description of a model of these parts."""
    rotary = not any(map(is_position_table, parts.before))
    attention = Attention(size.heads, size.key_heads, size.head_width, size.window, rotary=rotary)
    blocks = [*_grouped(parts.before, parts.tied)]
    for index in range(size.layers):
        at = f"{parts.prefix}.{index}"
        tensors = tuple(parts.layer(at))
        blocks.append(BlockDescription(at, tensors, attention=attention))
    blocks += _grouped(parts.after, ())
    blocks[0] = replace(blocks[0], around=AROUND)
    return ModelDescription(name, tuple(blocks), source, parts.tied, notes, positions=positions)


def _grouped(
    tensors: tuple[TensorDescription, ...], tied: tuple[tuple[str, ...], ...]
) -> Iterator[BlockDescription]:
    """Tensors outside the layers, by block. A tied one is a block of its own, both table and product."""
    shared = {group[0] for group in tied}
    groups: dict[str, list[TensorDescription]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.name if tensor.name in shared else block_name(tensor.name), []).append(
            tensor
        )
    for name, members in groups.items():
        if name in shared:
            table = replace(members[0], use="product")
            yield BlockDescription(name, (table,), looked_up=True)
        else:
            yield BlockDescription(name, tuple(members))
