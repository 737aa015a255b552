"""No two of doctor, `plan`, `fit` and `fits` contradict each other about one model on one card."""

import contextlib
import datetime
import io
import json
import random
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest

from buildtool.cli import program as weir
from buildtool.doctor.compatibility import compatibility
from buildtool.doctor.routes import best_of, supposed_routes
from buildtool.fits.answer import Answer, Asked, ask
from buildtool.fits.card import TorchAnswer, Torches, choose_card
from probes.core.units import typed_bytes
from probes.fit.answer import LORA_RANK, answer
from probes.fit.forecast import most_of
from probes.fit.placed import whole_mib, workload_of
from probes.fit.precision import DTYPE_OF, default_precision
from probes.fit.report import FitReport, Largest, Question
from probes.placement.planner.api import resolve_machine, resolve_model
from probes.placement.planner.compute_dtype import with_compute_dtype
from probes.placement.planner.costs import cache_bytes
from probes.placement.planner.machine import profile_names
from probes.placement.planner.plan import PlanningTask, make_plan
from probes.placement.types import Plan

Task = Literal["inference", "lora", "training"]
MODELS = (
    "qwen2.5-0.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "gpt2-xl",
    "bert-base",
)
TASKS: tuple[Task, ...] = ("inference", "lora", "training")
ALL = [(card, model, task) for card in profile_names() for model in MODELS for task in TASKS]
# those whose commands are typed one by one: each card and task, with a model drawn
ASKED_ALONE = [
    (card, random.Random(f"{card} {task}").choice(MODELS), task) for card in profile_names() for task in TASKS
]
DAY = datetime.date(2026, 11, 24)
# what contradicts, and why that can't be mended yet: (card, model, task) -> reason
KNOWN: dict[tuple[str, str, str], str] = {}

pytestmark = pytest.mark.thorough


def triples(*tasks: Task) -> pytest.MarkDecorator:
    """All of these tasks."""
    cases = [pytest.param(*one, id="-".join(one)) for one in ALL if one[2] in tasks]
    return pytest.mark.parametrize(("card", "model", "task"), cases)


@cache
def fit(card: str, model: str, task: Task, batch: int = 1) -> FitReport:
    """What `weir probe fit` answers."""
    description, machine = resolve_model(model), resolve_machine(card)
    tokens = min(1024, most_of(description, "tokens"))
    question = Question(
        model,
        "inference" if task == "inference" else "training",
        batch,
        tokens,
        lora_rank=LORA_RANK if task == "lora" else 0,
    )
    question = replace(question, precision=default_precision(description, machine, question))
    return answer(description, question, machine, budget=None)


@cache
def plan(card: str, model: str) -> Plan:
    """What `weir probe plan` answers about the pass that `fit` counts, in all of the VRAM."""
    report, machine = fit(card, model, "inference"), resolve_machine(card)
    return make_plan(
        resolve_model(model),
        machine,
        vram=whole_mib(report.budget_bytes),
        host=1 << 40,
        workload=workload_of(report),
        objective="exact",
    ).plan


