"""A pass on tensors without numbers: what is counted, what stays as it was, what a plan makes of it."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from probes.core.errors import PlacementError
from probes.placement import plan
from probes.placement.allocator import peak_of
from probes.placement.models import tracing
from probes.placement.planner.api import resolve_model
from probes.placement.planner.experts import routed_rows
from probes.placement.trace import trace_pass, trace_real_pass
from probes.placement.types import Workload

MIB = 2**20


class Net(nn.Module):
    """A convolution, a normalisation, attention and a table that is read without being called."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 10)
        self.table = nn.Embedding(10, 10)

    def forward(self, image):
        x = self.norm(self.stem(image)).flatten(2).transpose(1, 2)
        q, k, v = self.mix(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.out(x).mean(1) @ self.table.weight


def counted_by_torch(module, *args, **kwargs):
    """Multiplications and additions by torch's own counter, which composes attention of products."""
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), counter, torch.no_grad():
        module.to("meta")(*args, **kwargs)
    return counter.get_total_flops()


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_trace_counts_what_torchs_own_counter_counts(place):
    net, image = Net().to(place), torch.empty(2, 3, 16, 16, device="meta")
    trace = trace_pass(net, (image,))
    assert trace.flops == counted_by_torch(net, image)
    assert [o.kind for o in trace.operations].count("convolution") == 1
    assert trace.calls["stem"] == 1
    assert list(trace.calls)[:3] == ["", "stem", "norm"]


def test_a_convolution_counts_every_position_of_its_output():
    trace = trace_pass(nn.Conv2d(8, 16, 3, padding=1), (torch.empty(2, 8, 20, 30),))
    (only,) = [operation for operation in trace.operations if operation.kind == "convolution"]
    assert (only.rows, only.outputs, only.inputs) == (2 * 20 * 30, 16, 8 * 9)
    assert only.weight_bytes == 4 * (16 * 8 * 9 + 16)


def test_a_loop_over_time_is_as_many_products_as_it_has_steps_layer_by_layer():
    def traced(steps):
        trace = trace_pass(nn.LSTM(16, 32, 2), (torch.empty(steps, 3, 16),))
        return [operation for operation in trace.operations if operation.kind == "recurrent"]

    assert [loop.steps for loop in traced(7)] == [7, 7]
    assert [loop.flops for loop in traced(14)] == [2 * loop.flops for loop in traced(7)]
    assert [loop.flops for loop in traced(7)] == [7 * 2 * 3 * 4 * 32 * (n + 32) for n in (16, 32)]


def test_a_traced_module_is_as_it_was_and_computes_the_same():
    net, image = Net().eval(), torch.randn(2, 3, 16, 16)
    before, named = net(image), dict(net.named_parameters())
    attributes = {name: dict(vars(part)) for name, part in net.named_modules()}
    trace_pass(net, (image,))
    assert torch.equal(net(image), before)
    assert all(named[name] is parameter for name, parameter in net.named_parameters())
    assert {name: dict(vars(part)) for name, part in net.named_modules()} == attributes


