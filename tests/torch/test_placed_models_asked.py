"""Placed models that are asked, toggled, forked and written to, by threads, libraries and users."""

import os
import signal
import threading
from collections import UserDict, deque
from types import SimpleNamespace

import pytest
import torch
from kinds_of_libraries import LORA, adapted, vae
from kinds_of_modules import Model, Reading, each, given, padding, scripted
from late_lanes import LateLanes
from random_models import TIERS, plan_of
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import rnn

from probes.core.errors import PlacementError
from probes.placement import load, place
from probes.placement.models.modules import describe_module, find_blocks
from probes.placement.runtime.hooks import RoundTrip, map_tensors
from probes.placement.runtime.offloaded import OffloadedParameter, PackedOperations, WeightAccess
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
MOVING = ("streamed", "packed", "streamed_packed")
X = torch.ones(3, 16)


def made(make, seed=0):
    torch.manual_seed(seed)
    return make().eval()


def placed(model, tier, **options):
    names = [block.name for block in find_blocks(model) if block.called]
    return place(
        model,
        plan_of(model, dict.fromkeys(names, tier), PrefetchPool(2, scratches=2), **options),
        device="cpu",
    )


@torch.no_grad()
@pytest.mark.parametrize("ask", [torch.utils.dlpack.to_dlpack, lambda weight: weight.data_ptr()])
def test_a_weight_outside_its_call_has_no_memory_that_answers(ask):
    model = made(lambda: Reading(lambda *_: None))
    placed(model, "streamed")
    with pytest.raises((PlacementError, RuntimeError)):  # ours, or torch's
        ask(model.first.weight)


@torch.no_grad()
def test_a_scripted_function_gets_the_values_of_weights_outside_their_calls():
    model = made(lambda: Reading(lambda *_: None))
    want = scripted(X, model.first.weight, model.second.weight, model.second.bias)
    placed(model, "streamed")
    for _ in range(4):  # the function is optimised meanwhile
        assert torch.equal(scripted(X, model.first.weight, model.second.weight, model.second.bias), want)


