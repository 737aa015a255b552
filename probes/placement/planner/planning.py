"""Makes a plan: from a model's description, budgets and constants. No torch, no GPU, no weights. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from probes.errors import PlanImpossible, UsageError
from probes.placement.models.description import BlockDescription, ModelDescription
from probes.placement.models.ranges import Ranges
from probes.placement.planner.computing import Compute, ready
from probes.placement.planner.costs.blockbytes import cache_bytes
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.costs.option import Option, Pass
from probes.placement.planner.footprint import SEGMENT, Surroundings, rounded, surroundings
from probes.placement.planner.searching.blockkinds import Kind, kinds, together
from probes.placement.planner.searching.feasible import fits
from probes.placement.planner.searching.placed import Limits, ring_bytes, staging_bytes
from probes.placement.planner.searching.search import Found, search, steadier
from probes.placement.soundness import MOST
from probes.placement.values import (
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
from probes.shared.units import binary_bytes

MIB: Final = 2**20
MOST_DIVIDED: Final = 1_000  # blocks of a model whose blocks are divided: more are small already
NOTABLE_GAP: Final = 0.005
PYTHON_SPREAD: Final = 0.40  # of a pass that waits for Python: three hosts, each within two minutes
WORTH_DIVIDING: Final = 0.97  # of the time of a plan in whole blocks, that one in parts of them may take


@dataclass(frozen=True)
class Made:
    """A plan, and what a picture of it needs."""

    plan: Plan
    found: Found


def make(
    model: ModelDescription,
    machine: Constants,
    *,
    vram: int,
    host: int | None,
    workload: Workload,
    objective: Objective,
    captured: bool = False,
    compute: Compute = "auto",
    ranges: Ranges | None = None,
) -> Made:
    """The best plan. `vram` limits torch's allocator; the card's size limits that and the driver's context.

    A captured pass costs Python nothing, so its blocks are divided where that saves time: smaller blocks need
    smaller buffers. `host` None: as much as the machine has, or as the model needs. Raises PlanImpossible
    naming the smallest budget that works, and UsageError for a workload or model that makes no sense.
    `compute` and `ranges` are for bfloat16 weights on a GPU without units for them: `computing.ready`.
    """
    check_numbers(workload, vram=vram, host=host)
    _check(model, workload)
    if objective not in OBJECTIVES:
        raise UsageError(f"the objective {objective!r} is unknown", f"give one of {', '.join(OBJECTIVES)}")
    model = ready(model, machine, objective=objective, compute=compute, ranges=ranges)
    models = [model]
    if captured and len(model.blocks) <= MOST_DIVIDED:
        divided = model.divided()
        models += [divided] if len(divided.blocks) > len(model.blocks) else []
    best: Made | None = None
    for one in models:
        task = _Task(one, machine, workload, objective, captured)
        limits = task.limits(vram, host)
        found = search(task.counted, limits) if limits.vram >= 0 else None
        if found:
            found = steadier(found, task.counted, limits)
        if found and (best is None or found.timeline.seconds < best.found.timeline.seconds * WORTH_DIVIDING):
            best = Made(task.plan(found, vram, limits.host + model.loading_bytes), found)
    if best is None:
        raise PlanImpossible(*task.smallest(vram, host))
    return best


def check_numbers(workload: Workload, *, vram: int, host: int | None) -> None:
    """Raise UsageError for what isn't a whole number of 63 bits: no program would read such a plan again."""
    given = {"vram": vram, "host": 0 if host is None else host}
    given |= {"batch": workload.batch, "tokens": workload.tokens, "context": workload.context_tokens}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value >= MOST:
            raise UsageError(
                f"{name} is {str(value)[:40]!r}, not a whole number below 2^63", "for 4 GiB give 4 * 2**30"
            )
        if value < 0:
            raise UsageError(f"{name} is {value}, below zero", f"give a {name} of 0 or more")


def _check(model: ModelDescription, workload: Workload) -> None:
    if not model.blocks:
        raise UsageError(f"{model.name} has no tensors", "give a model with weights")
    if min(workload.batch, workload.tokens) < 1 or workload.context_tokens < 0:
        raise UsageError("batch and tokens are at least 1, and the context at least 0")
    if 0 < workload.context_tokens < workload.tokens:
        raise UsageError(
            f"a context of {workload.context_tokens} has no room for a prompt of {workload.tokens} tokens",
            "raise --context or lower --tokens",
        )


