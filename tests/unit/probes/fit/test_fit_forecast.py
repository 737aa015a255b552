"""Predictions by rules: hand counts, relations that hold for every model, and numbers meant to break them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from probes.core.codec import decode, load, to_json
from probes.core.errors import CheckpointUnreadable, ModelUnknown, UsageError
from probes.fit.answer import answer
from probes.fit.forecast import CPU, forecast, largest, place_of
from probes.fit.report import STATES, FitReport, Question, fit_schema
from probes.placement.models.description import ModelDescription
from probes.placement.models.families import from_config
from probes.placement.planner.machine import profile, profile_names

GIB = 2**30
TINY = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "qwen2": TINY,
    "phi3": {**TINY, "model_type": "phi3"},
    "qwen3": {**TINY, "model_type": "qwen3", "head_dim": 64},
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 512,
        "n_layer": 4,
        "n_head": 8,
        "vocab_size": 8000,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 8000,
    },
}
TRAIN = Question("m", "training", batch=4, tokens=128, precision="fp32")


def model(family: str = "qwen2", **changed: object) -> ModelDescription:
    return from_config({**FAMILIES[family], **changed}, name="m", where="config.json")


def counted(known: ModelDescription) -> int:
    return sum(tensor.numbers for block in known.blocks for tensor in block.tensors)


@pytest.mark.parametrize("optimizer", STATES)
def test_weights_gradients_and_states_are_those_of_a_hand_count(optimizer: str) -> None:
    """With one token, a step's peak is at its end: nothing else of that size is alive."""
    known = model()
    asked = replace(TRAIN, batch=1, tokens=1, optimizer=optimizer)  # type: ignore[arg-type]
    taken = forecast(known, asked, CPU).taken
    numbers = counted(known) * 4
    assert taken.weights == pytest.approx(numbers, rel=1e-3)
    assert taken.gradients == pytest.approx(numbers, rel=1e-3)
    assert taken.optimizer == pytest.approx(STATES[asked.optimizer] * numbers, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16"])
def test_halves_keep_weights_in_two_bytes_and_mixed_precision_in_four(precision: str) -> None:
    known = model()
    taken = forecast(known, replace(TRAIN, precision=precision), CPU).taken  # type: ignore[arg-type]
    assert taken.weights == pytest.approx(counted(known) * (2 if precision == "bf16" else 4), rel=1e-3)


def test_adapters_have_as_many_numbers_as_rank_times_both_sides() -> None:
    taken = forecast(model(), replace(TRAIN, lora_rank=8, lora_targets=("q_proj",)), CPU).taken
    adapters = 4 * 8 * (512 + 512) * 4  # layers, rank, both sides, bytes
    assert taken.optimizer == pytest.approx(2 * adapters, rel=1e-2)


def test_keys_and_values_are_kept_for_every_layer_and_token() -> None:
    taken = forecast(model(), Question("m", batch=4, tokens=128, precision="bf16"), CPU).taken
    assert 3 * 4 * 128 * 2 * 2 * 64 * 2 <= taken.kv_cache <= 4 * 4 * 128 * 2 * 2 * 64 * 2


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_more_never_takes_less(family: str, precision: str) -> None:
    known = model(family)
    asked = replace(TRAIN, precision=precision)  # type: ignore[arg-type]

    @cache
    def total(question: Question) -> int:
        return forecast(known, question, CPU).taken.total

    assert total(asked) <= total(replace(asked, batch=8)) <= total(replace(asked, batch=8, tokens=256))
    assert total(replace(asked, checkpointing=True, tokens=512)) < total(replace(asked, tokens=512))
    assert (
        total(replace(asked, optimizer="sgd")) <= total(replace(asked, optimizer="momentum")) <= total(asked)
    )
    assert total(asked) <= total(replace(asked, accumulate=4)) == total(replace(asked, accumulate=9))
    inference = Question("m", "inference", 4, 128, precision="fp32")
    assert total(inference) < total(replace(asked, precision="fp32"))


@pytest.mark.parametrize("edge", [0, 1, 2, 3, 5, 17, 1000, 10**7])
def test_the_largest_size_is_exact(edge: int) -> None:
    found = largest(lambda size: size * 100 + (size // 7) * 3, edge * 100 + (edge // 7) * 3, "batch")
    assert (found.fits, found.fails, found.exact) == (edge, edge + 1, True)


def test_a_model_with_learned_positions_ends_where_they_end() -> None:
    found = answer(model("gpt2"), Question("m", tokens=16), profile("h200"), budget=None)
    assert found.predicted_largest_tokens.fits == 1024
    assert found.predicted_largest_tokens.exact


@pytest.mark.thorough
@pytest.mark.sampled(4)
@pytest.mark.parametrize("machine", profile_names())
def test_every_card_has_an_answer_and_the_smallest_budget_is_smallest(machine: str) -> None:
    known, asked = model(), TRAIN
    found = answer(known, asked, profile(machine), budget=None)
    enough = answer(known, asked, profile(machine), budget=found.smallest_budget_bytes)
    short = answer(known, asked, profile(machine), budget=found.smallest_budget_bytes - 1)
    assert (enough.fits, short.fits) == (True, False)
    assert enough.predicted_largest_batch.fits >= asked.batch > short.predicted_largest_batch.fits


@pytest.mark.thorough
def test_the_users_question_has_an_answer() -> None:
    """Does LoRA of rank 16 of Qwen2.5-3B at 1024 tokens fit a WX 4100? Its weights take 6.2 GB in halves."""
    known = from_config(
        {**TINY, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
        | {"intermediate_size": 11008, "vocab_size": 151936},
        name="m",
        where="config.json",
    )
    asked = Question("m", "training", 1, 1024, lora_rank=16, precision="bf16", checkpointing=True)
    found = answer(known, asked, profile("wx4100"), budget=None)
    assert not found.fits
    assert found.predicted_largest_batch.fits == 0
    assert 6 * GIB < found.smallest_budget_bytes < 10 * GIB


def test_a_card_without_fused_attention_keeps_whole_scores() -> None:
    asked = Question("m", "training", 1, 4096, precision="bf16")
    old, new = (
        forecast(model(), asked, place_of(profile(card), model(), asked)) for card in ("mi50", "h200")
    )
    scores = 8 * 4096 * 4096 * 4
    assert old.taken.activations - new.taken.activations > 3 * scores


@pytest.mark.thorough
def test_the_answer_goes_through_its_file_and_fits_its_schema() -> None:
    from jsonschema import Draft202012Validator

    found = answer(model(), TRAIN, profile("mi50"), budget=GIB)
    written = json.loads(to_json(found))
    Draft202012Validator(json.loads(fit_schema())).validate(written)
    assert decode(FitReport, load(to_json(found)), "fit") == found


def test_the_published_schema_is_that_of_the_code() -> None:
    root = Path(__file__).parents[4]
    published = (root / "docs" / "schema" / "fit.schema.json").read_text(encoding="utf-8")
    assert published == fit_schema(), "run: python3 -m probes schema fit > docs/schema/fit.schema.json"


@pytest.mark.thorough
@pytest.mark.parametrize("size", [10**30, 10**300, 2**63])
def test_absurd_sizes_have_an_answer(size: int) -> None:
    found = answer(model(), replace(TRAIN, batch=size), profile("h200"), budget=size)
    assert not found.fits
    assert (
        answer(model(), replace(TRAIN, tokens=size), profile("h200"), budget=1).smallest_budget_bytes > size
    )


def test_a_budget_of_nothing_fits_nothing() -> None:
    found = answer(model(), TRAIN, profile("h200"), budget=0)
    assert not found.fits
    assert (found.predicted_largest_batch.fits, found.predicted_largest_tokens.fits) == (0, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": -512},
        {"hidden_size": 10**30},
        {"hidden_size": float("nan")},
        {"num_hidden_layers": 10**9},
        {"vocab_size": "many"},
        {"intermediate_size": 0},
    ],
)
def test_a_lying_config_is_an_error_and_no_answer(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointUnreadable):
        model(**changed)


def test_an_architecture_without_rules_is_named_and_the_way_out_too() -> None:
    mixture = {**TINY, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    known = from_config(mixture, name="m", where="config.json")
    with pytest.raises(ModelUnknown, match="isn't known by rules"):
        forecast(known, TRAIN, CPU)


def test_targets_that_no_layer_has_are_refused() -> None:
    with pytest.raises(UsageError, match="no linear layer"):
        forecast(model(), replace(TRAIN, lora_rank=4, lora_targets=("no_such",)), CPU)