@torch.no_grad()
def test_an_encoder_with_padding_takes_the_same_way_when_its_layers_stream():
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 4).eval()
    x, mask = given(2, 5, 128), padding(2, 5)
    want = model(x, src_key_padding_mask=mask)
    assert not want[mask].any()
    handle = placed(model, "streamed")
    assert torch.equal(model(x, src_key_padding_mask=mask), want)
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("tier", TIERS)
def test_adapters_that_were_switched_off_are_on_again(tier):
    model, own = made(adapted(LORA)), made(adapted(LORA))
    handle = placed(model, tier)
    for one in (model, own):
        with one.disable_adapter():
            one(X)
    assert torch.equal(model(X), own(X))
    handle.remove()
    assert torch.equal(model(X), own(X))
    trained = [[p.requires_grad for p in one.parameters()] for one in (model, own)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("wanted", [False, True])
def test_gradients_that_are_asked_for_count_after_remove(wanted):
    model = made(lambda: Model(each)).requires_grad_(not wanted)
    handle = placed(model, "streamed")
    for one in model.parameters():
        one.requires_grad = wanted
    handle.remove()
    moved = [one for name, one in model.named_parameters() if "layers" in name]
    assert all(one.requires_grad is wanted for one in moved)


def test_gradients_asked_for_since_are_refused_in_training():
    model = made(lambda: Model(each)).requires_grad_(False)
    placed(model, "streamed")
    model.requires_grad_(True)
    with pytest.raises(PlacementError, match="can't be trained"):
        model.train()(X)


def test_adapters_added_to_a_placed_block_are_not_trained_on_weights_that_are_gone():
    model = made(lambda: Model(each)).requires_grad_(False)
    placed(model, "streamed")
    model.layers[1].up.register_parameter("extra", nn.Parameter(torch.ones(())))
    model.layers[1].up.register_forward_hook(lambda module, _, output: output * module.extra)
    with pytest.raises(PlacementError, match="can't be trained"):
        model(X)
    with torch.no_grad():
        model(X)


@pytest.mark.parametrize("tier", TIERS)
def test_a_placed_parameter_wants_no_gradients_whatever_its_tier(tier):
    model = made(lambda: Model(each))
    placed(model, tier)
    assert not any(one.requires_grad for name, one in model.named_parameters() if "layers" in name)


@torch.no_grad()
@pytest.mark.parametrize("tier", MOVING)
def test_data_that_a_forward_exchanges_is_the_models_after_remove(tier):
    class Exchanging(nn.Linear):
        def forward(self, given):
            found = super().forward(given)
            self.weight.data = self.weight.data * 2
            return found

    def two():
        return nn.Sequential(Exchanging(64, 64), nn.Linear(64, 64))

    model, own, x = made(two), made(two), torch.ones(2, 64)
    handle = placed(model, tier)
    for _ in range(3):
        assert torch.equal(model(x), own(x))
    handle.remove()
    assert torch.equal(model[0].weight, own[0].weight)
    assert torch.equal(model(x), own(x))


def test_a_thread_that_reads_a_weight_is_not_waited_for_by_one_that_waits_for_it():
    def read(model, given):
        found = []
        thread = threading.Thread(target=lambda: found.append(model.first.weight * 2), daemon=True)
        thread.start()
        thread.join(60)
        assert found, "the thread waits for the pass, and the pass for the thread"
        return found[0]

    model = made(lambda: Reading(read))
    with torch.no_grad():
        want = model(X)
        placed(model, "streamed")
        assert torch.equal(model(X)[1], want[1])


@torch.no_grad()
@pytest.mark.parametrize("becomes", ["float16", "float32"])
def test_other_methods_than_forward_convert_what_they_are_given(becomes):
    model, own = made(vae).bfloat16(), made(vae).bfloat16().to(getattr(torch, becomes))
    latents = given(1, 4, 4, 4).bfloat16()
    placed(model, "streamed", becomes=becomes)
    assert torch.equal(model.decode(latents).sample, own.decode(latents.to(own.dtype)).sample)


@pytest.mark.parametrize("strided", [torch.ones(8, 32)[:, ::2], torch.ones(1, 16).expand(8, 16)])
def test_a_parameter_with_gaps_or_repetitions_is_refused_before_anything_changes(strided):
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).requires_grad_(False)
    model[0].weight = nn.Parameter(strided, requires_grad=False)
    before = model[0].weight.stride()
    with pytest.raises(PlacementError, match=r"0\.weight has gaps or repetitions"):
        find_blocks(model)
    assert model[0].weight.stride() == before
    model.get_parameter("0.weight").data = model.get_parameter(
        "0.weight"
    ).data.contiguous()  # as the hint says
    find_blocks(model)


