"""`fit` counts in the dtype that `plan` computes in, and says how the model runs where it doesn't fit."""

import shlex
from dataclasses import replace

import pytest

from probes.cli import program
from probes.fit.answer import answer, changes
from probes.fit.placed import with_placement
from probes.fit.precision import default_precision, halves, precision_note
from probes.fit.report import Question
from probes.placement.planner.api import resolve_machine, resolve_model
from probes.placement.planner.compute_dtype import computed_in
from probes.placement.planner.machine import without_gpu

MIB = 1 << 20


@pytest.mark.parametrize(
    ("model", "card", "expected"),
    [
        ("qwen2.5-0.5b", "rtx4090", "bf16"),
        ("qwen2.5-0.5b", "mi50", "fp32"),
        ("bert-base", "rtx4090", "fp32"),
        ("bert-base", "mi50", "fp32"),
    ],
)
def test_inference_and_lora_are_counted_in_what_plan_computes_in(
    model: str, card: str, expected: str
) -> None:
    described, machine = resolve_model(model), resolve_machine(card)
    assert default_precision(described, machine, Question(model)) == expected
    assert default_precision(described, machine, Question(model, "training", lora_rank=4)) == expected


def test_training_of_all_weights_uses_the_halves_that_the_card_has() -> None:
    model, question = resolve_model("qwen2.5-0.5b"), Question("m", "training")
    assert default_precision(model, resolve_machine("mi50"), question) == "amp-fp16"
    assert default_precision(model, resolve_machine("mi210"), question) == "amp-bf16"
    assert default_precision(model, without_gpu(2), question) == "amp-bf16"


def test_no_change_to_bfloat16_is_offered_where_the_card_has_no_units_for_it() -> None:
    assert halves(resolve_machine("mi50")) == "fp16"
    for task in ("inference", "training"):
        question = Question("m", task, precision="fp32")  # type: ignore[arg-type]
        names = [name for name, *_ in changes(question, "fp16")]
        assert "precision fp16" in names
        assert not any("bf16" in name for name in names)


@pytest.mark.thorough
def test_a_conversion_is_said_and_what_was_asked_for_is_kept() -> None:
    model, machine = resolve_model("qwen2.5-0.5b"), resolve_machine("mi50")
    noted = [precision_note(model, machine, Question("m", precision=p)) for p in ("fp32", "bf16", "fp16")]  # type: ignore[arg-type]
    assert "float32" in noted[0]
    assert "bf16 is counted as asked" in noted[1]
    assert "fp16 is counted" in noted[2]
    assert precision_note(model, resolve_machine("h100"), Question("m")) == ""
    assert precision_note(resolve_model("bert-base"), machine, Question("m", precision="fp32")) == ""
    kept = answer(model, Question("qwen2.5-0.5b", precision="bf16"), machine, budget=None)
    assert kept.question.precision == "bf16"


def test_the_dtype_of_a_converting_card_follows_the_objective() -> None:
    model, machine = resolve_model("qwen2.5-0.5b"), resolve_machine("mi50")
    assert computed_in(model, None) == "bfloat16"
    assert computed_in(model, machine) == "float32"
    assert computed_in(replace(model, becomes="float16"), machine) == "float16"
    assert computed_in(resolve_model("bert-base"), machine) == "float32"


@pytest.mark.thorough
def test_what_does_not_fit_but_runs_placed_names_the_plan_that_can_be_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["qwen2.5-3b", "--machine", "wx4100", "--tokens", "512"]
    assert program.main(["fit", *words]) == 1
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("note: placed, it runs"))
    typed = shlex.split(line.partition(" probes ")[2] or line.partition(" probe ")[2])
    assert typed[:2] == ["plan", "qwen2.5-3b"]
    assert program.main(typed) == 0
    assert "whether a torch runs on this card: weir doctor --card gfx803" in text


@pytest.mark.thorough
def test_no_plan_is_named_for_what_fits_for_training_or_for_what_runs_nowhere() -> None:
    model, machine = resolve_model("bert-base"), resolve_machine("rtx4090")
    question = Question("bert-base", tokens=128, precision="fp32")
    whole = answer(model, question, machine, budget=None)
    training = answer(model, replace(question, task="training"), machine, budget=64 * MIB)
    nowhere = answer(model, question, machine, budget=4 * MIB)
    for report in (whole, training, nowhere):
        assert with_placement(report, model, machine, named="rtx4090") is report
    placed = answer(model, question, machine, budget=300 * MIB)
    assert "--tokens 128" in with_placement(placed, model, machine, named="rtx4090").notes[-1]
    assert "--machine" not in with_placement(placed, model, machine, named=None).notes[-1]
