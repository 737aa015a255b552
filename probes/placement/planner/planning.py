"""Makes a plan: from a model's description, budgets and constants. No torch, no GPU, no weights. Pure."""

from dataclasses import dataclass
from typing import Final

from probes.errors import PlanImpossible, UsageError
from probes.placement.models.description import ModelDescription
from probes.placement.models.ranges import Ranges
from probes.placement.planner.computing import Compute, ready
from probes.placement.planner.costs.constants import Constants, with_host
from probes.placement.planner.outcome import plan_of
from probes.placement.planner.searching.search import Found, search, steadier
from probes.placement.planner.smallest import smallest_budgets
from probes.placement.planner.task import Task
from probes.placement.soundness import MOST
from probes.placement.values import OBJECTIVES, Objective, Plan, Workload

MOST_DIVIDED: Final = 1_000  # blocks of a model whose blocks are divided: more are small already
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
    smaller buffers. `host` None: as much as the machine has, else what is assumed. Raises PlanImpossible
    naming the smallest budget that works, and UsageError for a workload or model that makes no sense.
    `compute` and `ranges` are for bfloat16 weights on a GPU without units for them: `computing.ready`.
    """
    check_numbers(workload, vram=vram, host=host)
    _check(model, workload)
    known, (machine, host) = host, with_host(machine, host)
    if objective not in OBJECTIVES:
        raise UsageError(f"the objective {objective!r} is unknown", f"give one of {', '.join(OBJECTIVES)}")
    model = ready(model, machine, objective=objective, compute=compute, ranges=ranges)
    versions = _versions(model, captured=captured)
    tasks = [Task(one, machine, workload, objective, captured) for one in versions]
    tried = [(task, found) for task in tasks if (found := _quickest(task, vram, host))]
    if not tried:
        said, ways = smallest_budgets(tasks[-1], vram, host)
        raise PlanImpossible(f"{said}, which is assumed" if host != known else said, ways)
    task, found = tried[0]
    if tried[-1][1].timeline.seconds < found.timeline.seconds * WORTH_DIVIDING:
        task, found = tried[-1]
    return Made(plan_of(task, found, vram, task.host_bytes(host)), found)


def _versions(model: ModelDescription, *, captured: bool) -> list[ModelDescription]:
    """The model; for captured passes also in smaller blocks, where it has some that can be divided."""
    if not captured or len(model.blocks) > MOST_DIVIDED:
        return [model]
    divided = model.divided()
    return [model, divided] if len(divided.blocks) > len(model.blocks) else [model]


def _quickest(task: Task, vram: int, host: int | None) -> Found | None:
    limits = task.limits(vram, host)
    found = search(task.counted, limits) if limits.vram >= 0 else None
    return steadier(found, task.counted, limits) if found else None


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
    longest, asked = model.learned_positions, max(workload.tokens, workload.context_tokens)
    if longest is not None and asked > longest:
        raise UsageError(
            f"{model.name[:80]} has {longest:,} learned positions, and {asked:,} tokens are asked for",
            f"plan shorter sequences: at most {longest} tokens, with those of the context",
        )