class Chooses(nn.Module):
    """What it computes depends on a value."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.large(x) if bool(x.sum() > 0) else self.small(x)


def test_a_choice_by_value_is_traced_by_a_real_pass_or_said():
    chooses, given = Chooses(), torch.ones(2, 8)
    with pytest.raises(PlacementError, match="can't be traced: DataDependent"):
        trace_pass(chooses, (given,))
    assert list(trace_real_pass(chooses, (given,)).calls) == ["", "large"]
    assert "a real pass" in " ".join(planned(chooses, given).notes)
    said = planned(chooses.to("meta"), torch.ones(2, 8, device="meta"))
    assert said.rests_on == "guesses"
    assert "nothing was traced" in " ".join(said.notes)


def planned(module, inputs, **options):
    return plan(module, vram=64 * MIB + 128 * MIB, machine="h200", inputs=inputs, **options)


def test_a_plan_says_what_it_rests_on_and_is_surer_of_what_was_traced():
    net, image = Net(), torch.empty(2, 3, 16, 16, device="meta")
    traced, guessed = planned(net, image), planned(net, None)
    assert (traced.rests_on, guessed.rests_on) == ("trace", "guesses")

    def width(made):
        return (made.time.high_s - made.time.low_s) / made.time.middle_s

    assert width(traced) < width(guessed)


def test_a_weight_read_outside_its_blocks_calls_cannot_move():
    made = resolve_model(Net(), Workload(), torch.empty(2, 3, 16, 16))
    assert {block.name for block in made.blocks if block.anytime} == {"table"}
    assert "table" in " ".join(made.notes)


def test_blocks_come_in_the_order_of_their_calls():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))

    made = resolve_model(Reversed(), Workload(), torch.empty(2, 4))
    assert [block.name for block in made.blocks] == ["first", "last"]


def test_activations_grow_with_an_image_and_not_with_the_kernel():
    def activations(side):
        return planned(Net(), torch.empty(1, 3, side, side, device="meta")).vram.activations

    assert activations(256) > 10 * activations(64) > 0


def test_the_allocators_segments_are_those_of_its_rules():
    assert peak_of([(1, 100)]) == (512, 2 * MIB)
    assert peak_of([(1, 3 * MIB), (2, 5 * MIB)]) == (8 * MIB, 20 * MIB)
    assert peak_of([(1, 11 * MIB)]) == (11 * MIB, 12 * MIB)
    # a segment that is free as a whole stays: to return it and take another costs each pass a wait
    assert peak_of([(1, 100 * MIB), (1, 0), (2, 110 * MIB)]) == (110 * MIB, 210 * MIB)
    # what is left of a segment is used, and neighbours that are free are one block again
    taken = [(1, 4 * MIB), (2, 4 * MIB), (3, 4 * MIB), (1, 0), (2, 0), (4, 8 * MIB)]
    assert peak_of(taken) == (12 * MIB, 20 * MIB)


@pytest.mark.parametrize("kind", ["t5", "vit", "mamba", "whisper", "convnext", "mixtral", "deberta-v2"])
def test_an_architecture_without_a_rule_is_traced_from_its_config(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SMALL[kind])
    named = {"mixtral": "MixtralForCausalLM", "t5": "T5ForConditionalGeneration"}.get(kind)
    values = {**config.to_dict(), "architectures": [named] if named else None}
    values["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    made = plan(tmp_path / "config.json", vram=2**31, machine="h200", batch=2, tokens=8)
    assert made.rests_on == "trace", made.notes
    assert made.vram.activations > 0
    assert made.time.middle_s > 0


WIDE = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL = {
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    "vit": {**WIDE, "image_size": 32, "patch_size": 8},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96},
    "whisper": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 96, "num_mel_bins": 8,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "max_source_positions": 50, "pad_token_id": 0,
    },
    "convnext": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128], "image_size": 32},
    "mixtral": {**WIDE, "num_key_value_heads": 2, "vocab_size": 96},
    "deberta-v2": {**WIDE, "vocab_size": 96, "pad_token_id": 0},
}  # fmt: skip


def test_a_mixtures_experts_are_planned_one_by_one_with_the_products_that_their_rows_choose(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("mixtral", **{**SMALL["mixtral"], "num_local_experts": 16})
    values = {**config.to_dict(), "architectures": ["MixtralForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    described = resolve_model(str(tmp_path / "config.json"), Workload(1, 4))
    blocks = {block.name: block for block in described.with_experts_apart().blocks}
    experts, rest = blocks["model.layers.1.mlp.experts"], blocks["model.layers.1"]
    products = [operation for operation in experts.work if operation.kind == "product"]
    assert [o.groups for o in products] == [pytest.approx(16 * (1 - (1 - 2 / 16) ** 4))] * 2
    assert sum(o.flops for o in products) == 2 * 4 * 2 * 3 * 64 * 128
    assert all(not operation.at.startswith(experts.name) for operation in rest.work)
    assert routed_rows(experts, 1) == 4


def test_layers_of_a_traced_recurrent_module_are_planned_with_their_shares():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = nn.LSTM(64, 128, 3), nn.Linear(128, 10)

        def forward(self, x):
            return self.out(self.lstm(x)[0])

    described = resolve_model(Tagger(), Workload(), torch.empty(20, 4, 64, device="meta"))
    parts = described.divided().blocks
    assert [part.name for part in parts] == ["lstm.l0", "lstm.l1", "lstm.l2", "out"]
    loops = [o for part in parts for o in part.work if o.kind == "recurrent"]
    assert [o.weight_bytes for o in loops] == [part.weight_bytes for part in parts[:3]]


def test_a_known_name_is_planned_without_torch_and_a_module_without_inputs_without_a_trace(monkeypatch):
    script = "import sys; from probes.placement import plan; " + (
        "p = plan('qwen2.5-3b', vram=4 * 2**30, machine='wx4100'); print(p.rests_on, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["rules", "False"]
    monkeypatch.setattr(tracing, "trace_pass", None)  # as the service plans when it starts
    assert planned(Net(), None).rests_on == "guesses"
