"""A model as the planner sees it: blocks in call order, with their tensors. No weights, no torch. Pure.

A block is what a plan assigns a tier to: a module that is called as a whole, with the parameters below it.
`block_name` is the one rule that turns a parameter's name into its block's, for files and module trees alike.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from probes.placement.models.operations import GATHERS, Operation, PeakBytes, parted
from probes.placement.types import LOADING_BYTES, Becomes, RestsOn

Use = Literal["product", "lookup", "elementwise"]

_POSITIONS: Final = re.compile(r"(^|\.)(wpe|position_embeddings|embed_positions)\.weight$")
# Keys of a config under which it says how many tokens the longest sequence has
POSITIONS: Final = ("max_position_embeddings", "n_positions", "n_ctx")
_OF_RECURRENT: Final = re.compile(r"(?:weight|bias)_(?:ih|hh|hr)_(l\d+)(?:_reverse)?")  # as torch names them

# The width of a number in bits, by torch's name of its dtype.
DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 8,
        "uint8": 8,
        "int8": 8,
        "float8_e4m3fn": 8,
        "float8_e5m2": 8,
        "float8_e8m0fnu": 8,
        "float8_e4m3fnuz": 8,
        "float8_e5m2fnuz": 8,
        "float6_e2m3": 6,
        "float6_e3m2": 6,
        "float4_e2m1fn_x2": 4,
        "int16": 16,
        "uint16": 16,
        "float16": 16,
        "bfloat16": 16,
        "int32": 32,
        "uint32": 32,
        "float32": 32,
        "int64": 64,
        "uint64": 64,
        "float64": 64,
        "complex32": 32,
        "complex64": 64,
        "complex128": 128,
    }
)


@dataclass(frozen=True)
class TensorDescription:
    """One parameter or buffer.

    A `product` tensor of shape (n, k) is multiplied with every input row, so it takes n * k multiply-adds a
    row. A `lookup` gives one of its rows for each input row. An `elementwise` tensor, such as a bias, costs
    what reading it costs. `active` is the share that a single input row needs: chosen experts over all.
    """

    name: str  # qualified, as in a state dict
    shape: tuple[int, ...]
    dtype: str  # torch's name: a key of DTYPE_BITS
    use: Use = "product"
    active: float = 1.0
    given: str = ""  # the dtype that the model has it in, where it computes in another
    inputs_first: bool = False  # a product of shape (k, n), as GPT-2 stores it

    @property
    def inputs(self) -> int:
        """Numbers in an input row of its product."""
        return self.shape[0 if self.inputs_first else -1]

    @property
    def outputs(self) -> int:
        """Numbers that its product gives for an input row; of one expert, where it holds several."""
        return self.shape[-1 if self.inputs_first else -2]

    @property
    def numbers(self) -> int:
        """Numbers that it holds."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of its numbers in the dtype that it computes in, unpacked."""
        return -(-self.numbers * DTYPE_BITS[self.dtype] // 8)

    @property
    def given_dtype(self) -> str:
        """The dtype that the model has it in."""
        return self.given or self.dtype

    @property
    def given_bytes(self) -> int:
        """Bytes of its numbers as the model has them, unpacked."""
        return -(-self.numbers * DTYPE_BITS[self.given_dtype] // 8)

    @property
    def products(self) -> float:
        """Multiply-adds for each input row."""
        return self.numbers * self.active if self.use == "product" else 0.0

    def bytes_read(self, rows: int) -> int:
        """Bytes that one call with `rows` input rows reads of it. Rows choose experts independently."""
        if self.use == "lookup":
            return min(self.n_bytes, rows * (self.n_bytes // max(self.shape[0], 1) if self.shape else 0))
        return int(self.n_bytes * (1.0 - (1.0 - self.active) ** rows))


@dataclass(frozen=True)
class Attention:
    """The attention of a block: what its KV cache takes and how much it computes on it."""

    heads: int
    key_value_heads: int
    head_width: int  # numbers in a head
    window: int | None = None  # tokens that are kept; None: all
    rotary: bool = False  # positions turn queries and keys in each layer

    @property
    def numbers_per_token(self) -> int:
        """Numbers in the KV cache for one token of one sequence."""
        return 2 * self.key_value_heads * self.head_width

    def kept(self, context_tokens: int) -> int:
        """How many tokens the cache holds when the context is full."""
        return context_tokens if self.window is None else min(context_tokens, self.window)


@dataclass(frozen=True)
class BlockDescription:
    """One block: a module that is called as a whole, or a parameter that several modules share."""

    name: str
    tensors: tuple[TensorDescription, ...]
    calls: int = 1  # in a pass
    looked_up: bool = False  # a lookup table as well as a product: tied embeddings
    attention: Attention | None = None
    around: int = 0  # operations of a pass outside all blocks, which are counted with this one
    anytime: bool = False  # used while other blocks are called, or written to: it can only be resident
    divisible: bool = False  # into parts (`part_name`), each of which is called by itself
    gpu_only: bool = False  # it can't compute on the CPU of a machine with a GPU
    experts: int = 0  # it consists of so many, which are placed one by one
    chosen: int = 0  # and each input row needs so many of them
    work: tuple[Operation, ...] | None = None  # of a whole pass, as traced; None: by rules, from the above
    modules_called: int = 0  # in that pass, each time counted
    mixed: bool = False  # in that pass its products come between other kernels
    cache_bytes: int = 0  # of keys and values in that pass, which stay for the next one

    @property
    def weight_bytes(self) -> int:
        """Bytes of its tensors as the model has them, unpacked."""
        return sum(tensor.given_bytes for tensor in self.tensors)

    @property
    def fetches(self) -> int:
        """How often a pass needs its weights in place."""
        return self.calls + self.looked_up

    @property
    def lookups_only(self) -> bool:
        """Whether it is an embedding, with which nothing is multiplied."""
        return all(tensor.use == "lookup" for tensor in self.tensors)

    @property
    def joined_bytes(self) -> int:
        """Bytes that cuDNN joins where a recurrent module in it is called whole, besides one layer's."""
        layers: dict[str, list[int]] = {}
        for operation in self.work or ():
            if operation.kind == "recurrent":
                layers.setdefault(operation.at, []).append(operation.weight_bytes)
        return max((sum(each) - max(each) for each in layers.values()), default=0)

    @property
    def kind(self) -> object:
        """A key that is equal for blocks that cost the same: everything except names."""
        shapes = tuple((t.shape, t.dtype, t.use, t.active, t.given, t.inputs_first) for t in self.tensors)
        facts = (self.calls, self.looked_up, self.attention, self.anytime)
        work = None if self.work is None else tuple(operation.cost_key for operation in self.work)
        traced = (work, self.modules_called, self.mixed, self.cache_bytes)
        rest = (self.experts, self.chosen, self.around, self.gpu_only)
        return shapes, facts, rest, traced

    def computed(self, dtype: str) -> "BlockDescription":
        """The block with its bfloat16 tensors converted to `dtype` for computing; empty: as it is."""
        if not dtype:
            return self
        tensors = tuple(
            replace(tensor, dtype=dtype, given="bfloat16") if tensor.dtype == "bfloat16" else tensor
            for tensor in self.tensors
        )
        work = None if self.work is None else tuple(operation.computed(dtype) for operation in self.work)
        width = 2 if dtype == "float32" and tensors != self.tensors else 1
        return replace(self, tensors=tensors, work=work, cache_bytes=width * self.cache_bytes)

    def divided(self) -> "tuple[BlockDescription, ...]":
        """A block for each part, where possible; their costs add up to this one's.

        A tensor of a module above other parts is a block of its own, which can only be resident.
        """
        tensors: dict[str, list[TensorDescription]] = {}
        for tensor in self.tensors:
            tensors.setdefault(part_name(tensor.name), []).append(tensor)
        if not self.divisible or len(tensors) < 2:
            return (self,)
        above = {name[: dot.start()] for name in tensors for dot in re.finditer(r"\.", name)}
        called = {name: tuple(held) for name, held in tensors.items() if name not in above}
        parts = []
        for name, held in tensors.items():
            if name in called:
                parts.append(replace(self, name=name, tensors=called[name]))
            else:
                parts += [replace(self, name=t.name, tensors=(t,), anytime=True) for t in held]
        main = max((part for part in parts if part.name in called), key=lambda part: part.weight_bytes)
        shares: dict[str, list[Operation]] = {}
        if self.work is not None:
            holders = {tensor.name: name for name, held in called.items() for tensor in held}
            shares = parted(self.work, holders, called)
            order = {name: place for place, name in enumerate(shares)}  # of their first operations
            parts.sort(key=lambda part: order.get(part.name, len(order)))

        each, rest = divmod(self.modules_called, len(called))
        return tuple(
            replace(
                part,
                around=self.around if part is main else 0,
                attention=self.attention if part is main else None,
                cache_bytes=self.cache_bytes if part is main else 0,
                divisible=False,
                work=None if self.work is None else tuple(shares.get(part.name, ())),
                modules_called=(each + rest * (part is main)) if part.name in called else 0,
            )
            for part in parts
        )

    def without_experts(self) -> "tuple[BlockDescription, dict[str, BlockDescription]]":
        """The block without its experts, and these by the module that they are in, with their operations."""
        tensors: dict[str, tuple[TensorDescription, ...]] = {}
        if self.anytime or self.calls != 1 or self.looked_up:
            return self, {}
        for tensor in self.tensors:
            if tensor.active < 1.0 and (name := experts_name(tensor.name)):
                tensors[name] = (*tensors.get(name, ()), tensor)
        if not tensors:
            return self, {}
        holders = {tensor.name: self.name for tensor in self.tensors}
        holders |= {tensor.name: name for name, group in tensors.items() for tensor in group}
        kept = tuple(tensor for tensor in self.tensors if holders[tensor.name] not in tensors)
        owners = (self.name, *tensors) if kept else tuple(tensors)
        shares = {} if self.work is None else parted(self.work, holders, owners)

        def work(name: str) -> tuple[Operation, ...] | None:
            return None if self.work is None else tuple(shares.get(name, ()))

        groups = {
            name: BlockDescription(name, held, work=work(name), mixed=self.mixed)
            for name, held in tensors.items()
        }
        return replace(self, tensors=kept, work=work(self.name) if kept else None), groups


def most_bytes(sizes: Iterable[tuple[str, int]]) -> str:
    """The name, such as a dtype's, to which most bytes of these belong; float32 where there are none."""
    sums: Counter[str] = Counter()
    for name, n_bytes in sizes:
        sums[name] += n_bytes
    return max(sums, key=sums.__getitem__, default="float32")


def is_position_table(tensor: TensorDescription) -> bool:
    """Whether it has a row for each position of a sequence, by its name."""
    return _POSITIONS.search(tensor.name) is not None


def experts_name(parameter: str) -> str:
    """The module of experts that a parameter is in, by its name; empty where it is in none."""
    before, found, _ = f"{parameter}.".rpartition(".experts.")
    return f"{before}.experts" if found else ""


def _experts_block(parts: Sequence[BlockDescription]) -> BlockDescription:
    """The block of the experts in these parts, whose tensors are of all experts or of one each."""
    name, tensors = parts[0].name, tuple(tensor for part in parts for tensor in part.tensors)
    keys = {tensor.name[len(name) + 1 :].partition(".")[::2] for tensor in tensors}
    fused = any(not inner for _, inner in keys)
    count = tensors[0].shape[0] if fused else len({key for key, _ in keys})
    chosen = max(1, round(count * max(tensor.active for tensor in tensors)))
    work = None
    if all(part.work is not None for part in parts):
        # what brings chosen experts together is the tier's own, and counted with it
        every = (operation for part in parts for operation in part.work or ())
        work = tuple(o for o in every if not (o.weights and o.name in GATHERS))
    return BlockDescription(
        name,
        tensors,
        gpu_only=True,
        experts=count,
        chosen=chosen,
        work=work,
        mixed=any(part.mixed for part in parts),
    )


@dataclass(frozen=True)
class TracedFacts:
    """What a trace says of a whole pass. `how`: by what it was traced."""

    how: str
    peak: PeakBytes
    peak_with_scores: PeakBytes  # where no kernel attends without keeping scores
    flops: int
    operations: int
    measured: str = ""  # the device on which its operations were measured
    host_s: float | None = None  # of the host to launch the whole, as measured there; None: not measured


@dataclass(frozen=True)
class ModelDescription:
    """A model: its blocks in call order. Each tensor occurs in one block only.

    `tied` has groups of parameter names that share one tensor; the tensor is described under the first.
    """

    name: str
    blocks: tuple[BlockDescription, ...]
    source: str  # what it was read from, for people: "config.json of llama"
    tied: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()  # what was assumed where the source doesn't say
    becomes: Becomes = ""  # what its bfloat16 tensors are converted to for computing
    in_memory: bool = False  # a module that has its values: `place` brings them to their tiers, not `load`
    positions: int | None = None  # tokens of the longest sequence, by the config
    traced: TracedFacts | None = None  # what a trace of the pass says; None: nothing was traced

    @property
    def main_dtype(self) -> str:
        """The dtype that most of its bytes are in, by torch's name."""
        return most_bytes((tensor.dtype, tensor.n_bytes) for block in self.blocks for tensor in block.tensors)

    @property
    def traced_as_computed(self) -> TracedFacts | None:
        """The trace's facts; its activations are twice as large where bfloat16 is computed in float32."""
        if self.traced is None or self.becomes != "float32":
            return self.traced
        peaks = (
            PeakBytes(2 * peak.alive, 2 * peak.reserved)
            for peak in (self.traced.peak, self.traced.peak_with_scores)
        )
        first, second = peaks
        return replace(self.traced, peak=first, peak_with_scores=second)

    @property
    def rests_on(self) -> RestsOn:
        """What is known of its operations and activations."""
        if self.traced is not None:
            return "measured" if self.traced.measured else "trace"
        return "rules" if "config" in self.source else "guesses"

    @property
    def loading_bytes(self) -> int:
        """Bytes of host memory that loading takes beside what it brings there."""
        return 0 if self.in_memory else LOADING_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as the model has them, unpacked."""
        return sum(block.weight_bytes for block in self.blocks)

    @property
    def learned_positions(self) -> int | None:
        """Tokens of the longest sequence that a table of positions serves; None: there is no such table."""
        tables = [t for block in self.blocks for t in block.tensors if is_position_table(t)]
        rows = max((table.shape[0] for table in tables), default=None)
        return rows if rows is None or self.positions is None else min(rows, self.positions)

    def divided(self, most: int = 0) -> "ModelDescription":
        """The model with blocks of more than `most` bytes, or with joined ones, divided where they can be."""
        blocks = (
            block.divided() if block.weight_bytes > most or block.joined_bytes else (block,)
            for block in self.blocks
        )
        return replace(self, blocks=tuple(itertools.chain.from_iterable(blocks)))

    def with_experts_apart(self) -> "ModelDescription":
        """The model with its experts in blocks of their own, each where the first of its tensors was."""
        blocks: list[BlockDescription | str] = []
        experts: dict[str, list[BlockDescription]] = {}
        for block in self.blocks:
            rest, groups = block.without_experts()
            if rest.tensors or not groups:
                blocks.append(rest)
            blocks += [name for name in groups if name not in experts]
            for name, part in groups.items():
                experts.setdefault(name, []).append(part)
        made = (_experts_block(experts[block]) if isinstance(block, str) else block for block in blocks)
        return replace(self, blocks=tuple(made))


def part_name(parameter: str) -> str:
    """The name of the part of a block that holds a parameter: its module, or a layer of a recurrent module.

    `encoder.fc1.weight` is in `encoder.fc1`, and `encoder.lstm.weight_hh_l2` in `encoder.lstm.l2`.
    """
    module, _, name = parameter.rpartition(".")
    layer = _OF_RECURRENT.fullmatch(name)
    return f"{module}.{layer[1]}".lstrip(".") if layer else module


def block_name(parameter: str) -> str:
    """The name of a parameter's block: the first numbered module on its path, else the module that holds it.

    `model.layers.3.mlp.up_proj.weight` is in `model.layers.3`, `model.norm.weight` in `model.norm`. A
    parameter that no module below the top holds is a block of its own.
    """
    parts = parameter.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdecimal() and part.isascii():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or parameter
