"""Tensors with an extent of 0, scalars, and blocks without tensors are planned like any other."""

import math
import random

import pytest

from probes.core.errors import PlanImpossible, UsageError
from probes.placement.models.description import (
    Attention,
    BlockDescription,
    ModelDescription,
    TensorDescription,
    Use,
)
from probes.placement.plan_file import first_flaw
from probes.placement.planner.machine import profile, profile_names
from probes.placement.planner.multi_gpu import make_cards_plan
from probes.placement.planner.plan import make_plan
from probes.placement.types import Workload
from probes.reports.pictures import draw_plan
from probes.reports.plan import lines

MIB = 1 << 20
USES: tuple[Use, ...] = ("product", "lookup", "elementwise")


def tensor(rng: random.Random, name: str) -> TensorDescription:
    shape = tuple(rng.choice([0, 0, 1, 3, 8, 255, 512, 2048]) for _ in range(rng.choice([0, 1, 2, 2, 3, 4])))
    while math.prod(shape) > 1 << 24:
        shape = shape[1:]
    return TensorDescription(
        name,
        shape,
        rng.choice(["bfloat16", "float16", "float32", "complex64"]),
        rng.choice(USES) if len(shape) > 1 else "elementwise",
        rng.choice([1.0, 0.25, 0.0]),
        inputs_first=rng.random() < 0.2,
    )


def block(rng: random.Random, name: str) -> BlockDescription:
    attention = Attention(rng.choice([0, 4]), rng.choice([0, 2]), rng.choice([0, 64]))
    return BlockDescription(
        name,
        tuple(tensor(rng, f"{name}.{i}.weight") for i in range(rng.choice([0, 1, 1, 2, 4]))),
        calls=rng.choice([0, 1, 1, 3]),
        looked_up=rng.random() < 0.1,
        attention=attention if rng.random() < 0.2 else None,
        anytime=rng.random() < 0.1,
        divisible=rng.random() < 0.3,
    )


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(10, 60))]
)
def test_a_model_with_nothing_in_some_places_has_a_sound_plan_or_a_smallest_budget(seed: int) -> None:
    rng = random.Random(seed)
    model = ModelDescription(
        "drawn", tuple(block(rng, f"{i}") for i in range(rng.choice([1, 2, 5]))), "drawn"
    )
    machine = profile(rng.choice(profile_names()))
    work = Workload(rng.choice([1, 64]), rng.choice([1, 128]), rng.choice([0, 200]))
    vram = int(model.weight_bytes * rng.random() * 1.2) + rng.choice([0, 50, 600]) * MIB
    how = {"vram": vram, "host": None, "workload": work, "objective": rng.choice(["exact", "fast"])}
    for captured in (False, True):
        try:
            made = make_plan(model, machine, captured=captured, **how)  # type: ignore[arg-type]
        except PlanImpossible:
            continue
        assert first_flaw(made.plan) == ""
        assert math.isfinite(made.plan.time.high_s)
        assert lines(made.plan)
        assert draw_plan(made.plan, made.search.timeline)
        if len(model.blocks) > 1:
            over = make_cards_plan(model, machine, cards=2, captured=captured, **{**how, "vram": 600 * MIB})  # type: ignore[arg-type]
            assert len(over.plan.cards) == 2


def test_experts_of_which_there_are_none_take_no_time() -> None:
    none = TensorDescription("experts.weight", (0, 512, 512), "bfloat16", active=0.25)
    some = TensorDescription("head.weight", (512, 512), "bfloat16")
    blocks = (BlockDescription("experts", (none,)), BlockDescription("head", (some,)))
    how = {"vram": 600 * MIB, "host": None, "workload": Workload(), "objective": "exact"}
    both = make_plan(ModelDescription("both", blocks, "drawn"), profile("h100"), **how)  # type: ignore[arg-type]
    alone = make_plan(ModelDescription("alone", blocks[1:], "drawn"), profile("h100"), **how)  # type: ignore[arg-type]
    assert 0 <= both.plan.time.middle_s - alone.plan.time.middle_s < 5e-5


@pytest.mark.parametrize("use", ["product", "lookup"])
@pytest.mark.parametrize("shape", [(), (8,)])
def test_what_has_no_rows_is_no_product_and_no_lookup(use: Use, shape: tuple[int, ...]) -> None:
    model = ModelDescription(
        "drawn", (BlockDescription("a", (TensorDescription("a.weight", shape, "bfloat16", use),)),), "drawn"
    )
    with pytest.raises(UsageError, match=r"a\.weight is described as a .* has no rows"):
        make_plan(model, profile("h100"), vram=600 * MIB, host=None, workload=Workload(), objective="exact")
