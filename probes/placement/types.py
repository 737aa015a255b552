"""What a placement plan holds: the value between planner and runtime, and what `plan --json` writes. Pure."""

import typing
from dataclasses import dataclass
from typing import Final, Literal

from probes.core.errors import DeviceUnusable
from probes.core.units import binary_bytes

Tier = Literal["resident", "packed", "streamed_packed", "streamed", "in_place", "cpu", "disk"]
Bound = Literal["vram", "link", "compute", "launch", "host"]
Objective = Literal["exact", "fast"]
Becomes = Literal["", "float16", "float32"]

PLAN_SCHEMA: Final = "weir-placement-plan/1"
# What loading takes in host memory beside what it brings there: buffers of 24 MiB that pieces of files pass
# through, and less than 40 MiB for packing on the host and what is noted of each tensor.
LOADING_BYTES: Final = 64 << 20
CARDS_SCHEMA: Final = "weir-placement-cards/1"
TIERS: Final = typing.get_args(Tier)
IN_VRAM: Final = ("resident", "packed")  # where weights stay in VRAM
OBJECTIVES: Final = typing.get_args(Objective)


@dataclass(frozen=True)
class BlockPlan:
    """One block and where its weights are kept.

    `weight_bytes` are those that the model asks for, unpacked. `vram_bytes` and `host_bytes` are taken in
    each memory all the time, with packing, alignment and rounding; slots and scratch buffers are the plan's.
    """

    name: str  # the module's qualified name, or the parameter's where several modules hold it
    tier: Tier
    weight_bytes: int
    vram_bytes: int
    host_bytes: int
    wire_bytes: int  # that cross the link in each pass
    predicted_s: float  # the longest of its copy, unpacking and computing, a pass
    dense: bool = False  # packed with 3-bit codes: 7 % fewer bytes, which take longer to unpack
    kept: bool = False  # as bfloat16, and converted for each call to what the plan's bfloat16 becomes
    table: bool = False  # packed and never unpacked as a whole: lookups and products need rows of it


@dataclass(frozen=True)
class PrefetchPool:
    """The buffers that moving blocks pass through. Block i of a ring always uses buffer i modulo its size."""

    slots: int = 2
    slot_bytes: int = 0  # of each
    scratches: int = 2
    scratch_bytes: int = 0  # of each
    ahead: int = 2  # blocks begun before they are called, or pieces of blocks
    pieces: int = 1  # of a packed block that streams, if more: each takes a slot, and is unpacked from there


@dataclass(frozen=True)
class VramUse:
    """Predicted bytes of VRAM, by what takes them."""

    weights: int
    slots: int
    scratch: int
    activations: int
    kv_cache: int
    workspace: int  # of the libraries that multiply
    context: int  # of the driver: outside torch's allocator
    rounding: int  # of torch's allocator

    @property
    def total(self) -> int:
        """All of it."""
        allocated = self.weights + self.slots + self.scratch + self.activations + self.kv_cache
        return allocated + self.workspace + self.context + self.rounding


@dataclass(frozen=True)
class HostUse:
    """Predicted bytes of system memory."""

    pinned: int
    pageable: int
    disk: int  # read from files in each pass; taken in page cache only
    loading: int = 0  # besides, while `load` brings the model from its checkpoint

    @property
    def total(self) -> int:
        """All that is taken at once."""
        return self.pinned + self.pageable + self.loading


@dataclass(frozen=True)
class PassTime:
    """Predicted wall time of one pass: the middle, and the interval that should hold 90 % of measurements."""

    middle_s: float
    low_s: float
    high_s: float
    bound: Bound  # what takes most of it


@dataclass(frozen=True)
class Workload:
    """What one pass does.

    In generation, `tokens` are the prompt's, and `context_tokens` is how many the KV cache has room for.
    """

    batch: int = 1
    tokens: int = 1
    context_tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """Where each block of a model goes on a machine, what that takes and how long a pass should take.

    Weights are always the same bits as the model's. With the objective `exact` the library's own kernels
    multiply them; with `fast` a product may be computed straight from packed weights, its sums rounded in
    another order.
    """

    model: str
    machine: str
    constants: str  # "measured: report.json" or "predicted: profile wx4100"
    objective: Objective
    workload: Workload
    vram_budget: int  # bytes
    host_budget: int  # bytes
    blocks: tuple[BlockPlan, ...]  # in call order
    rings: PrefetchPool
    vram: VramUse
    host: HostUse
    time: PassTime  # in generation, of one generated token
    captured: bool = False  # the time is of a pass replayed as a graph
    compute_dtype: str = ""  # of most products; empty: not planned
    bfloat16_becomes: Becomes = ""  # what such weights compute in, where the GPU has no units for them
    notes: tuple[str, ...] = ()  # what a reader should know: assumptions, conversions, doubts
    schema: str = PLAN_SCHEMA


