"""Bars of the planner: how long a plan takes, and how far it is from the best of all placements.

`bars(board)` is called by bench_placement.py. Everything here is computed on a laptop: no torch, no GPU.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator

from board import Board

from probes.core.errors import PlanImpossible
from probes.placement.models.description import BlockDescription, ModelDescription, TensorDescription
from probes.placement.models.reading import describe
from probes.placement.planner.compute_dtype import with_compute_dtype
from probes.placement.planner.costs import Option
from probes.placement.planner.machine import profile, profile_names
from probes.placement.planner.multi_gpu import make_cards_plan
from probes.placement.planner.plan import make_plan
from probes.placement.planner.rules import Pass
from probes.placement.planner.simulation import simulate
from probes.placement.planner.tiers import options, surroundings
from probes.placement.types import LOADING_BYTES, Objective, PrefetchPool, Workload

GIB, MIB = 2**30, 2**20
CASES = 240
MOST_BLOCKS = 5
WITHIN = 0.02
LARGEST = "llama-3.1-70b"


def small_model(rng: random.Random) -> ModelDescription:
    """Three to five blocks of one to three sizes, a table among them now and then."""
    widths = [rng.choice((512, 1024, 2048, 3072, 4096)) for _ in range(rng.randint(1, 3))]
    dtype = rng.choice(("bfloat16", "float16", "float32"))
    blocks = []
    for index in range(rng.randint(3, MOST_BLOCKS)):
        width = rng.choice(widths)
        use = "lookup" if rng.random() < 0.15 else "product"
        tensor = TensorDescription(f"{index}.weight", (4 * width, width), dtype, use)  # type: ignore[arg-type]
        blocks.append(BlockDescription(f"{index}", (tensor,)))
    return ModelDescription("drawn", tuple(blocks), "drawn")


def every_placement(
    model: ModelDescription, machine: str, work: Pass, *, vram: int, host: int, workload: Workload
) -> Iterator[tuple[float, tuple[Option, ...]]]:
    """The simulated time of each placement that fits, with two slots, or one, and a scratch buffer."""
    constants = profile(machine)
    blocks = [block.computed(model.becomes) for block in model.blocks]
    left = surroundings(blocks, constants, workload).left(vram, constants)
    pinned, host = int(constants.pinned_share * host), host - LOADING_BYTES
    for chosen in itertools.product(*(options(block, constants, work) for block in blocks)):
        slot = max(option.slot_bytes for option in chosen)
        scratch = max(option.scratch_bytes for option in chosen)
        staging = 2 * slot if any(option.tier == "disk" for option in chosen) else 0
        on_host = staging + sum(option.pinned_bytes for option in chosen)
        room = left - scratch - sum(option.vram_bytes for option in chosen)
        if room < slot or on_host > pinned:
            continue
        if on_host + sum(option.pageable_bytes for option in chosen) <= host:
            slots = min(2, room // slot) if slot else 0
            pool = PrefetchPool(slots, slot, 1 if scratch else 0, scratch)
            yield simulate(chosen, pool).seconds, chosen


def against_every_placement(cases: int = CASES, seed: int = 1) -> list[float]:
    """How much longer each plan takes than the best placement of all, relative; both simulated.

    Cases in which nothing fits must be refused by the planner as well, and count as 0.
    """
    rng = random.Random(seed)
    return [one_case(rng) for _ in range(cases)]


def one_case(rng: random.Random) -> float:
    """One small model on one machine under one budget."""
    model, machine = small_model(rng), rng.choice(profile_names())
    objective: Objective = rng.choice(("exact", "fast"))
    batch = rng.choice((1, 1, 8, 64, 512))
    total = model.weight_bytes
    vram = int(total * rng.uniform(0.2, 1.3)) + 64 * MIB
    host = LOADING_BYTES + (int(total * rng.uniform(0.3, 3.0)) if rng.random() < 0.3 else 8 * total)
    workload = Workload(batch=batch)
    work = Pass(batch, batch, 1, objective)
    every = every_placement(
        with_compute_dtype(model, profile(machine), objective=objective),
        machine,
        work,
        vram=vram,
        host=host,
        workload=workload,
    )
    best = min((seconds for seconds, _ in every), default=None)
    try:
        made = make_plan(
            model, profile(machine), vram=vram, host=host, workload=workload, objective=objective
        ).plan.time.middle_s
    except PlanImpossible:
        assert best is None, "the planner refused what a placement fits"
        return 0.0
    assert best is not None, "the planner placed what no placement fits"
    return made / best - 1


def seconds_of_largest() -> float:
    """The longest time from a config of 70 billion weights to a plan, of every machine and objective."""
    taken = []
    for machine, objective in itertools.product(profile_names(), ("exact", "fast")):
        begun = time.perf_counter()
        make_plan(
            describe(LARGEST),
            profile(machine),
            vram=profile(machine).vram_bytes,
            host=600 << 30,
            workload=Workload(1, 1, 4096),
            objective=objective,  # type: ignore[arg-type]
        )
        taken.append(time.perf_counter() - begun)
    return max(taken)


def seconds_of_many_blocks(blocks: int = 100_000) -> float:
    """The longest time to a plan of very many tiny blocks of 3 and of 60 kinds, by machine and objective."""
    taken = []
    for of_kinds, machine, objective in itertools.product((3, 60), ("h200", "wx4100"), ("exact", "fast")):
        model = tiny_blocks(blocks, of_kinds)
        vram = model.weight_bytes // 2 + 80 * MIB
        begun = time.perf_counter()
        make_plan(
            model,
            profile(machine),
            vram=vram,
            host=None,
            workload=Workload(),
            objective=objective,  # type: ignore[arg-type]
        )
        taken.append(time.perf_counter() - begun)
    return max(taken)


def tiny_blocks(count: int, of_kinds: int) -> ModelDescription:
    """Linear layers of 64 outputs, of a few kinds in turn."""
    return ModelDescription(
        "tiny",
        tuple(
            BlockDescription(
                f"{i}",
                (TensorDescription(f"{i}.weight", (64, 64 * (1 + i % of_kinds)), "bfloat16"),),
            )
            for i in range(count)
        ),
        "drawn",
    )


def over_cards() -> list[float]:
    """For 2 and 4 cards of each profile, half the model's bytes in all: a pass over that of one card."""
    model = describe("qwen2.5-7b")
    found = []
    for machine, cards in itertools.product(profile_names(), (2, 4)):
        vram = max(model.weight_bytes // 2 // cards, 2 * GIB)

        def seconds(count: int, machine: str = machine, vram: int = vram) -> float:
            made = make_cards_plan(
                model,
                profile(machine),
                cards=count,
                vram=vram,
                host=None,
                workload=Workload(1, 1, 1024),
                objective="exact",
            )
            return made.plan.time.middle_s

        found.append(seconds(cards) / seconds(1))
    return found


def bars(board: Board) -> None:
    """The planner's bars."""
    board.bar("plan for a 70B config, slowest of 24", seconds_of_largest(), 1.0, "s")
    board.bar("plan for 100,000 tiny blocks, slowest of 8", seconds_of_many_blocks(), 2.0, "s")
    over = against_every_placement()
    board.bar(
        f"plans within 2 % of the best of all placements, of {len(over)} small cases",
        sum(one <= WITHIN for one in over) / len(over),
        1.0,
        "share",
        at_least=True,
        median_over=statistics.median(over),
        worst_over=max(over),
        exactly_best=sum(one <= 1e-9 for one in over),
    )
    ratios = over_cards()
    board.figure(
        "predicted pass over 2 and 4 cards, over that of one such card, median of 24",
        statistics.median(ratios),
        "x",
        slowest=max(ratios),
        quickest=min(ratios),
    )
