"""Blocks that are large for the budget are divided, where their parts are called by themselves: same bits."""

import re
from dataclasses import replace

import pytest
import torch
from late_lanes import LateLanes
from random_models import TIERS, plan_of
from safetensors.torch import save_file
from torch import nn

from probes.core.errors import PlanImpossible
from probes.placement import load, place, plan
from probes.placement.models.modules import describe_module, find_blocks
from probes.placement.planner.plan import LARGEST
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import CardsPlan, PrefetchPool

torch.set_num_threads(1)
MIB = 1 << 20


def t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=50, d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=3, decoder_start_token_id=0
    )
    ids = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    named = {"input_ids": ids, "decoder_input_ids": ids[:, :4], "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), named


def whisper():
    transformers = pytest.importorskip("transformers")
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDE.items()}
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=64,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **sides,
    )
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    named = {"input_features": sound, "decoder_input_ids": torch.tensor([[1, 5, 6]] * 2), "use_cache": False}
    return transformers.WhisperForConditionalGeneration(config), named


SIDE = {"layers": 3, "attention_heads": 4, "ffn_dim": 128}


class Scaled(nn.Module):
    """A layer with a parameter of its own beside modules that it calls, in a list in a list."""

    def __init__(self, width=32):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.inner = nn.ModuleList([nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])])

    def forward(self, x):
        for row in self.inner:
            for layer in row:
                x = x + torch.relu(layer(x)) * self.scale
        return x


