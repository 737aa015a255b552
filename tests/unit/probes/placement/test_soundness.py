"""A plan is a file that anybody can edit: what no planner makes is refused, what planners make never is."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from probes.core.codec import to_json
from probes.core.errors import PlanImpossible, ReportError
from probes.placement.models.reading import describe
from probes.placement.plan_file import first_flaw, read_plan
from probes.placement.planner.machine import profile, profile_names
from probes.placement.planner.plan import make_plan
from probes.placement.types import Objective, Plan, PrefetchPool, Tier, Workload

GIB = 2**30
Edit = Callable[[dict[str, Any]], None]


@cache
def planned(
    machine: str = "wx4100", model: str = "qwen2.5-3b", vram: int = 4 * GIB, *, objective: Objective = "exact"
) -> Plan:
    work = Workload(2, 16, 64) if model.startswith("qwen") else Workload(4, 64)
    return make_plan(
        describe(model), profile(machine), vram=vram, host=None, workload=work, objective=objective
    ).plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize("machine", profile_names())
def test_no_plan_of_the_planner_is_called_unsound(machine: str) -> None:
    found = 0
    for model, vram in (("bert-base", GIB // 4), ("qwen2.5-3b", 3 * GIB), ("qwen2.5-3b", 12 * GIB)):
        for objective in ("exact", "fast"):
            try:
                made = planned(machine, model, vram, objective=objective)  # type: ignore[arg-type]
            except PlanImpossible:
                continue
            assert first_flaw(made) == ""
            found += 1
    assert found >= 4


def edited(plan: Plan, edit: Edit) -> str:
    raw = json.loads(to_json(plan))
    edit(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda p: p["blocks"][3].update(wire_bytes=-1), r"wire_bytes is -1, not a whole number"),
        (lambda p: p["blocks"][3].update(host_bytes=10**30), r"host_bytes is a number beyond 64 bits"),
        (lambda p: p["blocks"][3].update(weight_bytes=10**500), r"weight_bytes"),
        (lambda p: p["blocks"][3].update(vram_bytes=float("nan")), r"NaN is not JSON"),
        (lambda p: p["time"].update(middle_s=float("inf")), r"Infinity is not JSON"),
        (lambda p: p["time"].update(low_s=-1.5), r"plan\.time\.low_s is -1\.5, not a time"),
        (lambda p: p["vram"].update(weights=p["vram"]["weights"] + 4 * GIB), r"GiB of VRAM, more than its"),
        (lambda p: p["vram"].update(weights=0), r"its blocks take \S+ \S+ of VRAM, and it counts 0 B"),
        (lambda p: p["host"].update(pageable=2**50), r"of host memory, more than its budget"),
        (lambda p: p["blocks"].append(p["blocks"][0]), r"twice"),
        (lambda p: p.update(vram_budget=-5), r"plan\.vram_budget is -5"),
        (lambda p: p["rings"].update(slots=9), r"its slots take \S+ \S+ of VRAM, and it counts"),
        (
            lambda p: p["vram"].update(scratch=0),
            r"its scratch buffers take \S+ \S+ of VRAM, and it counts 0 B",
        ),
        (lambda p: p["host"].update(pinned=0), r"its blocks take \S+ \S+ of host memory, and it counts 0 B"),
        (lambda p: p.update(bfloat16_becomes=""), r"kept as bfloat16, and nothing converts it"),
        (lambda p: p["rings"].update(slots=10**6), r"aren't each from 0 to 1,000"),
        (lambda p: p["blocks"][3].update(table=True), r"is a packed table, and"),
    ],
)
def test_an_edited_plan_file_is_refused_by_the_place_that_is_wrong(
    plan: Plan, edit: Edit, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "edited.json"
    path.write_text(edited(plan, edit))
    with pytest.raises(ReportError, match=rf"edited\.json.*{said}"):
        read_plan(path)


def test_a_time_that_overflows_to_infinity_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    path.write_text(edited(plan, lambda p: p["time"].update(high_s="@")).replace('"@"', "1e999"))
    with pytest.raises(ReportError, match=r"high_s"):
        read_plan(path)


def test_a_packed_block_in_no_memory_is_seen(plan: Plan) -> None:
    blocks = tuple(replace(block, tier="packed", vram_bytes=0) for block in plan.blocks)
    assert "is packed with" in first_flaw(replace(plan, blocks=blocks))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tier", "edit", "said"),
    [
        ("streamed", {"host_bytes": 5}, "of weights in 5 bytes of host memory"),
        ("streamed_packed", {"host_bytes": 5}, "of weights in 5 bytes of host memory"),
        ("cpu", {"host_bytes": 0}, "of weights in 0 bytes of host memory"),
        ("in_place", {"host_bytes": 0}, "of weights in 0 bytes of host memory"),
        ("streamed", {"slot_bytes": 7}, "of weights in 7 bytes of a slot"),
        ("disk", {"slots": 0}, "of weights in 0 bytes of a slot"),
        ("streamed_packed", {"scratch_bytes": 7}, "of weights in 7 bytes of a scratch buffer"),
        ("streamed_packed", {"scratches": 0}, "of weights in 0 bytes of a scratch buffer"),
    ],
)
def test_a_block_in_less_memory_than_its_weights_take_is_seen(
    tier: Tier, edit: dict[str, int], said: str
) -> None:
    """Runtime takes what blocks need, whatever the plan says: an edited plan went over its own budget."""
    plan = planned("h200", "bert-base", GIB)
    big, *rest = sorted(plan.blocks, key=lambda block: -block.weight_bytes)
    weights = big.weight_bytes
    rings = PrefetchPool(2, weights + 512, 1, weights + 512)
    taken = replace(big, tier=tier, vram_bytes=0, host_bytes=weights + 512)
    use = replace(plan.vram, slots=2 * rings.slot_bytes, scratch=rings.scratch_bytes)
    host = replace(plan.host, pageable=plan.host.pageable + taken.host_bytes)
    whole = replace(plan, blocks=(taken, *rest), rings=rings, vram=use, host=host, vram_budget=4 * GIB)
    assert first_flaw(whole) == ""
    names = {field.name for field in fields(PrefetchPool)}
    of_rings = {key: value for key, value in edit.items() if key in names}
    of_block = {key: value for key, value in edit.items() if key not in names}
    changed = replace(whole, blocks=(replace(taken, **of_block), *rest), rings=replace(rings, **of_rings))
    assert said in first_flaw(changed)


def test_blocks_made_resident_beyond_the_budget_are_seen(plan: Plan) -> None:
    assert any(block.tier != "resident" for block in plan.blocks)
    blocks = tuple(replace(block, tier="resident") for block in plan.blocks)
    assert "is resident with" in first_flaw(replace(plan, blocks=blocks))
    honest = tuple(replace(block, vram_bytes=block.weight_bytes) for block in blocks)
    assert "and it counts" in first_flaw(replace(plan, blocks=honest))
    weights = sum(block.vram_bytes for block in honest)
    assert "more than its budget" in first_flaw(
        replace(plan, blocks=honest, vram=replace(plan.vram, weights=weights))
    )