class _Task:
    """One model on one machine with one workload."""

    def __init__(
        self,
        model: ModelDescription,
        machine: Constants,
        workload: Workload,
        objective: Objective,
        captured: bool,
    ) -> None:
        # a tied embedding is looked up first, which takes no time, and multiplied last
        ordered = sorted(model.blocks, key=lambda block: block.looked_up)
        self.model, self.machine, self.workload = replace(model, blocks=tuple(ordered)), machine, workload
        self.objective = objective
        generating = workload.context_tokens > 0
        rows = workload.batch * (1 if generating else workload.tokens)
        context = workload.context_tokens if generating else workload.tokens
        self.work = Pass(rows, workload.batch, context, objective, captured, generating)
        self.kinds: Sequence[Kind] = kinds(self.model, machine, self.work)
        self.counted: Sequence[Kind] = together(self.kinds)
        self.weight_bytes = sum(kind.block.weight_bytes * len(kind.places) for kind in self.kinds)
        one_of_each = [kind.block for kind in self.kinds]
        self.around: Surroundings = surroundings(one_of_each, machine, workload, captured=captured)

    def limits(self, vram: int, host: int | None) -> Limits:
        """What is left for weights; in host memory, beside what loading takes."""
        machine = self.machine
        if host is None:
            host = machine.host_bytes if machine.host_bytes is not None else 4 * self.weight_bytes + 2**34
        pinned = int(machine.pinned_share * min(host, machine.host_bytes or host))
        left = self.around.left(vram, machine) if machine.has_gpu else 0
        return Limits(left, host - self.model.loading_bytes, pinned, replayed=self.work.captured)

    def smallest(self, vram: int, host: int | None) -> tuple[str, str]:
        """What to say when nothing fits: the smallest budgets that work, each with the other as it is."""
        limits, model = self.limits(vram, host), self.model
        loading = model.loading_bytes
        weights, budget = binary_bytes(self.weight_bytes), binary_bytes(vram)
        said = f"{model.name} of {weights} can't be placed in {budget} of VRAM"
        if host is not None:
            said += f" and {binary_bytes(host)} of host memory"
        caches = sum(cache_bytes(kind.block, self.work) * len(kind.places) for kind in self.kinds)
        most = 8 * self.weight_bytes + caches + 2**34
        ways = []
        limits, also = replace(limits, host=max(limits.host, 0)), limits.host < 0
        if self._fits(replace(limits, vram=most)):
            least = _least(lambda n: self._fits(replace(limits, vram=n)), most)
            ways.append(self._smallest_vram(least) + f" --host {loading // MIB}MiB" * also)
        if self._fits(replace(limits, host=most, pinned=most)):
            share = self.machine.pinned_share
            least = _least(
                lambda n: self._fits(replace(limits, host=n, pinned=int(n * share))), int(most / share)
            )
            mib = -(-(least + loading) // MIB)
            ways.append(f"the smallest host memory that works is {binary_bytes(mib * MIB)}: --host {mib}MiB")
        return said, "; or ".join(ways)

    def _fits(self, limits: Limits) -> bool:
        return limits.vram >= 0 and fits(self.counted, limits)

    def _smallest_vram(self, least: int) -> str:
        """`least` bytes for weights, rings and cache as a budget, or as a card."""
        around, machine = self.around, self.machine
        budget = least + around.activations + around.workspace + around.loose_rounding
        mib = -(-budget // MIB)
        card = mib * MIB + around.context
        if card > machine.vram_bytes:
            return (
                f"the smallest card that works has {binary_bytes(card)}; {machine.name} has "
                f"{binary_bytes(machine.vram_bytes)}"
            )
        return f"the smallest budget that works is {binary_bytes(mib * MIB)}: --vram {mib}MiB"

    def plan(self, found: Found, vram: int, host: int) -> Plan:
        """The plan of what was found."""
        model, machine = self.model, self.machine
        return Plan(
            model=model.name,
            machine=machine.name,
            constants=machine.origin,
            objective=self.work.objective,
            workload=self.workload,
            vram_budget=vram,
            host_budget=host,
            blocks=self._blocks(found),
            rings=found.rings,
            vram=self._vram(found),
            host=HostUse(
                pinned=sum(o.pinned_bytes for o in found.chosen)
                + staging_bytes(found.chosen, found.rings.slot_bytes),
                pageable=sum(o.pageable_bytes for o in found.chosen),
                disk=sum(o.disk_bytes for o in found.chosen),
                loading=model.loading_bytes,
            ),
            time=self._time(found),
            captured=self.work.captured,
            compute_dtype=self._compute_dtype(),
            bfloat16_becomes=model.becomes,
            notes=self._notes(found),
        )

    def _blocks(self, found: Found) -> tuple[BlockPlan, ...]:
        """Each block's plan: those of one kind in one tier differ in their names."""
        made: list[BlockPlan | None] = [None] * len(self.model.blocks)
        for kind in self.kinds:
            facts: dict[int, tuple[object, ...]] = {}
            for place in kind.places:
                option = found.chosen[place]
                known = facts.get(id(option))
                if known is None:
                    known = facts[id(option)] = _facts(kind.block, option, self.work)
                made[place] = BlockPlan(self.model.blocks[place].name, *known)  # type: ignore[arg-type]
        return tuple(block for block in made if block is not None)

    def _vram(self, found: Found) -> VramUse:
        if not self.machine.has_gpu:
            return VramUse(0, 0, 0, 0, 0, 0, 0, 0)
        rings, on_gpu = found.rings, [o for o in found.chosen if o.tier != "cpu"]
        cache = sum(
            cache_bytes(kind.block, self.work) * sum(found.chosen[at].tier != "cpu" for at in kind.places)
            for kind in self.kinds
            if kind.block.attention
        )
        weights = sum(o.vram_bytes for o in on_gpu) - cache
        arena = weights + ring_bytes(rings)
        return VramUse(
            weights=weights,
            slots=rings.slots * rings.slot_bytes,
            scratch=rings.scratches * rings.scratch_bytes,
            activations=self.around.activations,
            kv_cache=cache,
            workspace=self.around.workspace,
            context=self.around.context,
            rounding=rounded(arena) - arena + self.around.loose_rounding - SEGMENT,
        )

    def _time(self, found: Found) -> PassTime:
        seconds, bound = found.timeline.seconds, _bound(found.chosen, self._by_products())
        spread = max(self.machine.spread, PYTHON_SPREAD) if bound == "launch" else self.machine.spread
        return PassTime(seconds, seconds * (1 - spread), seconds * (1 + spread), bound)

    def _by_products(self) -> bool:
        """Whether multiplying takes longer than reading the weights."""
        each = (
            2 * tensor.products * kind.block.calls * len(kind.places)
            for kind in self.kinds
            for tensor in kind.block.tensors
        )
        products = sum(each) * self.work.rows
        rate = self.machine.rate_of_products(self._compute_dtype())
        return self.machine.has_gpu and products / rate > self.weight_bytes / self.machine.vram_rate

    def _compute_dtype(self) -> str:
        """The dtype in which most of the weights are multiplied."""
        sizes: dict[str, int] = {}
        for kind in self.kinds:
            for tensor in kind.block.tensors:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.n_bytes * len(kind.places)
        return max(sizes, key=sizes.__getitem__, default="float32")

    def _notes(self, found: Found) -> tuple[str, ...]:
        machine, notes = self.machine, [*self.model.notes, *self.machine.notes]
        packed = any(o.tier in ("packed", "streamed_packed") and o.unpack_s for o in found.chosen)
        if packed and not machine.triton:
            notes.append("no kernel unpacks on this card: torch operations do")
        elif packed and self.model.becomes:
            notes.append("torch operations unpack and convert: there is no kernel for that yet")
        if any(o.tier == "disk" for o in found.chosen):
            notes.append("the host memory is too small for all weights: some are read from disk in each pass")
        if found.gap >= 1.0:
            notes.append("the budget is so tight that the first placement that fits was taken and improved")
        elif found.gap > NOTABLE_GAP:
            notes.append(f"the search ended early: a better plan may take up to {found.gap:.1%} less time")
        return tuple(notes)


def _least(works: Callable[[int], bool], high: int) -> int:
    """The smallest number that works, to a thousandth; `high` does."""
    if works(0):
        return 0
    low = 0
    while high - low > max(MIB, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _facts(block: BlockDescription, option: Option, work: Pass) -> tuple[object, ...]:
    """The fields of a `BlockPlan` after its name."""
    cache = cache_bytes(block, work)
    one = BlockPlan(
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
    return tuple(getattr(one, field.name) for field in fields(one))[1:]


def _bound(chosen: Sequence[Option], by_products: bool) -> Bound:
    """What takes most of the pass."""
    in_place = sum(o.compute_s for o in chosen if o.tier == "in_place")
    sums: dict[Bound, float] = {
        "link": sum(o.copy_s for o in chosen) + in_place,
        "host": sum(o.cpu_s + o.disk_s for o in chosen),
        "launch": sum(o.launch_s for o in chosen),
        "compute" if by_products else "vram": sum(o.compute_s + o.unpack_s for o in chosen) - in_place,
    }
    return max(sums, key=sums.__getitem__)
