"""Plans as files: reads them, says whether they can be followed, and gives their JSON Schemas."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Final

from probes.core import files
from probes.core.codec import decode, load
from probes.core.errors import ReportError
from probes.core.units import binary_bytes
from probes.placement.models.reading import named_path
from probes.placement.types import (
    CARDS_SCHEMA,
    EXPERTS,
    IN_HOST,
    IN_VRAM,
    MOVING,
    PACKED,
    PLAN_SCHEMA,
    TIERS,
    BlockPlan,
    CardsPlan,
    Plan,
    PrefetchPool,
)
from probes.records.files import reading
from probes.records.json_schema import document

MOST_BYTES: Final = 64 << 20  # of a file; that of 100 blocks has 30 kB
MOST_BUFFERS: Final = 1_000  # of a pool: planners use a few
MOST: Final = 2**63  # bytes, and any other whole number: what a machine's word holds


def plan_schema() -> str:
    """The JSON Schema of plans."""
    return document(
        Plan,
        title="Weir placement plan",
        description="Where each block of a model goes on a machine, what that takes and how long a pass "
        "should last. All figures are predicted; `constants` says from what.",
        versions={"schema": (PLAN_SCHEMA,)},
    )


def cards_schema() -> str:
    """The JSON Schema of plans over several cards."""
    return document(
        CardsPlan,
        title="Weir placement plan over several cards",
        description="A model cut into stages, one for each of several equal cards, each with a plan of its "
        "own. All figures are predicted.",
        versions={"schema": (CARDS_SCHEMA,)},
    )


def read_plan(path: Path | str) -> Plan | CardsPlan:
    """The plan in a file. Raises UsageError, and ReportError, naming the file and what doesn't fit."""
    path = named_path(path, "plan")
    again = "make it again: plan MODEL --vram SIZE --json FILE"
    with reading(path, again):
        value = load(files.read_text(path, most_bytes=MOST_BYTES))
        schema = value.get("schema") if isinstance(value, dict) else None
        plan: Plan | CardsPlan
        if schema == PLAN_SCHEMA:
            plan = decode(Plan, value, "plan")
        elif schema == CARDS_SCHEMA:
            plan = decode(CardsPlan, value, "plan")
        else:
            raise ReportError(f"it is not a plan of the schema {PLAN_SCHEMA} or {CARDS_SCHEMA}")
    parts = (plan,) if isinstance(plan, Plan) else plan.cards
    if why := next(filter(None, map(first_flaw, parts)), "" if parts else "it is for no card"):
        raise ReportError(f"{path} is not a plan that can be followed: {why}", again)
    return plan


def first_flaw(plan: Plan) -> str:
    """The first thing that makes the plan impossible to follow, as a clause; empty for a sound plan.

    A plan without budgets, made by hand, only says where blocks go: nothing of it is compared with them.
    """
    return next(_flaws(plan), "")


def _flaws(plan: Plan) -> Iterator[str]:
    names = Counter(block.name for block in plan.blocks)
    yield from (f"it has {name!r} twice" for name, times in names.items() if times > 1)
    for block in plan.blocks:
        if block.tier not in TIERS:
            yield f"{block.name!r} has the tier {block.tier!r}; known are {', '.join(TIERS)}"
        if block.kept and (not plan.bfloat16_becomes or block.tier in ("in_place", "cpu")):
            yield f"{block.name!r} is {block.tier} and kept as bfloat16, and nothing converts it"
        if block.table and (block.tier != "packed" or block.dense or block.kept):
            yield f"{block.name!r} is a packed table, and {block.tier} or packed otherwise"
    yield from _numbers(plan, "plan")
    rings = plan.rings
    if not all(n <= MOST_BUFFERS for n in (rings.slots, rings.scratches, rings.ahead, rings.pieces)):
        counts = f"{rings.slots:,} slots, {rings.scratches:,} scratch buffers, {rings.ahead:,} blocks ahead"
        yield f"{counts} and {rings.pieces:,} pieces aren't each from 0 to {MOST_BUFFERS:,}"
    yield from _over_budget(plan)


def _numbers(value: object, where: str) -> Iterator[str]:
    """Numbers below zero, too large for any machine, or none at all (NaN), and where they are."""
    if isinstance(value, tuple):
        for item in value:
            name = item.name if isinstance(item, BlockPlan) else "notes"
            yield from _numbers(item, f"block {name!r}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, int) and not 0 <= value < MOST:
        shown = f"{value:,}" if -MOST <= value < MOST else "a number beyond 64 bits"
        yield f"{where} is {shown}, not a whole number from 0 to 2^63"
    elif isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        yield f"{where} is {value}, not a time in seconds"


def _over_budget(plan: Plan) -> Iterator[str]:
    """What the plan's own figures add up to, against its budgets and each other."""
    use, host = plan.vram, plan.host
    if not plan.vram_budget and not plan.host_budget:
        return
    taken = use.total - use.context
    if taken > plan.vram_budget:
        yield _beyond("of VRAM", taken, plan.vram_budget)
    if host.total > plan.host_budget:
        yield _beyond("of host memory", host.total, plan.host_budget)
    blocks = sum(block.vram_bytes for block in plan.blocks)
    if blocks > use.weights:
        counted = binary_bytes(use.weights)
        yield f"its blocks take {binary_bytes(blocks)} of VRAM, and it counts {counted} for them"
    kept = sum(block.host_bytes for block in plan.blocks)
    if kept > host.pinned + host.pageable:
        counted = binary_bytes(host.pinned + host.pageable)
        yield f"its blocks take {binary_bytes(kept)} of host memory, and it counts {counted}"
    rings = plan.rings
    for what, buffers, counted_bytes in (
        ("slots", rings.slots * rings.slot_bytes, use.slots),
        ("scratch buffers", rings.scratches * rings.scratch_bytes, use.scratch),
    ):
        if buffers > counted_bytes:
            counted = binary_bytes(counted_bytes)
            yield f"its {what} take {binary_bytes(buffers)} of VRAM, and it counts {counted} for them"
    for block in plan.blocks:
        yield from _too_little(block, rings)


def _too_little(block: BlockPlan, rings: PrefetchPool) -> Iterator[str]:
    """Where the block's weights can't be in what it is said to take, even packed to half their bytes."""
    weights = block.weight_bytes
    stored = weights // 2 if block.tier in PACKED else weights
    buffered = (block.tier in PACKED and block.tier not in EXPERTS) or block.kept
    unpacked = weights if buffered and not block.table else 0
    in_slot = stored if block.tier in MOVING else 0
    if block.tier == "streamed_packed":
        in_slot //= max(rings.pieces, 1)
    for what, taken, least in (
        ("VRAM", block.vram_bytes, stored if block.tier in IN_VRAM else 0),
        ("host memory", block.host_bytes, stored if block.tier in IN_HOST else 0),
        ("a slot", rings.slot_bytes if rings.slots else 0, in_slot),
        ("a scratch buffer", rings.scratch_bytes if rings.scratches else 0, unpacked),
    ):
        if taken < least:
            sizes = f"{weights:,} bytes of weights in {taken:,} bytes of {what}"
            yield f"{block.name!r} is {block.tier} with {sizes}"


def _beyond(what: str, taken: int, budget: int) -> str:
    return f"it takes {binary_bytes(taken)} {what}, more than its budget of {binary_bytes(budget)}"