class Unet(nn.Module):
    """Down and up again, with what was kept on the way."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(
            nn.ModuleDict(
                {"convolution": nn.Conv2d(4 * i, 4 * i + 4, 3, 2, 1), "norm": nn.GroupNorm(2, 4 * i + 4)}
            )
            for i in (1, 2)
        )
        self.middle = nn.Sequential(nn.Conv2d(12, 12, 3, 1, 1), nn.SiLU(), Scaled(4))
        self.up = nn.ModuleList(nn.ConvTranspose2d(8 * i, 4 * i - 4, 4, 2, 1) for i in (3, 2))

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block["norm"](block["convolution"](x))
            kept.append(x)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat((x, kept.pop()), 1))
        return x


class Recurrent(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.rnn, self.head = make(), nn.Linear(64, 64)

    def forward(self, x, state=None):
        output, state = self.rnn(x, state)
        return self.head(output), state


def recurrent(**options):
    return Recurrent(lambda: nn.LSTM(64, 64, 4, batch_first=True, **options))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


CASES = {
    "T5": t5,
    "Whisper": whisper,
    "nested lists": lambda: (nn.Sequential(Scaled(), Scaled()), {"input": numbers(3, 32)}),
    "UNet": lambda: (Unet(), {"x": numbers(2, 4, 16, 16)}),
    "LSTM": lambda: (recurrent(), {"x": numbers(2, 5, 64)}),
    "LSTM both ways": lambda: (
        Recurrent(lambda: nn.LSTM(64, 32, 4, bidirectional=True)),
        {"x": numbers(5, 2, 64), "state": (numbers(8, 2, 32), numbers(8, 2, 32))},
    ),
    "GRU": lambda: (
        Recurrent(lambda: nn.GRU(64, 64, 4)),
        {"x": numbers(5, 2, 64), "state": numbers(4, 2, 64)},
    ),
    "plain recurrence": lambda: (
        Recurrent(lambda: nn.RNN(64, 64, 3, nonlinearity="relu", bias=False)),
        {"x": numbers(5, 64)},
    ),
}


def made(name):
    torch.manual_seed(0)
    model, given = CASES[name]()
    return model.eval().requires_grad_(False), given


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output
    return [tensor for part in values if part is not None for tensor in tensors(part)]


@torch.no_grad()
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_divided_models_have_the_same_bits(name, capture):
    model, given = made(name)
    want = tensors(model(**given))
    names = [block.name for block in describe_module(model).divided().blocks]
    blocks = find_blocks(model, names)
    assert {block.name for block in blocks} == set(names)
    among = ("streamed", "streamed_packed", "packed") if capture else TIERS[1:]
    tiers = {b.name: among[i % len(among)] for i, b in enumerate(blocks) if b.called}
    lanes = LateLanes(len(name))
    handle = place_model(
        model,
        plan_of(model, tiers, PrefetchPool(2, scratches=2), names=names),
        ModuleWeights(),
        lanes,
        work=PackedOperations(reads=lanes.reads),
        capture=capture,
    )
    lanes.engine = handle._engine
    for _ in range(4):
        assert all(map(torch.equal, tensors(model(**given)), want))
        lanes.compute.drain()
    assert (lanes.replayed > 0) == capture
    handle.remove()
    assert all(map(torch.equal, tensors(model(**given)), want))


@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_an_encoder_and_a_decoder_are_layers(name):
    """An encoder was one block, which was read in place: 222 ms were planned, 73 taken, resident 15."""
    blocks = describe_module(made(name)[0]).blocks
    layers = {match[0] for block in blocks if (match := re.match(r".*?\.(block|layers)\.\d+", block.name))}
    assert len(layers) == 6
    assert max(block.weight_bytes for block in blocks) < sum(block.weight_bytes for block in blocks) / 4


@pytest.mark.parametrize("captured", [False, True])
def test_a_recurrent_module_larger_than_its_budget_is_planned_by_layers(captured):
    """60 ms were planned and 27 taken for one block that was larger than the budget."""
    torch.manual_seed(0)
    model = Recurrent(lambda: nn.LSTM(1024, 1024, 4)).eval()
    model.head = nn.Linear(1024, 64)
    model.requires_grad_(False)
    budget = 96 * MIB  # of 128 MiB
    drawn = plan(model, vram=budget, machine="h200", captured=captured, tokens=16)
    assert [block.name for block in drawn.blocks] == [*(f"rnn.l{i}" for i in range(4)), "head"]
    x = torch.randn(3, 2, 1024)
    want = model(x)
    handle = place(model, drawn, device="cpu")
    assert all(map(torch.equal, tensors(model(x)), tensors(want)))
    handle.remove()


def test_a_recurrent_module_is_planned_in_a_third_of_its_bytes_by_what_its_steps_read():
    """1.1 times its bytes were needed, to join all layers; and 7 ms were planned in place, 102 taken."""
    model = Recurrent(lambda: nn.GRU(2048, 2048, 6))
    model.head = nn.Linear(2048, 64)
    model.bfloat16().eval().requires_grad_(False)
    x = torch.zeros(64, 1, 2048, dtype=torch.bfloat16)
    narrow, wide = (plan(model, vram=vram * MIB, machine="h200", inputs={"x": x}) for vram in (120, 200))
    assert {block.tier for block in narrow.blocks} == {"in_place", "resident"}
    states = 6 * 3 * 2048 * 2048 * x.element_size()
    assert narrow.time.middle_s > len(x) * states / 64e9
    assert "in_place" not in {block.tier for block in wide.blocks}


class Attentive(nn.Module):
    """In one block with attention, which reads weights of a module that it doesn't call: it isn't divided."""

    def __init__(self):
        super().__init__()
        self.attention, self.loop = nn.MultiheadAttention(512, 8), nn.LSTM(512, 512, 4)

    def forward(self, x):
        return self.loop(self.attention(x, x, x)[0])[0]


def test_a_recurrent_module_in_an_undivided_block_has_room_for_its_joined_weights():
    given = {"x": torch.zeros(3, 1, 512)}
    whole = plan(Wrapped([Attentive()]), vram=4096 * MIB, machine="h200", inputs=given)
    alone = Recurrent(lambda: nn.LSTM(512, 512, 4))
    alone.head = nn.Linear(512, 64)
    apart = plan(alone, vram=4096 * MIB, machine="h200", inputs=given)
    assert [block.name for block in whole.blocks] == ["other"]
    assert [block.name for block in apart.blocks] == [*(f"rnn.l{n}" for n in range(4)), "head"]
    assert whole.vram.activations - apart.vram.activations > 2 * apart.blocks[0].weight_bytes


@pytest.mark.parametrize("captured", [False, True])
def test_only_blocks_above_their_share_are_divided_in_eager_passes(captured):
    wide = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
    model = nn.ModuleDict(
        {"wide": Wrapped(wide), "small": Wrapped(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))}
    )
    drawn = plan(model, vram=96 * MIB, machine="h200", captured=captured)
    assert {block.name for block in drawn.blocks} >= {"wide.other.first", "wide.other.last"}
    roomy = plan(model, vram=2048 * MIB, machine="h200")
    assert {block.name for block in roomy.blocks} == {"wide", "small"}
    assert all(
        block.weight_bytes <= LARGEST * 512 * MIB
        for block in plan(model, vram=512 * MIB, machine="h200").blocks
    )


class Wrapped(nn.Module):
    """Modules that it calls, in no list."""

    class Other(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.first, self.last = inner[0], inner[-1]

        def forward(self, x):
            return self.last(self.first(x))

    def __init__(self, inner):
        super().__init__()
        self.other = Wrapped.Other(inner)

    def forward(self, x):
        return self.other(x)


def divisible(module):
    (block,) = describe_module(nn.ModuleDict({"one": module, "other": nn.Linear(2, 2)})).blocks[:1]
    return block.divisible


def test_what_reads_weights_of_others_or_shares_them_is_not_divided():
    tied = Wrapped(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert divisible(tied)
    tied.other.last.weight = tied.other.first.weight
    assert not divisible(tied)
    listed = Wrapped(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    listed.other.more = nn.ParameterList([nn.Parameter(torch.ones(8))])
    assert not divisible(listed)  # nobody calls a list of parameters
    own = Wrapped(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    own.scale = nn.Parameter(torch.ones(64))
    assert divisible(own)
    own.table = nn.Parameter(torch.ones(64, 64))  # it would have to stay in VRAM
    assert not divisible(own)

    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)

    assert not divisible(Own(8, 8, 2))
    with pytest.warns(FutureWarning, match="weight_norm"):
        assert not divisible(nn.utils.weight_norm(nn.LSTM(8, 8, 2), "weight_hh_l0"))
    shared = nn.LSTM(8, 8, 2)
    assert divisible(shared)
    shared.weight_hh_l1 = shared.weight_hh_l0  # place() refused what plan() had made of it
    assert not divisible(shared)


class Joining(nn.Module):
    """Joins the weights of two layers, which it doesn't call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(1024, 1024, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(1024)

    def forward(self, x):
        joined = torch.cat([self.first.weight, self.second.weight])
        return self.norm(nn.functional.linear(x, joined)[..., :1024])


