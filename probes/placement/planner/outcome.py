"""The plan as a value, from what the search found: blocks, memory, time and what to say of them. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from probes.placement.models.description import BlockDescription
from probes.placement.planner.costs.blockbytes import cache_bytes
from probes.placement.planner.costs.option import Option, Pass
from probes.placement.planner.footprint import SEGMENT, rounded
from probes.placement.planner.searching.placed import ring_bytes, staging_bytes
from probes.placement.planner.searching.search import Found
from probes.placement.planner.task import Task
from probes.placement.values import BlockPlan, Bound, HostUse, PassTime, Plan, VramUse
from probes.shared.units import binary_bytes

NOTABLE_GAP: Final = 0.005  # share of the time that a better plan might save
PYTHON_SPREAD: Final = 0.40  # of a pass that waits for Python: three hosts, each within two minutes


def plan_of(task: Task, found: Found, vram: int, host: int) -> Plan:
    """The plan of what was found."""
    model, machine, used = task.model, task.machine, Counter(found.chosen).items()
    return Plan(
        model=model.name,
        machine=machine.name,
        constants=machine.origin,
        objective=task.work.objective,
        workload=task.workload,
        vram_budget=vram,
        host_budget=host,
        blocks=_blocks(task, found),
        rings=found.rings,
        vram=_vram(task, found),
        host=HostUse(
            pinned=sum(o.pinned_bytes * n for o, n in used)
            + staging_bytes(found.chosen, found.rings.slot_bytes),
            pageable=sum(o.pageable_bytes * n for o, n in used),
            disk=sum(o.disk_bytes * n for o, n in used),
            loading=model.loading_bytes,
        ),
        time=_time(task, found),
        captured=task.work.captured,
        compute_dtype=_compute_dtype(task),
        bfloat16_becomes=model.becomes,
        notes=_notes(task, found, vram),
    )


def _blocks(task: Task, found: Found) -> tuple[BlockPlan, ...]:
    """Each block's plan: those of one kind in one tier differ in their names."""
    made: list[BlockPlan | None] = [None] * len(task.model.blocks)
    for kind in task.kinds:
        facts: dict[Option, tuple[object, ...]] = {}
        for place in kind.places:
            option = found.chosen[place]
            known = facts.get(option)
            if known is None:
                known = facts[option] = _facts(kind.block, option, task.work)
            made[place] = BlockPlan(task.model.blocks[place].name, *known)  # type: ignore[arg-type]
    return tuple(block for block in made if block is not None)


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


def _vram(task: Task, found: Found) -> VramUse:
    if not task.machine.has_gpu:
        return VramUse(0, 0, 0, 0, 0, 0, 0, 0)
    rings, on_gpu = found.rings, [(o, n) for o, n in Counter(found.chosen).items() if o.tier != "cpu"]
    cache = sum(
        cache_bytes(kind.block, task.work) * sum(found.chosen[at].tier != "cpu" for at in kind.places)
        for kind in task.kinds
        if kind.block.attention
    )
    weights = sum(o.vram_bytes * n for o, n in on_gpu) - cache
    arena = weights + ring_bytes(rings)
    return VramUse(
        weights=weights,
        slots=rings.slots * rings.slot_bytes,
        scratch=rings.scratches * rings.scratch_bytes,
        activations=task.around.activations,
        kv_cache=cache,
        workspace=task.around.workspace,
        context=task.around.context,
        rounding=rounded(arena) - arena + task.around.loose_rounding - SEGMENT,
    )


def _time(task: Task, found: Found) -> PassTime:
    seconds, bound = found.timeline.seconds, _bound(found.chosen, _by_products(task))
    spread = max(task.machine.spread, PYTHON_SPREAD) if bound == "launch" else task.machine.spread
    return PassTime(seconds, seconds * (1 - spread), seconds * (1 + spread), bound)


def _bound(chosen: Sequence[Option], by_products: bool) -> Bound:
    """What takes most of the pass."""
    used = Counter(chosen).items()  # of 100,000 blocks they are a few
    in_place = sum(o.compute_s * n for o, n in used if o.tier == "in_place")
    sums: dict[Bound, float] = {
        "link": sum(o.copy_s * n for o, n in used) + in_place,
        "host": sum((o.cpu_s + o.disk_s) * n for o, n in used),
        "launch": sum(o.launch_s * n for o, n in used),
        "compute" if by_products else "vram": sum(o.gpu_s * n for o, n in used) - in_place,
    }
    return max(sums, key=sums.__getitem__)


def _by_products(task: Task) -> bool:
    """Whether multiplying takes longer than reading the weights."""
    each = (
        2 * tensor.products * kind.block.calls * len(kind.places)
        for kind in task.kinds
        for tensor in kind.block.tensors
    )
    products = sum(each) * task.work.rows
    rate = task.machine.rate_of_products(_compute_dtype(task))
    return task.machine.has_gpu and products / rate > task.weight_bytes / task.machine.vram_rate


def _compute_dtype(task: Task) -> str:
    """The dtype in which most of the weights are multiplied."""
    sizes: dict[str, int] = {}
    for kind in task.kinds:
        for tensor in kind.block.tensors:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.n_bytes * len(kind.places)
    return max(sizes, key=sizes.__getitem__, default="float32")


def _notes(task: Task, found: Found, vram: int) -> tuple[str, ...]:
    machine, notes = task.machine, [*task.model.notes, *task.machine.notes]
    if machine.has_gpu and (most := machine.vram_bytes - task.around.context) < vram:
        notes.append(f"beside the driver's context the card has {binary_bytes(most)}, less than the budget")
    packed = any(o.tier in ("packed", "streamed_packed") and o.unpack_s for o in found.chosen)
    if packed and not machine.triton:
        notes.append("no kernel unpacks on this card: torch operations do")
    elif packed and task.model.becomes:
        notes.append("torch operations unpack and convert: there is no kernel for that yet")
    work, known = task.workload, task.model.positions
    if known is not None and max(work.tokens, work.context_tokens) > known:
        notes.append(f"the model's config knows {known:,} positions: it wasn't trained for longer sequences")
    if any(o.tier == "disk" for o in found.chosen):
        notes.append("the host memory is too small for all weights: some are read from disk in each pass")
    if found.gap >= 1.0:
        notes.append("the budget is so tight that the first placement that fits was taken and improved")
    elif found.gap > NOTABLE_GAP:
        notes.append(f"the search ended early: a better plan may take up to {found.gap:.1%} less time")
    return tuple(notes)