def chain():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def test_a_forked_child_reads_from_disk_with_threads_of_its_own(tmp_path):
    model = made(chain)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.inference_mode():
        want = model(X)
        tiers = dict.fromkeys("0123", "disk")
        loaded = load(chain, tmp_path, plan_of(model, tiers, PrefetchPool(2)), device="cpu", cache=False)
        assert torch.equal(loaded(X), want)
        child = os.fork()
        if not child:  # a hang here is ended by the alarm's signal
            signal.alarm(60)
            os._exit(0 if torch.equal(loaded(X), want) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.equal(loaded(X), want)
    loaded.placement.remove()


@torch.no_grad()
def test_a_detached_weight_is_where_its_model_computes():
    model = made(chain)
    want = {name: one.clone() for name, one in model.state_dict().items()}
    placed(model, "streamed")
    weight = model[0].weight
    for one in (weight.detach(), weight.data):
        assert one.device == weight.device
        assert not isinstance(one, nn.Parameter)
        assert torch.equal(one * 1, want["0.weight"])
    saved = model.state_dict()
    assert all(type(one) is torch.Tensor and torch.equal(one, want[name]) for name, one in saved.items())


def test_a_detached_weight_of_another_device_stays_there_and_only_its_copy_on_the_host_comes_home():
    """The device `meta` stands in for a GPU."""
    values, elsewhere = torch.ones(2, 3), torch.device("meta")

    def fetch():
        raise AssertionError("the whole weight would be brought to the GPU first")

    outline = torch.empty(2, 3, device="meta")
    away = WeightAccess("weight", outline, elsewhere, fetch, values.clone, wants=bool, attributes={})
    weight = OffloadedParameter.of(away)
    assert weight.detach().device == weight.data.device == elsewhere
    assert torch.equal(weight.detach().cpu(), values)
    assert torch.equal(weight.to("cpu", torch.float64), values.double())


def test_attributes_of_parameters_stay_and_are_those_of_the_model():
    model = made(chain)
    model[0].weight._is_hf_initialized = True
    handle = placed(model, "streamed")
    assert model[0].weight._is_hf_initialized
    model[1].weight.tag = "new"
    handle.remove()
    assert model[0].weight._is_hf_initialized
    assert model[1].weight.tag == "new"


@pytest.mark.parametrize(
    "container", [dict, UserDict, lambda given: deque(given.values()), lambda given: list(given.values())]
)
def test_what_is_written_elsewhere_into_a_container_is_the_callers(container):
    caller, one = container({"x": X, "y": X}), X * 3
    trip = RoundTrip(torch.clone, torch.clone)
    there = trip.go((caller, X))
    key = "x" if isinstance(caller, dict | UserDict) else 0
    assert there[0] is not caller
    assert there[0][key] is there[1]  # one thing goes once
    there[0][key] = one
    there[1].add_(1)
    found = trip.come([there[0], there[1]])
    assert found[0] is caller
    assert torch.equal(caller[key], one)
    assert torch.equal(X, torch.full((3, 16), 2.0))
    X.fill_(1.0)


def test_what_nothing_changes_in_is_the_same_object():
    thing = {"a": [X, (X, None)], "b": deque([1])}
    assert map_tensors(thing, lambda tensor: tensor) is thing


def test_a_pass_that_is_recorded_knows_which_inputs_are_one():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, query, key):
            return self.linear(query) if query is key else -self.linear(key)

    model, other = made(Attending), X * 2
    with torch.no_grad():
        same, different = model(X, X), model(X, other)
        lanes = LateLanes(0)
        tiers = {block.name: "streamed" for block in find_blocks(model)}
        work = PackedOperations(reads=lanes.reads)
        handle = place_model(model, plan_of(model, tiers), ModuleWeights(), lanes, capture=True, work=work)
        lanes.engine = handle._engine
        for _ in range(5):
            assert torch.equal(model(X, X), same)
            assert torch.equal(model(X, other), different)
        assert handle.recorder.count == 2


class Table(nn.Module):
    """A table large enough to be packed, of which it returns a part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, given):
        return self.weight[:3], given @ self.weight


@torch.no_grad()
@pytest.mark.parametrize("tier", ["packed", "streamed_packed"])
def test_a_packed_block_that_returns_its_weight_returns_a_copy(tier):
    model, x = nn.ModuleList(Table() for _ in range(3)).eval(), torch.ones(2, 64)
    want = [layer.weight[:3].clone() for layer in model]
    names = [block.name for block in find_blocks(model)]
    handle = place(
        model, plan_of(model, dict.fromkeys(names, tier), PrefetchPool(1, scratches=1)), device="cpu"
    )
    assert all(one.decode_buffer is not None for one in handle._engine.moving)
    found = [layer(x)[0] for layer in model]  # each in the scratch buffer of the one before
    assert all(map(torch.equal, found, want))


class ElsewhereLanes(Streams):
    """Of a device that isn't the CPU: tensors there have no values, but say where they are."""

    def __init__(self):
        super().__init__()
        self.device = torch.device("meta")


@torch.no_grad()
def test_a_weight_of_a_block_on_the_cpu_is_read_on_the_device_outside_its_call():
    seen = []  # in its call
    model = made(lambda: Reading(lambda *_: None))
    forward = model.first.forward
    model.first.forward = lambda x: (seen.append(model.first.weight.device.type), forward(x))[1]
    names = [block.name for block in find_blocks(model)]
    plan = plan_of(model, dict.fromkeys(names, "cpu"), PrefetchPool(1))
    weights = list(model.parameters())
    handle = place_model(model, plan, ModuleWeights(), ElsewhereLanes())
    assert model.first(X).device.type == "meta"
    assert seen == ["cpu"]
    assert {one.device.type for one in model.parameters()} == {"meta"}
    assert {one.device.type for one in model.state_dict().values()} == {"cpu"}
    handle.remove()
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))


