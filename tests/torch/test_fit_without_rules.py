"""Architectures without rules: transformers' own modules are measured, two small trials predict the rest."""

import json
from pathlib import Path

import pytest

from probes.cli import program
from probes.core.codec import decode, load
from probes.core.errors import ProbeError
from probes.core.unknown import Unknown
from probes.fit import step, trial
from probes.fit.report import Built, FitReport, Largest, Measured, Question, Taken
from probes.fit.search import Hint
from probes.fit.worker import Searcher, SearchMessage, SearchRequest

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
CONFIGS: dict[str, dict[str, object]] = {
    "opt": {**SMALL, "architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 64, "ffn_dim": 256},
    "gpt_neox": {**SMALL, "architectures": ["GPTNeoXForCausalLM"], "intermediate_size": 256},
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 500,
        "decoder_start_token_id": 0,
    },
    "vit": {
        **{k: v for k, v in SMALL.items() if k != "vocab_size"},
        "architectures": ["ViTModel"],
        "intermediate_size": 128,
        "image_size": 32,
        "patch_size": 8,
    },
    "mixtral": {
        **SMALL,
        "architectures": ["MixtralForCausalLM"],
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "num_local_experts": 4,
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("task", ["inference", "training"])
def test_any_architecture_of_text_or_images_runs_its_step(kind: str, task: str) -> None:
    asked = Question("m", task, batch=2, tokens=16, precision="fp32")  # type: ignore[arg-type]
    ready = step.prepare({**CONFIGS[kind], "model_type": kind}, asked, "cpu")
    phases: list[str] = []
    step.run(ready, asked, phases.append)
    assert len(phases) == len(set(phases)), "each phase is one line through the trials"
    assert ("step 2: optimizer" in phases) == (task == "training")


def search(kind: str, device: str, axis: str) -> list[SearchMessage]:
    asked = Question("m", batch=1, tokens=16, precision="fp32")
    config = json.dumps({**CONFIGS[kind], "model_type": kind})
    told: list[SearchMessage] = []
    request = SearchRequest(config, asked, device, axis, 64 << 20, Hint(), 4, 30.0, "process")  # type: ignore[arg-type]
    Searcher(request, told.append)._begin()
    return told


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_sequences_of_a_model_of_images_are_not_made_longer(device: str) -> None:
    (told,) = search("vit", device, "batch")
    assert told.start is not None
    assert told.start.notes[0].startswith("it takes images of 3 x 32 x 32")
    with pytest.raises(ProbeError, match="no sequences to make longer") as refused:
        search("vit", device, "tokens")
    assert "--axis batch" in refused.value.hint


def test_the_weights_are_known_also_where_trials_are_on_a_gpu() -> None:
    (on_gpu,), (on_cpu,) = search("opt", "gpu", "batch"), search("opt", "cpu", "batch")
    assert on_gpu.start
    assert on_cpu.start
    assert isinstance(on_gpu.start.built, Built)
    assert on_gpu.start.built == on_cpu.start.built


def test_a_model_of_sound_is_refused_with_what_is_tried_here() -> None:
    asked = Question("m", precision="fp32")
    with pytest.raises(step.ModelUnknown, match="tokens or with images"):
        step.make({"model_type": "wav2vec2", "hidden_size": 64, "num_attention_heads": 4}, asked, "meta")


def test_the_weights_of_modules_are_exact_with_shared_ones_once() -> None:
    asked = Question("m", "training", precision="fp32")
    made = step.make({**CONFIGS["opt"], "model_type": "opt"}, asked, "meta")
    parameters = {id(p): p.nbytes for p in made.module.parameters()}
    assert step.built(made.module).trained == sum(parameters.values())


def test_a_trace_of_whole_sequences_has_no_mask_that_a_real_step_lacks() -> None:
    asked = Question("m", "training", batch=2, tokens=16, precision="fp32")
    import transformers.masking_utils as masks

    before = masks.find_packed_sequence_indices
    assert isinstance(trial.trace({**CONFIGS["opt"], "model_type": "opt"}, asked, "cpu"), Taken)
    assert masks.find_packed_sequence_indices is before


def test_the_verb_answers_for_an_architecture_without_rules(tmp_path: Path) -> None:
    model, out = tmp_path / "config.json", tmp_path / "fit.json"
    model.write_text(json.dumps({**CONFIGS["opt"], "model_type": "opt"}), encoding="utf-8")
    words = (
        "--measure",
        "cpu",
        "--budget",
        "40MiB",
        "--tokens",
        "64",
        "--cap",
        "process",
        "--json",
        str(out),
    )
    task = ("--task", "training", "--precision", "fp32")
    assert program.main(["fit", str(model), *words, *task, "--json", str(out)]) == 0
    report = decode(FitReport, load(out.read_text(encoding="utf-8")), "fit")
    assert report.predicted_by == "two trials"
    assert isinstance(report.measured, Measured)
    assert report.measured.largest.ended
    assert isinstance(report.predicted_largest_batch, Largest)
    assert isinstance(report.predicted_largest_tokens, Unknown)
    assert not isinstance(report.measured.built, Unknown)
    assert report.predicted.weights == report.measured.built.weights


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": 2**39}, {"hidden_size": -5}, {"hidden_size": "a"}, {"num_attention_heads": 0}]
)
def test_a_config_that_torch_cannot_build_is_refused_before_any_trial(wrong: dict[str, object]) -> None:
    asked = Question("m", precision="fp32")
    with pytest.raises(step.ModelUnknown, match="can't build this model"):
        trial.warm({**CONFIGS["opt"], "model_type": "opt", **wrong}, asked)
