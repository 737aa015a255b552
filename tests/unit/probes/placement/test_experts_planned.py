"""Plans that place experts one by one: when they do, what they take, and how time depends on the hit rate."""

from dataclasses import replace

import pytest

from probes.placement.models.description import (
    BlockDescription,
    ModelDescription,
    TensorDescription,
    experts_name,
)
from probes.placement.models.reading import describe
from probes.placement.plan_file import first_flaw
from probes.placement.planner.machine import profile
from probes.placement.planner.plan import make_plan
from probes.placement.types import EXPERTS, IN_VRAM, Objective, Plan, Workload

GIB = 2**30
LISTED = "layers.{}.mlp.experts.{}.w{}.weight"


def mixture(
    layers: int = 24, count: int = 64, *, dtype: str = "bfloat16", listed: bool = False
) -> ModelDescription:
    """Layers with a product that every row needs, and experts of which a row chooses 8: 9.4 MB each."""
    blocks = []
    for layer in range(layers):
        name, active = f"layers.{layer}", 8 / count
        tensors = [TensorDescription(f"{name}.attention.weight", (4096, 2048), dtype)]
        if listed:
            tensors += [
                TensorDescription(LISTED.format(layer, n, which), (768, 2048), dtype, active=active)
                for n in range(count)
                for which in range(3)
            ]
        else:
            shapes = {"gate_up_proj": (count, 1536, 2048), "down_proj": (count, 2048, 768)}
            tensors += [
                TensorDescription(f"{name}.mlp.experts.{key}", shape, dtype, active=active)
                for key, shape in shapes.items()
            ]
        blocks.append(BlockDescription(name, tuple(tensors)))
    return ModelDescription("mixture", tuple(blocks), "drawn")


def planned(
    model: ModelDescription,
    vram: int,
    *,
    tokens: int = 1,
    objective: Objective = "exact",
    captured: bool = True,
) -> Plan:
    return make_plan(
        model,
        profile("h200"),
        vram=vram,
        host=200 * GIB,
        workload=Workload(1, tokens),
        objective=objective,
        captured=captured,
    ).plan


@pytest.mark.thorough
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_token_has_its_experts_one_by_one_and_the_rest_in_vram(listed: bool, dtype: str) -> None:
    model = mixture(listed=listed, dtype=dtype)
    plan = planned(model, 6 * GIB)
    tiers = {block.name: block.tier for block in plan.blocks}
    packed = "experts_packed" if dtype == "bfloat16" else "experts"
    assert {tier for name, tier in tiers.items() if name.endswith("experts")} == {packed}
    assert all(tier in IN_VRAM for name, tier in tiers.items() if not name.endswith("experts"))
    assert plan.experts is not None
    assert plan.experts.count == 24 * 64
    assert plan.experts.chosen == pytest.approx(24 * 8)
    assert 0 < plan.experts.cached < plan.experts.count
    assert sum(block.weight_bytes for block in plan.blocks) == model.weight_bytes


@pytest.mark.thorough
def test_the_cache_takes_what_the_budget_leaves_and_no_more() -> None:
    for vram in (3 * GIB, 6 * GIB, 9 * GIB):
        plan = planned(mixture(), vram)
        assert first_flaw(plan) == ""
        assert plan.experts is not None
        assert 0.97 * vram < plan.vram.total - plan.vram.context <= vram
        assert plan.experts.cached * plan.experts.expert_bytes <= plan.experts.cache_bytes
        broken = replace(plan, experts=replace(plan.experts, cache_bytes=-1))
        assert "experts.cache_bytes" in first_flaw(broken)


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["exact", "fast"])
def test_time_falls_with_the_hit_rate_from_all_missing_to_all_cached(objective: Objective) -> None:
    plan = planned(mixture(), 6 * GIB, objective=objective)
    experts = plan.experts
    assert experts is not None
    times = [experts.seconds(rate) for rate in (0.0, 0.5, 0.75, 0.9, 1.0)]
    assert times == sorted(times, reverse=True)
    missing = experts.chosen * experts.expert_bytes / profile("h200").zero_copy_rate
    assert times[0] - times[-1] == pytest.approx(missing, rel=0.01)
    assert times[-1] < 0.3 * times[0]
    assert experts.seconds(experts.assumed_hit_rate) == pytest.approx(plan.time.middle_s, rel=0.02)


@pytest.mark.thorough
def test_many_tokens_stream_whole_layers_and_the_planner_knows_from_where_on() -> None:
    by_tokens = {
        tokens: planned(mixture(), 6 * GIB, tokens=tokens).experts for tokens in (1, 2, 4, 256, 4096)
    }
    assert by_tokens[1] is not None
    assert by_tokens[4096] is None
    crossed = [tokens for tokens, experts in by_tokens.items() if experts is None]
    assert crossed == [tokens for tokens in by_tokens if tokens >= crossed[0]]  # and doesn't cross back


def test_a_model_that_fits_stays_in_vram_and_a_cpu_has_no_cache() -> None:
    model = mixture(layers=2)
    assert planned(model, 8 * GIB).experts is None
    cpu = replace(profile("h200"), vram_bytes=0)
    plan = make_plan(model, cpu, vram=0, host=200 * GIB, workload=Workload(), objective="exact").plan
    assert plan.experts is None
    assert not any(block.tier in EXPERTS for block in plan.blocks)


@pytest.mark.thorough
def test_published_mixtures_are_planned_by_their_configs_alone() -> None:
    plan = planned(describe("mixtral-8x7b"), 28 * GIB)
    assert plan.experts is not None
    assert plan.experts.count == 32 * 8
    assert {block.tier for block in plan.blocks if block.name.endswith(".experts")} == {"experts_packed"}


def test_experts_are_told_by_the_last_module_of_that_name() -> None:
    assert experts_name("a.experts.3.w1.weight") == "a.experts"
    assert experts_name("a.experts.b.experts.w") == "a.experts.b.experts"
    assert experts_name("a.expert.w") == experts_name("experts") == ""
