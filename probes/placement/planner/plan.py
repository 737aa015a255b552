"""Makes a plan: `make_plan` takes a model's description, budgets and a machine's constants to a `PlanResult`.

The search chooses the tier of each block. This file gives it the limits, and writes the plan with its notes
and predicted memory; where nothing fits it says what would. No torch, no GPU, no weights. Pure.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from probes.core.errors import PlanImpossible, UsageError
from probes.core.units import binary_bytes
from probes.placement.models.description import BlockDescription, ModelDescription, most_bytes
from probes.placement.plan_file import MOST
from probes.placement.planner.compute_dtype import with_compute_dtype
from probes.placement.planner.costs import Option, cache_bytes, measured_operation_s
from probes.placement.planner.experts_cache import experts_plan, with_cache
from probes.placement.planner.kinds import Kind, kinds, merge_kinds
from probes.placement.planner.machine import ASSUMED_HOST, Constants, with_host
from probes.placement.planner.pools import Limits, disk_buffer_bytes, pool_bytes
from probes.placement.planner.rules import Pass, work_of
from probes.placement.planner.search import SearchResult, fits, hedged, search
from probes.placement.planner.tiers import SEGMENT, Surroundings, rounded, surroundings
from probes.placement.types import (
    EXPERTS,
    IN_VRAM,
    OBJECTIVES,
    BlockPlan,
    Bound,
    HostUse,
    Objective,
    PassTime,
    Plan,
    VramUse,
    Workload,
)


class PlanningTask:
    """A model, a machine and a workload: the kinds of blocks to place, and the memory left for them."""

    def __init__(
        self,
        model: ModelDescription,
        machine: Constants,
        workload: Workload,
        objective: Objective,
        captured: bool,
    ) -> None:
        # a tied embedding is placed by its product, which is last, not by its lookup, which takes no time
        ordered = sorted(model.blocks, key=lambda block: block.looked_up)
        self.model, self.machine, self.workload = replace(model, blocks=tuple(ordered)), machine, workload
        generating = workload.context_tokens > 0
        rows = workload.batch * (1 if generating else workload.tokens)
        context = workload.context_tokens if generating else workload.tokens
        work = Pass(rows, workload.batch, context, objective, captured, generating)
        self.work = replace(work, operation_s=measured_operation_s(self.model, machine, work))
        self.kinds: Sequence[Kind] = kinds(self.model, machine, self.work)
        self.counted: Sequence[Kind] = merge_kinds(self.kinds)
        self.weight_bytes = sum(kind.block.weight_bytes * len(kind.places) for kind in self.kinds)
        one_of_each = [kind.block for kind in self.kinds]
        self.around: Surroundings = surroundings(
            one_of_each, machine, workload, model.traced_as_computed, captured=captured
        )

    def limits(self, vram: int, host: int | None) -> Limits:
        """The memory left for weights and their buffers, under budgets in bytes."""
        machine, host_bytes = self.machine, self.host_bytes(host)
        pinned = int(machine.pinned_share * min(host_bytes, machine.host_bytes or host_bytes))
        left = self.around.left(vram, machine) if machine.has_gpu else 0
        return Limits(left, host_bytes - self.model.loading_bytes, pinned, replayed=self.work.captured)

    def host_bytes(self, host: int | None) -> int:
        """The budget of host memory in bytes; None: what the machine has, or is assumed to have."""
        if host is not None:
            return host
        known = self.machine.host_bytes
        return known if known is not None else ASSUMED_HOST


NOTABLE_GAP: Final = 0.005  # share of the time that a better plan may save, above which a note says so
# Of the rule for layers of transformers: 25 recorded passes of nine architectures are within 0.33, those of
# decoders within 0.20 (make bench-placement, part trace)
RULES_SPREAD: Final = 0.35
# Of guesses, the shortest and the longest time over the predicted one: 17 passes of architectures without
# rules took 0.33 to 7.7 of it, 15 of them 0.45 to 3.5, on one H200
GUESSED: Final = (0.6, 3.5)
PYTHON_SPREAD: Final = 0.40  # of a pass that waits for Python, by three hosts within two minutes each

# Where each operation was measured on this card: 67 of 84 captured passes on an H200 were within it, 77 with
# those that were run again after mending (docs/results/bench-placement-any-captured.json and -again.json)
MEASURED_SPREAD: Final = 0.10


def _plan(task: PlanningTask, result: SearchResult, vram: int, host: int) -> Plan:
    """The plan for a search's result. `vram` and `host` are the budgets."""
    model, machine, used = task.model, task.machine, Counter(result.chosen).items()
    return Plan(
        model=model.name,
        machine=machine.name,
        constants=machine.origin,
        objective=task.work.objective,
        workload=task.workload,
        vram_budget=vram,
        host_budget=host,
        blocks=_blocks(task, result),
        rings=result.pool,
        vram=_vram(task, result),
        host=HostUse(
            pinned=sum(o.pinned_bytes * n for o, n in used)
            + disk_buffer_bytes(result.chosen, result.pool.slot_bytes),
            pageable=sum(o.pageable_bytes * n for o, n in used),
            disk=sum(o.disk_bytes * n for o, n in used),
            loading=model.loading_bytes,
        ),
        time=_time(task, result),
        captured=task.work.captured,
        compute_dtype=_compute_dtype(task),
        bfloat16_becomes=model.becomes,
        notes=_notes(task, result, vram),
        experts=experts_plan(result, task.kinds, task.machine, task.work),
        rests_on=model.rests_on,
    )