@torch.no_grad()
def test_a_block_on_the_cpu_has_its_weights_in_its_calls_and_not_after_one_that_fails():
    model = made(lambda: Model(each))
    placed(model, "cpu")
    want, found = model(X), []

    def look(module, *_):
        found.append(type(module.up.weight) is nn.Parameter)
        raise KeyError

    hook = model.layers[1].down.register_forward_hook(lambda *_: look(model.layers[1]))
    with pytest.raises(KeyError):
        model(X)
    hook.remove()
    assert found == [True]
    assert {type(one) for layer in model.layers for one in layer.parameters()} == {OffloadedParameter}
    assert torch.equal(model(X), want)


@torch.no_grad()
@pytest.mark.parametrize("tier", ["cpu", "streamed"])
def test_a_packed_sequences_batch_sizes_stay_where_they_are(tier):
    model = made(lambda: nn.Sequential(nn.LSTM(8, 12), nn.LSTM(8, 12)))[0]
    sequence = rnn.pack_padded_sequence(torch.randn(5, 3, 8), torch.tensor([5, 3, 2]))
    gone = RoundTrip(lambda one: one.to("meta"), lambda one: one.to("meta")).go((sequence,))[0]
    assert gone.data.is_meta
    assert gone.batch_sizes is sequence.batch_sizes
    want = model(sequence)[0].data
    placed(model, tier)
    assert torch.equal(model(sequence)[0].data, want)


@torch.no_grad()
@pytest.mark.parametrize("tier", [*MOVING, "cpu"])
def test_a_placed_lstm_never_joins_its_weights_elsewhere_and_gets_them_back(tier, monkeypatch):
    joined = []

    def join(module):
        joined.append(module)

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", join)
    model = made(lambda: nn.ModuleList(nn.LSTM(8, 12) for _ in range(3)))
    weights = [list(layer.parameters()) for layer in model]
    x = torch.ones(2, 1, 8)
    want, _ = [layer(x) for layer in model], joined.clear()
    handle = placed(model, tier)
    for _ in range(2):
        assert all(torch.equal(layer(x)[0], one[0]) for layer, one in zip(model, want, strict=True))
    assert not joined
    handle.remove()
    for layer, own in zip(model, weights, strict=True):
        assert all(one is other for one, other in zip(layer._flat_weights, own, strict=True))


def test_an_lstm_without_biases_joins_its_weights_and_is_not_recorded(monkeypatch):
    handle = placed(made(lambda: nn.ModuleList(nn.LSTM(8, 12, bias=False) for _ in range(3))), "streamed")
    assert all("flatten_parameters" not in layer.__dict__ for layer in handle.model)
    monkeypatch.setattr(handle._builder, "streams", SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(PlacementError, match="joins weights of a recurrent module"):
        handle._builder.require_capturable("")
    monkeypatch.undo()
    handle.remove()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_block_that_writes_to_its_weight_stays_resident_or_is_refused(kind):
    model = made(lambda: nn.Sequential(kind(512, 64, max_norm=1.0), nn.Linear(64, 512), nn.Linear(512, 64)))
    assert [block.anytime for block in describe_module(model).blocks] == [True, False, False]
    for tier in ("streamed", "cpu"):
        with pytest.raises(PlacementError, match=r"calls of 0 write to 0\.weight"):
            placed(model, tier)
    model[0].max_norm = None
    placed(model, "streamed")


@torch.no_grad()
def test_adapters_are_not_merged_into_some_of_a_placed_models_layers():
    model = made(adapted(LORA))
    names = [block.name for block in find_blocks(model) if block.called]
    tiers = {name: "resident" if number < len(names) - 1 else "streamed" for number, name in enumerate(names)}
    before = {name: one.clone() for name, one in model.state_dict().items()}
    handle = place(model, plan_of(model, tiers, PrefetchPool(2)), device="cpu")
    for change in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(PlacementError, match="adapters that are merged"):
            change()
    handle.remove()
    after = model.state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    model.merge_adapter()
