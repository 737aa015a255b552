"""A plan as text, file and picture: what is shown is the plan, and hostile names stay text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hostile_texts import CHOSEN
from jsonschema import Draft202012Validator

from probes.core.codec import to_json
from probes.core.errors import ReportError
from probes.placement.models.reading import describe
from probes.placement.plan_file import plan_schema, read_plan
from probes.placement.planner.machine import profile
from probes.placement.planner.multi_gpu import make_cards_plan
from probes.placement.planner.plan import PlanResult, make_plan
from probes.placement.types import Objective, Plan, Workload
from probes.reports.pictures import draw_plan
from probes.reports.plan import lines

ROOT = Path(__file__).parents[4]
GIB = 2**30


def made(objective: Objective = "exact", model: str = "qwen2.5-3b", **workload: int) -> PlanResult:
    work = Workload(**workload) if workload else Workload(1, 1, 2048)
    return make_plan(
        describe(model), profile("wx4100"), vram=4 * GIB, host=None, workload=work, objective=objective
    )


@pytest.fixture(scope="module")
def mixed() -> PlanResult:
    return made("fast")


def test_the_published_schema_is_that_of_the_code() -> None:
    published = (ROOT / "docs" / "schema" / "placement-plan.schema.json").read_text()
    assert published == plan_schema(), (
        "run: python3 -m probes schema plan > docs/schema/placement-plan.schema.json"
    )
    Draft202012Validator.check_schema(json.loads(published))


def test_a_plan_keeps_to_the_schema_and_comes_back_from_its_file(mixed: PlanResult, tmp_path: Path) -> None:
    text = to_json(mixed.plan)
    assert not list(Draft202012Validator(json.loads(plan_schema())).iter_errors(json.loads(text)))
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(tmp_path / "plan.json") == mixed.plan


@pytest.mark.thorough
def test_a_plan_over_several_cards_comes_back_from_its_file(tmp_path: Path) -> None:
    cards = make_cards_plan(
        describe("bert-base"),
        profile("h200"),
        cards=2,
        vram=GIB,
        host=None,
        workload=Workload(),
        objective="exact",
    ).plan
    (tmp_path / "plan.json").write_text(to_json(cards))
    assert read_plan(tmp_path / "plan.json") == cards


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": []}', '{"schema": "weir-placement-plan/1"}', "[" * 99_999, "\xff"]
)
def test_a_file_that_is_no_plan_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ReportError, match=r"plan\.json"):
        read_plan(path)


def test_the_text_has_every_tier_and_the_sum_of_the_memory(mixed: PlanResult) -> None:
    said = lines(mixed.plan)
    for tier in {block.tier for block in mixed.plan.blocks}:
        assert f"\n{tier}, as " in said
    assert "4.00 GiB" in said
    assert "speeds: those of the profile" in said
    assert "fast" in said


def test_a_pass_without_a_cache_is_said_by_its_rows() -> None:
    said = lines(made(model="bert-base", batch=4, tokens=128).plan)
    assert "a pass (batch 4, 128 tokens each)" in said
    assert "keys and values" not in said


def test_the_picture_marks_every_block_and_every_span(mixed: PlanResult) -> None:
    drawing = ElementTree.fromstring(draw_plan(mixed.plan, mixed.search.timeline))
    marks = [one for one in drawing.iter("{http://www.w3.org/2000/svg}rect") if one.get("class") == "mark"]
    assert len(marks) >= len(mixed.plan.blocks) + len(mixed.search.timeline.spans)
    width = float(drawing.attrib["viewBox"].split()[2])
    for mark in marks:
        assert float(mark.attrib["x"]) + float(mark.attrib["width"]) <= width


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHOSEN)
def test_names_from_a_file_are_text_in_a_picture(name: str, mixed: PlanResult) -> None:
    blocks = tuple(replace(block, name=name) for block in mixed.plan.blocks)
    plan: Plan = replace(mixed.plan, model=name, machine=name, blocks=blocks)
    drawing = ElementTree.fromstring(draw_plan(plan, mixed.search.timeline))
    kinds = {one.tag.rpartition("}")[2] for one in drawing.iter()}
    assert kinds == {"svg", "title", "desc", "style", "text", "rect", "line"}


def test_a_name_with_line_breaks_makes_no_lines_of_its_own(mixed: PlanResult) -> None:
    forged = "good\nnote: all is well\x1b[2J"
    plan = replace(mixed.plan, model=forged, machine=forged, constants=forged, notes=(forged,))
    assert len(lines(plan).splitlines()) == len(lines(mixed.plan).splitlines()) - len(mixed.plan.notes) + 1
    assert "\x1b" not in lines(plan)


def test_a_block_with_an_endless_name_widens_no_table(mixed: PlanResult) -> None:
    first, *others = mixed.plan.blocks
    plan = replace(mixed.plan, blocks=(replace(first, name="x" * 5_000), *others))
    assert max(map(len, lines(plan).splitlines())) < 500
    assert "xxx..." in lines(plan)


def test_the_picture_loads_nothing(mixed: PlanResult) -> None:
    drawn = draw_plan(mixed.plan, mixed.search.timeline)
    without_namespace: Any = drawn.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in without_namespace
    assert "url(" not in drawn
    assert "<script" not in drawn