def _blocks(task: PlanningTask, result: SearchResult) -> tuple[BlockPlan, ...]:
    """Each block's plan. Blocks of one kind in one tier differ in their names alone."""
    plans: list[BlockPlan | None] = [None] * len(task.model.blocks)
    for kind in task.kinds:
        by_option: dict[
            Option, tuple[object, ...]
        ] = {}  # the fields after the name: there may be 100,000 blocks
        for place in kind.places:
            option = result.chosen[place]
            if option not in by_option:
                first = _block_plan(kind.block, option, task.work)
                by_option[option] = tuple(getattr(first, field.name) for field in fields(first))[1:]
            plans[place] = BlockPlan(task.model.blocks[place].name, *by_option[option])  # type: ignore[arg-type]
    return tuple(block for block in plans if block is not None)


def _block_plan(block: BlockDescription, option: Option, work: Pass) -> BlockPlan:
    cache = cache_bytes(block, work)
    return BlockPlan(
        name=block.name,
        tier=option.tier,
        weight_bytes=block.weight_bytes,
        vram_bytes=option.vram_bytes - (cache if option.tier != "cpu" else 0),
        host_bytes=option.pinned_bytes + option.pageable_bytes,
        wire_bytes=option.wire_bytes,
        predicted_s=max(option.copy_s, option.unpack_s, option.compute_s, option.cpu_s, option.disk_s),
        dense=option.dense,
        kept=option.kept,
        table=option.table,
    )


def _vram(task: PlanningTask, result: SearchResult) -> VramUse:
    if not task.machine.has_gpu:
        return VramUse(0, 0, 0, 0, 0, 0, 0, 0)
    pool, on_gpu = result.pool, [(o, n) for o, n in Counter(result.chosen).items() if o.tier != "cpu"]
    cache = sum(
        cache_bytes(kind.block, task.work) * sum(result.chosen[at].tier != "cpu" for at in kind.places)
        for kind in task.kinds
    )
    weights = sum(o.vram_bytes * n for o, n in on_gpu) - cache
    arena = weights + pool_bytes(pool)
    return VramUse(
        weights=weights,
        slots=pool.slots * pool.slot_bytes,
        scratch=pool.scratches * pool.scratch_bytes,
        activations=task.around.activations,
        kv_cache=cache,
        workspace=task.around.workspace,
        context=task.around.context,
        rounding=rounded(arena) - arena + task.around.loose_rounding - SEGMENT,
    )


def _time(task: PlanningTask, result: SearchResult) -> PassTime:
    seconds, bound = result.timeline.seconds, _bound(result.chosen, _by_products(task))
    return pass_time(task.model, task.machine, seconds, bound)


