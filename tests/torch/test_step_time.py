"""A training step's predicted time: every product of its forward and backward is counted, once."""

import json

import pytest
import torch

from probes.__main__ import main
from probes.fit import step
from probes.fit.report import Question
from probes.placement.planner.machine import profile
from probes.placement.training.step_time import step_time, traced_step

LAYERS, WIDTH, HIDDEN, WORDS, TOKENS = 2, 64, 128, 512, 16
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def traced(**question):
    asked = Question("tiny", "training", tokens=TOKENS, precision="amp-bf16", **question)
    made = step.make(CONFIG, asked, "meta")

    def two_steps(begins):
        ready = step.ready(made, asked, "cpu", foreach=True)
        step.run(ready, asked, lambda name: begins(name.partition(": ")[2].partition(",")[0]))

    return traced_step(made.module, two_steps, "cpu")


def flops(operations, kind="product"):
    return sum(o.flops for o in operations if o.kind == kind)


def test_products_are_counted_once_forward_and_twice_backward_and_attention_too():
    work = traced(batch=2)
    rows, pairs = 2 * TOKENS, 2 * 4 * TOKENS * TOKENS
    weights = LAYERS * (WIDTH * (2 * WIDTH + WIDTH) + 3 * WIDTH * HIDDEN) + WORDS * WIDTH
    assert flops(work.forward) == 2 * rows * weights
    assert flops(work.backward) == 2 * flops(work.forward)
    assert flops(work.forward, "attention") == LAYERS * 2 * pairs * (16 + 16)
    assert flops(work.backward, "attention") == LAYERS * 2 * pairs * (3 * 16 + 2 * 16)
    assert not flops(work.optimizer)
    assert sum(o.written for o in work.optimizer) > 6 * 4 * weights  # its passes over all weights


def test_accumulated_batches_and_recomputed_layers_take_longer_and_adapters_less():
    one, again, adapters = traced(), traced(checkpointing=True), traced(lora_rank=2)
    assert flops(one.backward) < flops(again.backward) <= flops(one.backward) + flops(one.forward)
    assert flops(adapters.backward) < flops(one.backward)
    machine = profile("h200")
    whole, more = step_time(one, machine), [step_time(one, machine, accumulate=n) for n in (2, 10**6)]
    assert whole.low_s < whole.step_s < more[0].step_s < 2.5 * whole.step_s
    assert more[1].step_s == pytest.approx(10**6 * (more[0].step_s - whole.step_s), rel=1e-3)
    for n, time in ((1, whole), (2, more[0]), (10**6, more[1])):
        assert time.flops == n * whole.flops
        busy = time.forward_s + time.backward_s + time.optimizer_s
        assert time.step_s >= 0.999 * max(time.host_s, busy)


def test_a_model_is_as_before_its_step_was_traced():
    asked = Question("tiny", "training", tokens=TOKENS)
    made = step.make(CONFIG, asked, "meta")
    before = [(name, p.device, id(p)) for name, p in made.module.named_parameters()]

    def one_step(begins):
        for phase in ("forward", "backward", "optimizer"):
            begins(phase)
        raise RuntimeError("no\nstep")

    with pytest.raises(Exception, match="can't be traced: RuntimeError: no"):
        traced_step(made.module, one_step, "cpu")
    assert before == [(name, p.device, id(p)) for name, p in made.module.named_parameters()]
    assert torch.is_grad_enabled()


def test_plan_train_says_the_step_and_whether_it_fits(config, capsys):
    assert main(["plan", str(config), "--train", "--machine", "h200", "--tokens", "16"]) == 0
    said = capsys.readouterr().out
    assert "a training step in amp-bf16 with adamw" in said
    assert "a step (" in said
    assert "predicted): " in said
    assert main(["plan", str(config), "--train", "--machine", "h200", "--vram", "1MiB", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["time"]["low_s"] < found["time"]["step_s"] < found["time"]["high_s"]
    assert main(["plan", str(config), "--lora", "4", "--machine", "h200"]) == 2
    assert "--lora is of a training step" in capsys.readouterr().err
    for word in (["--captured"], ["--compute", "float16"]):
        assert main(["plan", str(config), "--train", *word, "--machine", "h200"]) == 2
        assert f"{word[0]} is of a pass, not of a training step" in capsys.readouterr().err


def test_adapters_of_any_rank_are_planned_without_being_made(config, capsys):
    words = ["plan", str(config), "--train", "--machine", "h200", "--tokens", "16", "--lora", "1000000000"]
    assert main(words) == 1
    assert "LoRA of rank 1000000000" in capsys.readouterr().out
