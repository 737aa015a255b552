"""Predicted bytes against torch's own: what autograd saves, and the peak of whole steps by a trace."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from probes.fit import trial
from probes.fit.forecast import CPU, forecast
from probes.fit.report import Question
from probes.fit.tape import Tape, Tensor
from probes.placement.models.families import from_config

ROWS, WIDTH = 256, 512
QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "vocab_size": 4000,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 256,
    "n_layer": 3,
    "n_head": 8,
    "vocab_size": 4000,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 4000,
}
OTHERS = {
    "llama": QWEN,
    "mistral": QWEN,
    "qwen3": {**QWEN, "head_dim": 32},
    "phi3": {**QWEN, "pad_token_id": 0},
}
TRAIN = Question("m", "training", batch=8, tokens=128, precision="fp32")


def saved_bytes(run: Callable[[], torch.Tensor], besides: list[torch.Tensor]) -> int:
    """What autograd keeps of a computation, each storage once, without the weights."""
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    weights = {tensor.untyped_storage().data_ptr() for tensor in besides}
    total = sum(storage.nbytes() for at, storage in found.items() if at not in weights)
    del result
    return total


def on_tape(run: Callable[[Tape, Tensor, Tensor], Tensor]) -> int:
    """What a tape keeps of the same: all that is alive, and of the result what autograd saves."""
    tape = Tape(training=True)
    weight = tape.weight(WIDTH * WIDTH, 4, trained=True)
    x = tape.fresh(ROWS * WIDTH, 4)
    result = run(tape, weight, x)
    del x
    kept = tape.ledger.alive["activations"]
    source = result.source
    assert source is not None
    saves_result = any(t.storage is result.storage for t in source.saved)  # type: ignore[union-attr]
    return kept - (0 if saves_result else result.n_bytes)


def one(tape: Tape, weight: Tensor, x: Tensor) -> Tensor:
    return tape.linear(x, weight, None, outputs=WIDTH, rows=ROWS)


def silu(tape: Tape, weight: Tensor, x: Tensor) -> Tensor:
    y = one(tape, weight, x)
    return tape.op(y.numbers, y.width, (y,), saved=(y,))


def gated(tape: Tape, weight: Tensor, x: Tensor) -> Tensor:
    return one(tape, weight, tape.mul(silu(tape, weight, x), one(tape, weight, x)))


MODULES = {
    "linear": (one, lambda w, x: x @ w),
    "silu": (silu, lambda w, x: torch.nn.functional.silu(x @ w)),
    "gated": (gated, lambda w, x: (torch.nn.functional.silu(x @ w) * (x @ w)) @ w),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_tape_keeps_is_what_autograd_saves(name: str) -> None:
    rules, real = MODULES[name]
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    assert on_tape(rules) == saved_bytes(lambda: real(weight, x), [weight])


def test_a_checkpointed_part_keeps_its_input_on_the_tape_and_in_torch() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    given = x @ weight

    def run(t: torch.Tensor) -> torch.Tensor:
        return MODULES["gated"][1](weight, t)

    real = saved_bytes(lambda: checkpoint(run, given, use_reentrant=False), [weight])
    assert real <= given.untyped_storage().nbytes()
    tape = Tape(training=True)
    held = tape.weight(WIDTH * WIDTH, 4, trained=True)
    start = one(tape, held, tape.fresh(ROWS * WIDTH, 4))
    before = tape.ledger.alive["activations"]
    last = tape.checkpoint(lambda t: gated(tape, held, t), start)
    assert tape.ledger.alive["activations"] - before == last.n_bytes


CASES = {
    "adamw": TRAIN,
    "sgd": replace(TRAIN, optimizer="sgd"),
    "amp": replace(TRAIN, precision="amp-bf16"),
    "bf16": replace(TRAIN, precision="bf16"),
    "checkpointing": replace(TRAIN, checkpointing=True),
    "accumulated": replace(TRAIN, accumulate=2),
    "inference": Question("m", batch=8, tokens=128, precision="fp32"),
}


def compared(config: dict[str, object], asked: Question) -> float:
    torch.set_num_threads(1)
    rules = forecast(from_config(config, name="m", where="m"), asked, CPU).taken.total
    return rules / trial.trace(config, asked, "cpu").total - 1


@pytest.mark.parametrize("case", CASES)
def test_rules_agree_with_a_trace_of_a_whole_step(case: str) -> None:
    assert abs(compared(QWEN, CASES[case])) < 0.05


@pytest.mark.parametrize("config", [GPT2, BERT], ids=["gpt2", "bert"])
@pytest.mark.parametrize("case", ["adamw", "amp", "inference"])
def test_rules_agree_with_a_trace_for_other_families(config: dict[str, object], case: str) -> None:
    assert abs(compared(config, CASES[case])) < 0.05


@pytest.mark.parametrize("family", OTHERS)
def test_rules_agree_with_a_trace_for_relatives_of_llama(family: str) -> None:
    assert abs(compared({**OTHERS[family], "model_type": family}, CASES["bf16"])) < 0.05


@pytest.mark.filterwarnings("ignore:`.*checkpointing.*deprecated:FutureWarning")  # peft asks by the old name
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_by_peft_take_what_the_rules_say(checkpointing: bool) -> None:
    pytest.importorskip("peft", reason="pip install peft")
    asked = replace(TRAIN, lora_rank=16, precision="bf16", checkpointing=checkpointing)
    assert abs(compared(QWEN, asked)) < 0.05