def pass_time(model: ModelDescription, machine: Constants, seconds: float, bound: Bound) -> PassTime:
    """The time with its interval: wider where Python is waited for, and where nothing was traced."""
    spread = MEASURED_SPREAD if model.rests_on == "measured" else machine.spread
    if bound == "launch":
        spread = max(spread, PYTHON_SPREAD)
    if model.rests_on == "guesses":
        low, high = (GUESSED[0] * (1 - machine.spread), GUESSED[1] * (1 + machine.spread))
        return PassTime(seconds, seconds * low, seconds * high, bound)
    if model.rests_on == "rules":
        spread = math.hypot(spread, RULES_SPREAD)
    return PassTime(seconds, seconds * (1 - spread), seconds * (1 + spread), bound)


def _bound(chosen: Sequence[Option], by_products: bool) -> Bound:
    """What takes most of the pass."""
    used = Counter(chosen).items()  # few, even for 100,000 blocks
    in_place = sum(o.compute_s * n for o, n in used if o.tier in ("in_place", *EXPERTS))
    sums: dict[Bound, float] = {
        "link": sum(o.copy_s * n for o, n in used) + in_place,
        "host": sum((o.cpu_s + o.disk_s) * n for o, n in used),
        "launch": sum(o.launch_s * n for o, n in used),
        "compute" if by_products else "vram": sum(o.gpu_s * n for o, n in used) - in_place,
    }
    return max(sums, key=sums.__getitem__)


def _by_products(task: PlanningTask) -> bool:
    """Whether multiplying takes longer than reading the weights."""
    products = sum(
        operation.flops * len(kind.places)
        for kind in task.kinds
        for operation in work_of(kind.block, task.work)
        if operation.kind != "attention"
    )
    rate = task.machine.rate_of_products(_compute_dtype(task))
    return task.machine.has_gpu and products / rate > task.weight_bytes / task.machine.vram_rate


def _compute_dtype(task: PlanningTask) -> str:
    """The dtype in which most of the weights are multiplied."""
    tensors = ((t, len(kind.places)) for kind in task.kinds for t in kind.block.tensors)
    return most_bytes((tensor.dtype, tensor.n_bytes * count) for tensor, count in tensors)


def _notes(task: PlanningTask, result: SearchResult, vram: int) -> tuple[str, ...]:
    machine, notes = task.machine, [*task.model.notes, *task.machine.notes]
    if machine.has_gpu and (most := machine.vram_bytes - task.around.context) < vram:
        notes.append(f"beside the driver's context the card has {binary_bytes(most)}, less than the budget")
    if (traced := task.model.traced) is not None:
        notes.append(
            f"traced with {traced.how}: {traced.operations:,} operations, {traced.flops / 1e9:,.3g} GFLOP, "
            f"{binary_bytes(task.around.activations)} of activations"
        )
    packed = any(o.tier in ("packed", "streamed_packed") and o.unpack_s for o in result.chosen)
    if packed and not machine.triton:
        notes.append("no kernel unpacks on this card: torch operations do")
    elif packed and task.model.becomes:
        notes.append("torch operations unpack and convert: there is no kernel for that yet")
    work, positions = task.workload, task.model.positions
    if positions is not None and max(work.tokens, work.context_tokens) > positions:
        notes.append(
            f"the model's config knows {positions:,} positions: it wasn't trained for longer sequences"
        )
    if any(o.tier == "disk" for o in result.chosen):
        notes.append("the host memory is too small for all weights: some are read from disk in each pass")
    if result.gap >= 1.0:
        notes.append("the budget is so tight that the first placement that fits was taken and improved")
    elif result.gap > NOTABLE_GAP:
        notes.append(f"the search ended early: a better plan may take up to {result.gap:.1%} less time")
    return tuple(notes)


MIB: Final = 2**20