@dataclass(frozen=True)
class CardsPlan:
    """A model over several equal cards, each with a link of its own.

    Each card has the plan of its blocks, which follow those of the card before; the time in it is that of
    these blocks alone. In one pass the cards compute in turn.
    """

    cards: tuple[Plan, ...]
    time: PassTime  # of one pass through all cards
    interval_s: float  # between the ends of passes when as many are under way as there are cards
    hand_over_bytes: int  # of activations, from each card to the next in a pass
    schema: str = CARDS_SCHEMA


DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
DTYPES = tuple(DTYPE_BYTES)
MODELS = (
    "mlp",
    "transformer",
    "bert-base",
    "gpt2-xl",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
)
STREAM_BUFFERS = 2
BUDGET = 0.75  # of the weights, where no --vram says otherwise
FEWEST_LAYERS = 8
TOKENS = 128  # of each input of a language model


@dataclass(frozen=True)
class Shape:
    """A model as the plan sees it: layers of one size, and the rest, which stays in VRAM."""

    model: str
    dtype: str
    width: int  # of the activations
    layer_bytes: int  # weights of one layer
    fixed_bytes: int = 0  # weights outside the layers: embeddings
    layers: int | None = None  # None: as many as are wanted
    tokens: int = 1  # of each input


@dataclass(frozen=True)
class StackPlan:
    """A model and the split of its weights."""

    shape: Shape
    layers: int
    spilled: tuple[int, ...]  # indices of layers whose weights stay in host memory

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layers * self.shape.layer_bytes + self.shape.fixed_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the weights that cross the link in every pass."""
        return len(self.spilled) * self.shape.layer_bytes


def linear_shape(width: int, dtype: str = "float16") -> Shape:
    """Square linear layers with ReLU, as many as are wanted."""
    return Shape("mlp", dtype, width, width * width * DTYPE_BYTES[dtype])


def plan_stack(shape: Shape, *, weight_bytes: int, budget_bytes: int, room_bytes: int) -> StackPlan:
    """The split of about `weight_bytes`, of which `budget_bytes` hold resident layers and two buffers.

    `room_bytes`: VRAM for the reference, in which every layer is resident. A model of as many layers as are
    wanted is cut to it and the budget with it. Raises DeviceUnusable when too little is left to compare.
    """
    if shape.layers is not None:
        return _plan_whole(shape, shape.layers, budget_bytes=budget_bytes, room_bytes=room_bytes)
    layer = shape.layer_bytes
    total = min(weight_bytes, room_bytes)
    layers = total // layer
    if layers < FEWEST_LAYERS:
        raise DeviceUnusable(
            f"the scenarios need room for {FEWEST_LAYERS} layers of {binary_bytes(layer)} in VRAM, "
            f"there is {binary_bytes(room_bytes)}",
            "end other programs that use the GPU",
        )
    budget = budget_bytes * total // weight_bytes
    resident = min(max(budget // layer - STREAM_BUFFERS, 1), layers - 1)
    return StackPlan(shape, layers, spread(layers, layers - resident))


def _plan_whole(shape: Shape, layers: int, *, budget_bytes: int, room_bytes: int) -> StackPlan:
    """A model of fixed size; nothing of it is cut."""
    whole = StackPlan(shape, layers, ())
    if whole.weight_bytes > room_bytes:
        raise DeviceUnusable(
            f"{shape.model} of {binary_bytes(whole.weight_bytes)} is larger than the "
            f"{binary_bytes(room_bytes)} that the all-resident reference may take",
            "name a smaller model: --model",
        )
    resident = (budget_bytes - shape.fixed_bytes) // shape.layer_bytes - STREAM_BUFFERS
    return StackPlan(shape, layers, spread(layers, layers - min(max(resident, 0), layers - 1)))


def spread(layers: int, spilled: int) -> tuple[int, ...]:
    """`spilled` indices out of `layers`, evenly apart, so that copies can run while resident layers do."""
    if spilled >= layers:
        return tuple(range(layers))
    return tuple(-(-nth * layers // spilled) - 1 for nth in range(1, spilled + 1))
