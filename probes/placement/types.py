"""What a placement plan holds: the value between planner and runtime, and what `plan --json` writes. Pure."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Tier = Literal[
    "resident",
    "packed",
    "streamed_packed",
    "streamed",
    "in_place",
    "experts",
    "experts_packed",
    "cpu",
    "disk",
]

Bound = Literal["vram", "link", "compute", "launch", "host"]
Objective = Literal["exact", "fast"]
Becomes = Literal["", "float16", "float32"]

# What the operations and the activations of a plan were counted from: a trace of the pass, rules for the
# model's architecture, or guesses from the shapes of its tensors
RestsOn = Literal["measured", "trace", "rules", "guesses"]
PLAN_SCHEMA: Final = "weir-placement-plan/1"

# What loading takes in host memory beside what it brings there: buffers of 24 MiB that pieces of files pass
# through, and less than 40 MiB for packing on the host and what is noted of each tensor.
LOADING_BYTES: Final = 64 << 20
# Pinned buffers that blocks on disk are read into, each as large as the largest block: one is copied, one is
# full, one is read.
DISK_BUFFERS: Final = 3
CARDS_SCHEMA: Final = "weir-placement-cards/1"


@dataclass(frozen=True)
class TierFacts:
    """What a tier is: where its weights are between passes, and how they reach what computes with them."""

    memory: Literal["VRAM", "host memory", "disk"]
    description: str
    colour: str  # in pictures, a name of `probes.reports.palette`
    packed: bool = False  # without loss; unpacked in VRAM
    moves: bool = False  # copied through staging buffers of VRAM in each pass
    pinned: bool = False  # in host memory that the GPU reads
    experts: bool = False  # kernels read what a router chooses; what it chooses most is in VRAM too


# The one place that says what a tier is. planner/tiers.py says what each costs, runtime/builder.py places it.
TIER_FACTS: Final[Mapping[Tier, TierFacts]] = {
    "resident": TierFacts("VRAM", "resident in VRAM", "blue"),
    "packed": TierFacts("VRAM", "packed in VRAM without loss", "green", packed=True),
    "streamed_packed": TierFacts(
        "host memory",
        "packed in host memory and copied in each pass",
        "amber",
        packed=True,
        moves=True,
        pinned=True,
    ),
    "streamed": TierFacts(
        "host memory", "in host memory and copied in each pass", "vermillion", moves=True, pinned=True
    ),
    "in_place": TierFacts("host memory", "read in host memory by the GPU", "purple", pinned=True),
    "experts": TierFacts(
        "host memory",
        "in host memory, where the GPU reads the chosen ones, and those chosen most in VRAM too",
        "purple",
        pinned=True,
        experts=True,
    ),
    "experts_packed": TierFacts(
        "host memory",
        "packed in host memory, where the GPU reads the chosen ones, and those chosen most in VRAM too",
        "purple",
        packed=True,
        pinned=True,
        experts=True,
    ),
    "cpu": TierFacts("host memory", "computed by the CPU", "muted"),
    "disk": TierFacts("disk", "read from disk in each pass", "ink", moves=True),
}
TIERS: Final = typing.get_args(Tier)
IN_VRAM: Final = tuple(tier for tier, facts in TIER_FACTS.items() if facts.memory == "VRAM")
IN_HOST: Final = tuple(tier for tier, facts in TIER_FACTS.items() if facts.memory == "host memory")
PINNED: Final = tuple(tier for tier, facts in TIER_FACTS.items() if facts.pinned)
PACKED: Final = tuple(tier for tier, facts in TIER_FACTS.items() if facts.packed)
MOVING: Final = tuple(tier for tier, facts in TIER_FACTS.items() if facts.moves)
EXPERTS: Final = tuple(tier for tier, facts in TIER_FACTS.items() if facts.experts)
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
    dense: bool = False  # packed with 2-bit codes: 9 % fewer bytes, which take longer to unpack
    kept: bool = False  # as bfloat16, and converted for each call to what the plan's bfloat16 becomes
    table: bool = False  # packed and never unpacked as a whole: lookups and products need rows of it


@dataclass(frozen=True)
class PrefetchPool:
    """The buffers that moving blocks pass through. Block i of a ring always uses buffer i modulo its size."""

    slots: int = 2  # staging buffers, into which blocks are copied; plan files call them so
    slot_bytes: int = 0  # of each
    scratches: int = 2  # decode buffers, into which packed blocks are unpacked
    scratch_bytes: int = 0  # of each
    ahead: int = 2  # blocks begun before they are called, or pieces of blocks
    pieces: int = (
        1  # of a packed block that streams, if more: each takes a staging buffer, and is unpacked from there
    )


@dataclass(frozen=True)
class VramUse:
    """Predicted bytes of VRAM, by what takes them."""

    weights: int
    slots: int  # staging buffers
    scratch: int  # decode buffers
    activations: int
    kv_cache: int
    workspace: int  # of the libraries that multiply
    context: int  # of the driver: outside torch's allocator
    rounding: int  # of torch's allocator

    @property
    def total(self) -> int:
        """Peak VRAM of the process, in bytes."""
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
        """Peak host memory, in bytes."""
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
class ExpertsPlan:
    """The experts of all blocks in the tiers `experts` and `experts_packed`, and their cache in VRAM.

    How long a pass takes depends on how many of the chosen experts it finds in the cache. The plan's own time
    is that at `assumed_hit_rate`: the cached share, as if a router chose all alike; real ones don't.
    """

    count: int  # experts, of all blocks
    chosen: float  # that a pass reads, of all blocks, each counted once
    expert_bytes: int  # of the largest, as it is kept
    cached: int  # that VRAM has room for, with places for those that are on their way
    cache_bytes: int  # of VRAM, with the table of addresses
    cached_s: float  # a pass that finds all that it chooses in the cache
    missing_s: float  # added where it finds none
    assumed_hit_rate: float

    def seconds(self, hit_rate: float) -> float:
        """Predicted seconds of a pass of which this share of the chosen experts is in the cache."""
        return self.cached_s + (1.0 - hit_rate) * self.missing_s


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
    experts: ExpertsPlan | None = None  # null: no block is in a tier of experts
    rests_on: RestsOn = "rules"  # what its operations and activations were counted from
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