def test_a_block_whose_parts_are_read_by_others_is_planned_as_a_whole():
    """Each was planned alone, and brought for each reading: VRAM for two that the plan didn't count."""
    model, given = nn.Sequential(Joining(), Joining()), numbers(2, 1024)
    assert [block.name for block in describe_module(model).divided().blocks][:2] == ["0.first", "0.second"]
    with pytest.raises(PlanImpossible) as refused:
        plan(model, vram=1, machine="nvidia-h100", inputs=given)
    least = int(re.search(r"--vram (\d+)MiB", str(refused.value))[1]) << 20
    planned = plan(model, vram=least, machine="nvidia-h100", inputs=given)
    assert [block.name for block in planned.blocks] == ["0", "1"]


def by_layers(model, tier="streamed", **options):
    names = [block.name for block in describe_module(model).divided().blocks]
    tiers = {name: tier for name in names if name != "head"}
    return place_model(model, plan_of(model, tiers, names=names), ModuleWeights(), Streams(), **options)


def refusal(model, *given):
    """torch's own words."""
    with pytest.raises(RuntimeError) as refused:
        model(*given)
    return str(refused.value)


@torch.no_grad()
def test_a_divided_lstm_drops_what_the_whole_drops_and_refuses_what_it_refuses():
    torch.manual_seed(0)
    model, x = recurrent(dropout=0.5).requires_grad_(False), numbers(2, 5, 64)
    torch.manual_seed(1)
    want = model.train()(x)
    wrong = ((x, (torch.zeros(5, 2, 64), torch.zeros(5, 2, 64))), (x[..., :3],))
    refusals = [refusal(model, *given) for given in wrong]
    handle = by_layers(model)
    torch.manual_seed(1)
    assert all(map(torch.equal, tensors(model(x)), tensors(want)))
    assert [refusal(model, *given) for given in wrong] == refusals
    packed = nn.utils.rnn.pack_padded_sequence(x, [2, 5], batch_first=True, enforce_sorted=False)
    got = model.eval().rnn(packed)
    handle.remove()
    assert all(map(torch.equal, tensors(got), tensors(model.rnn(packed))))
    assert model.rnn._flat_weights[3] is model.rnn.bias_hh_l0


@torch.no_grad()
@pytest.mark.parametrize("tier", ["resident", "streamed", "packed", "disk"])
@pytest.mark.parametrize("layers", [True, False])
def test_a_recurrent_model_is_loaded_by_layers(tmp_path, tier, layers):
    torch.manual_seed(0)
    model, x = recurrent().eval().requires_grad_(False), numbers(2, 5, 64)
    want = tensors(model(x))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    description = describe_module(model)
    names = [block.name for block in (description.divided() if layers else description).blocks]
    drawn = plan_of(model, {name: tier for name in names if name != "head"}, names=names)
    loaded = load(lambda: recurrent(), tmp_path, drawn, device="cpu", cache=False)  # noqa: PLW0108
    for _ in range(2):
        assert all(map(torch.equal, tensors(loaded(x)), want))
    loaded.placement.remove()
    assert all(map(torch.equal, tensors(loaded(x)), want))


@torch.no_grad()
def test_layers_of_one_module_are_placed_over_several_cards():
    model, given = made("LSTM both ways")
    want = tensors(model(**given))
    names = [block.name for block in describe_module(model).divided().blocks]
    tiers = dict(zip(names, ("streamed", "packed", "resident", "streamed", "streamed"), strict=True))
    whole = plan_of(model, tiers, names=names)
    cards = (replace(whole, blocks=whole.blocks[:2]), replace(whole, blocks=whole.blocks[2:]))
    for _ in range(2):
        handle = place(model, CardsPlan(cards, whole.time, 0.0, 0), device="cpu")
        for _ in range(3):
            assert all(map(torch.equal, tensors(model(**given)), want))
        handle.remove()
        assert not any("forward" in module.__dict__ for module in model.modules())