def _smallest_budgets(task: PlanningTask, vram: int, host: int | None) -> tuple[str, str]:
    """What is refused, and the smallest budgets that would work, each with the other as it is."""
    limits, model = task.limits(vram, host), task.model
    loading = model.loading_bytes
    weights, budget = binary_bytes(task.weight_bytes), binary_bytes(vram)
    refusal = f"{model.name} of {weights} can't be placed in {budget} of VRAM"
    if host is not None:
        refusal += f" and {binary_bytes(host)} of host memory"
    caches = sum(cache_bytes(kind.block, task.work) * len(kind.places) for kind in task.kinds)
    most = 8 * task.weight_bytes + caches + 2**34
    ways = []
    limits, also = replace(limits, host=max(limits.host, 0)), limits.host < 0
    if _fits(task, replace(limits, vram=most)):
        least = _least(lambda n: _fits(task, replace(limits, vram=n)), most)
        ways.append(_smallest_vram(task, least) + f" --host {loading // MIB}MiB" * also)
    if _fits(task, replace(limits, host=most, pinned=most)):
        share = task.machine.pinned_share
        least = _least(
            lambda n: _fits(task, replace(limits, host=n, pinned=int(n * share))), int(most / share)
        )
        mib = -(-(least + loading) // MIB)
        ways.append(f"the smallest host memory that works is {binary_bytes(mib * MIB)}: --host {mib}MiB")
    return refusal, "; or ".join(ways)


def _fits(task: PlanningTask, limits: Limits) -> bool:
    return limits.vram >= 0 and fits(task.counted, limits)


def _smallest_vram(task: PlanningTask, least: int) -> str:
    """`least` bytes for weights, their buffers and the KV cache, stated as a budget or as a card."""
    around, machine = task.around, task.machine
    budget = least + around.activations + around.workspace + around.loose_rounding
    mib = -(-budget // MIB)
    card = mib * MIB + around.context
    if card > machine.vram_bytes:
        return (
            f"the smallest card that works has {binary_bytes(card)}; {machine.name} has "
            f"{binary_bytes(machine.vram_bytes)}"
        )
    return f"the smallest budget that works is {binary_bytes(mib * MIB)}: --vram {mib}MiB"


def _least(works: Callable[[int], bool], high: int) -> int:
    """The smallest number that works, to a thousandth of `high`, which works. By bisection."""
    if works(0):
        return 0
    low = 0
    while high - low > max(MIB, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


MOST_DIVIDED: Final = 1_000  # blocks of a model above which they aren't all divided: they are small already
LARGEST: Final = 1 / 16  # of the VRAM: larger blocks are divided
WORTH_DIVIDING: Final = 0.97  # of the time in whole blocks: a plan in parts of them must take less


@dataclass(frozen=True)
class PlanResult:
    """A plan, and the search's result, which has the timeline for a picture of it."""

    plan: Plan
    search: SearchResult


def make_plan(
    model: ModelDescription,
    machine: Constants,
    *,
    vram: int,
    host: int | None,
    workload: Workload,
    objective: Objective,
    captured: bool = False,
    experts_apart: bool = True,
) -> PlanResult:
    """The best plan. `vram` limits torch's allocator; the card's size limits that and the driver's context.

    Blocks that take more than a small share of VRAM are divided, as far as they can be. A captured pass costs
    no Python time, so all of its blocks are divided where that saves time: smaller blocks need smaller
    buffers. `host` None: as much as the machine has, else what is assumed. Raises PlanImpossible
    naming the smallest budget that works, and UsageError for a workload or model that makes no sense.
    bfloat16 weights become what `with_compute_dtype` says by itself, unless they have been converted before.
    Without `experts_apart` no expert is placed by itself.
    """
    check_numbers(workload, vram=vram, host=host)
    _check(model, workload)
    given_host = host
    machine, host = with_host(machine, given_host)
    if objective not in OBJECTIVES:
        raise UsageError(f"the objective {objective!r} is unknown", f"give one of {', '.join(OBJECTIVES)}")
    model = with_compute_dtype(model, machine, objective=objective)
    versions = all_versions(model, vram)[: 2 if captured else 1]
    if experts_apart and machine.has_gpu and not model.becomes:
        with_experts = model.with_experts_apart()
        apart = [block for block in with_experts.blocks if block.experts]
        can_be = apart and not (captured and model.in_memory and any(map(_are_modules, apart)))
        versions[1:1] = [with_experts] if can_be else []
    tasks = [PlanningTask(version, machine, workload, objective, captured) for version in versions]
    results = [(task, result) for task in tasks if (result := _search(task, vram, host))]
    if not results:
        refusal, ways = _smallest_budgets(tasks[-1], vram, host)
        raise PlanImpossible(f"{refusal}, which is assumed" if host != given_host else refusal, ways)
    task, result = _best(results)
    return PlanResult(_plan(task, result, vram, task.host_bytes(host)), result)


def _are_modules(experts: BlockDescription) -> bool:
    """Whether each expert is a module of its own, whose place in VRAM a recorded pass would keep."""
    return any("." in tensor.name.removeprefix(f"{experts.name}.") for tensor in experts.tensors)


def all_versions(model: ModelDescription, vram: int) -> list[ModelDescription]:
    """The model with its large blocks divided, and with all, where more can be."""
    fitting = model.divided(int(vram * LARGEST))
    divided = model.divided() if len(model.blocks) <= MOST_DIVIDED else fitting
    return [fitting, divided] if len(divided.blocks) > len(fitting.blocks) else [fitting]


def _best(results: Sequence[tuple[PlanningTask, SearchResult]]) -> tuple[PlanningTask, SearchResult]:
    """The plain version, unless another is notably quicker.

    Where not all weights are in VRAM, one with its experts apart comes before that: its cache follows the
    router, so its time is the longest that is expected.
    """
    in_vram = all(option.tier in IN_VRAM for option in results[0][1].chosen)
    apart = [each for each in results if any(kind.block.experts for kind in each[0].kinds)]
    best = apart[0] if apart and not in_vram else results[0]
    for other in results:
        if other[1].timeline.seconds < best[1].timeline.seconds * WORTH_DIVIDING:
            best = other
    return best


def _search(task: PlanningTask, vram: int, host: int | None) -> SearchResult | None:
    limits = task.limits(vram, host)
    result = search(task.counted, limits) if limits.vram >= 0 else None
    if result is None:
        return None
    best = hedged(result, task.counted, limits)
    return with_cache(best, task.kinds, task.machine, task.work, limits)


def plan_task(task: PlanningTask, vram: int, host: int) -> Plan | None:
    """The best plan for blocks whose costs are known already; None where nothing fits the budgets."""
    result = _search(task, vram, host)
    return _plan(task, result, vram, host) if result else None


def check_numbers(workload: Workload, *, vram: int, host: int | None) -> None:
    """Raise UsageError for what isn't a whole number from 0 to below 2^63, which a plan's file can hold."""
    numbers = {"vram": vram, "host": 0 if host is None else host}
    numbers |= {"batch": workload.batch, "tokens": workload.tokens, "context": workload.context_tokens}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value >= MOST:
            raise UsageError(
                f"{name} is {str(value)[:40]!r}, not a whole number below 2^63", "for 4 GiB give 4 * 2**30"
            )
        if value < 0:
            raise UsageError(f"{name} is {value}, below zero", f"give a {name} of 0 or more")


def check_workload(workload: Workload) -> None:
    """Raise UsageError for a workload that makes no sense with any model."""
    check_numbers(workload, vram=0, host=None)
    if min(workload.batch, workload.tokens) < 1 or workload.context_tokens < 0:
        raise UsageError("batch and tokens are at least 1, and the context at least 0")
    if 0 < workload.context_tokens < workload.tokens:
        raise UsageError(
            f"a context of {workload.context_tokens} has no room for a prompt of {workload.tokens} tokens",
            "raise --context or lower --tokens",
        )


def _check(model: ModelDescription, workload: Workload) -> None:
    """Raise UsageError for a workload that the model can't do, or that makes no sense."""
    if not model.blocks:
        raise UsageError(f"{model.name} has no tensors", "give a model with weights")
    check_workload(workload)
    longest, needed = model.learned_positions, max(workload.tokens, workload.context_tokens)
    if longest is not None and needed > longest:
        raise UsageError(
            f"{model.name[:80]} has {longest:,} learned positions, and {needed:,} tokens are asked for",
            f"plan shorter sequences: at most {longest} tokens, with those of the context",
        )