def largest_resident_batch(card: str, model: str) -> int:
    """The largest batch at which the planner has room for all weights in VRAM, as they are computed in."""
    report, machine = fit(card, model, "inference"), resolve_machine(card)
    description = with_compute_dtype(resolve_model(model), machine, objective="exact")

    def has_room(batch: int) -> bool:
        work = replace(workload_of(report), batch=batch)
        task = PlanningTask(description, machine, work, "exact", False)
        taken = sum(
            (sum(tensor.n_bytes for tensor in kind.block.tensors) + cache_bytes(kind.block, task.work))
            * len(kind.places)
            for kind in task.kinds
        )
        return taken <= task.limits(report.budget_bytes, None).vram

    low, high = 0, 1
    while has_room(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return low


def is_whole(plan: Plan) -> bool:
    return all(block.tier == "resident" and not block.kept for block in plan.blocks)


def largest(report: FitReport) -> int:
    assert isinstance(report.predicted_largest_batch, Largest)
    return report.predicted_largest_batch.fits


@cache
def fits(card: str, model: str, task: Task) -> Answer:
    torches = Torches(compatibility(), "linux", DAY)
    return ask(Asked(model, task), resolve_model(model), choose_card(card, torches))


@triples(*TASKS)
@pytest.mark.sampled(6)
def test_what_fits_whole_is_planned_whole(card: str, model: str, task: Task) -> None:
    """What can be trained in the VRAM can also be run there."""
    report = fit(card, model, task)
    if report.fits and (card, model, task) not in KNOWN:
        assert is_whole(plan(card, model))


@triples("inference")  # which plans are of
@pytest.mark.sampled(6)
def test_what_is_planned_whole_fits_whole(card: str, model: str, task: Task) -> None:
    if (card, model, task) in KNOWN:
        return
    report = fit(card, model, task)
    assert largest_resident_batch(card, model) <= largest(report)
    assert not is_whole(plan(card, model)) or report.fits


@triples(*TASKS)
@pytest.mark.sampled(4)
def test_all_count_the_same_memory_and_compute_in_the_same_dtype(card: str, model: str, task: Task) -> None:
    report, planned, machine = fit(card, model, task), plan(card, model), resolve_machine(card)
    asked = fits(card, model, task)
    assert asked.card.vram_bytes == machine.vram_bytes
    assert asked.card.context_bytes == machine.context_bytes
    assert report.predicted.context == planned.vram.context == machine.context_bytes
    assert report.budget_bytes == machine.vram_bytes - machine.context_bytes
    assert asked.vram_budget_bytes == planned.vram_budget == whole_mib(report.budget_bytes)
    assert asked.compute_dtype == planned.compute_dtype
    if task == "training":
        assert report.question.precision == ("amp-bf16" if machine.bfloat16 else "amp-fp16")
    else:
        assert DTYPE_OF[report.question.precision] == planned.compute_dtype


@pytest.mark.parametrize("card", profile_names())
def test_fits_says_what_doctor_says(card: str) -> None:
    chosen = choose_card(card, Torches(compatibility(), "linux", DAY))
    best = best_of(supposed_routes(chosen.facts.target, "linux", compatibility(), today=DAY))
    assert best
    assert isinstance(chosen.torch, TorchAnswer)
    assert (chosen.torch.torch, chosen.torch.rank) == (best.torch, best.rank)


def said(*words: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert weir.main(list(words)) in (0, 1)
    made: dict[str, Any] = json.loads(out.getvalue())
    return made


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("card", "model", "task"), [pytest.param(*one, id="-".join(one)) for one in ASKED_ALONE]
)
def test_the_json_of_fits_is_what_plan_and_fit_say_alone(card: str, model: str, task: Task) -> None:
    shown = said("fits", model, card, "--task", task, "--json")
    budget = typed_bytes(shown["vram_budget_bytes"])
    sizes = ["--batch", "1", "--tokens", str(shown["tokens"])]
    lora = ["--lora", str(LORA_RANK)] if task == "lora" else []
    kind = "inference" if task == "inference" else "training"
    words = ["fit", model, "--machine", card, "--vram", budget, *sizes, "--task", kind, *lora]
    alone = said("probe", *words, "--json", "-")
    memory = shown["memory"]
    assert memory["fits"] == alone["fits"]
    assert memory["smallest_budget_bytes"] == alone["smallest_budget_bytes"]
    assert memory["largest_batch"] == alone["predicted_largest_batch"]["fits"]
    assert memory["precision"] == alone["question"]["precision"]
    if shown["placement"]["is"] == "unknown":
        return
    context = ["--context", str(shown["tokens"])] if shown["placement"]["speed"]["of"] == "tokens" else []
    planned = said(
        "probe", "plan", model, "--machine", card, "--vram", budget, *sizes, *context, "--json", "-"
    )
    assert shown["placement"]["speed"]["per_second"] == pytest.approx(1 / planned["time"]["middle_s"])
    assert shown["compute_dtype"] == planned["compute_dtype"]
    assert sum(tier["weight_bytes"] for tier in shown["placement"]["tiers"]) == sum(
        block["weight_bytes"] for block in planned["blocks"]
    )
