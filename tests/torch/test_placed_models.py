"""Placed models: what users do with a module gives the same as before, or is refused with a clear message."""

import copy
import pickle
import threading
from collections import deque
from dataclasses import dataclass, replace

import pytest
import torch
from late_lanes import LateLanes
from random_models import TIERS, plan_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from probes.core.errors import PlacementError
from probes.placement.models.modules import find_blocks
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.call_order import Turns
from probes.placement.runtime.capture import Recorder, call_key
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place, place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
MOVING = ("packed", "streamed_packed", "streamed")


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.linear(x)) + x


class Model(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def placed(model, tier, **options):
    blocks = [block.name for block in find_blocks(model) if block.called]
    tiers = {name: tier if tier != "all" else TIERS[i % len(TIERS)] for i, name in enumerate(blocks)}
    return place(model.eval(), plan_of(model, tiers, PrefetchPool(2, scratches=2)), **options)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def x():
    return torch.randn(2, 64)


@torch.no_grad()
@pytest.mark.parametrize("tier", [*TIERS, "all"])
def test_remove_gives_back_the_same_parameters_buffers_and_forwards(model, x, tier):
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    strides = [p.stride() for p in model.parameters()]
    want = model(x)
    handle = placed(model, tier)
    assert torch.equal(model(x), want)
    handle.remove()
    handle.remove()
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor is before[name][0]
        expected = (
            before[name][1] + 2 if "calls" in name else before[name][1]
        )  # buffers keep what passes wrote
        assert torch.equal(tensor, expected)
    assert [p.stride() for p in model.parameters()] == strides
    assert all(p.requires_grad for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


class ThinConvolution(nn.Module):
    """Weights of one input channel: only the stride of that dimension tells channels_last from others."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x)


@torch.no_grad()
@pytest.mark.parametrize("tier", TIERS)
def test_a_dimension_of_size_one_keeps_its_stride(tier):
    torch.manual_seed(0)
    model, x = ThinConvolution().eval(), torch.randn(4, 1, 8, 8)
    stride, want = model.conv.weight.stride(), model(x)
    handle = placed(model, tier)
    assert torch.equal(model(x), want)
    assert model.conv.weight.stride() == stride
    handle.remove()
    assert model.conv.weight.stride() == stride
    assert torch.equal(model(x), want)


class ReadByStride(nn.Module):
    """Reads parts of other blocks' weights where their strides say that they are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.second = nn.Linear(32, 64)
        self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())

    def forward(self, x):
        weights = [self.first.weight, self.second.weight]
        tiles = [w.as_strided((8, 8), w.stride(), w.storage_offset()).clone() for w in weights]
        return self.second(self.first(x)), *tiles, [w.is_contiguous() for w in weights]


@torch.no_grad()
@pytest.mark.parametrize("tier", TIERS)
def test_strides_that_a_weight_names_outside_its_call_are_those_of_its_values(tier):
    torch.manual_seed(0)
    model, x = ReadByStride().eval(), torch.randn(2, 64)
    *want, order = model(x)
    placed(model, tier)
    *got, order_then = model(x)
    assert all(map(torch.equal, got, want))
    assert order_then == order == [True, False]


@torch.no_grad()
def test_state_dict_of_a_placed_model_has_the_right_values(model):
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    placed(model, "all")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name])
        assert type(tensor) is torch.Tensor


@pytest.mark.parametrize("tier", [*MOVING, "cpu", "resident"])
@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_placed_model_is_refused(model, tier, copying):
    placed(model, tier)
    with pytest.raises(PlacementError, match="can't be copied"):
        copying(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.half(),
        lambda model: model.layers[0].linear.weight.zero_(),
        lambda model: nn.init.ones_(model.layers[0].linear.weight),
        lambda model: model.layers[0].linear.weight.data_ptr(),
        lambda model: setattr(model.layers[0].linear.weight, "data", torch.zeros(64, 64)),
        lambda model: model.layers[0].linear.weight.__setitem__(0, 1.0),
        lambda model: torch.add(torch.ones(64, 64), 1, out=model.layers[0].linear.weight),
        lambda model: model.layers[0].linear.reset_parameters(),
        lambda model: nn.init.normal_(tensor=model.layers[0].linear.weight),
        lambda model: torch.relu_(input=model.layers[0].linear.weight),
        lambda model: torch._foreach_mul_([torch.ones(2), model.layers[0].linear.weight], 2.0),
        lambda model: torch.frexp(torch.ones(64, 64), out=(model.layers[0].linear.weight, torch.ones(1))),
    ],
)
@torch.no_grad()
def test_a_change_of_weights_that_would_be_lost_is_refused(model, change):
    placed(model, "streamed")
    with pytest.raises(
        (PlacementError, RuntimeError), match=r"remove\(\) of the handle|of a placed model are only read"
    ):
        change(model)


def test_training_is_refused_in_training_mode(model, x):
    placed(model, "streamed")
    with pytest.raises(PlacementError, match="can't be trained"):
        model.train()(x)
    with torch.no_grad():
        model(x)  # dropout for uncertainty needs no gradients


def test_training_is_refused_for_inputs_that_want_gradients(model, x):
    placed(model, "resident")
    with pytest.raises(PlacementError, match="can't be trained"):
        model(x.requires_grad_())


def test_a_block_that_is_called_on_its_own_refuses_training_too(model, x):
    placed(model, "streamed")
    with pytest.raises(PlacementError, match=r"layers\.1 was called with gradients enabled"):
        model.layers[1](x.requires_grad_())


def test_without_no_grad_a_model_in_evaluation_mode_runs_and_builds_no_graph(model, x):
    with torch.no_grad():
        want = model(x)
    placed(model, "all")
    got = model(x)
    assert torch.equal(got, want)
    assert not got.requires_grad


@torch.no_grad()
def test_a_parameter_exchanged_after_placing_is_noticed_and_left_to_its_owner(model, x):
    handle = placed(model, "streamed")
    mine = model.layers[2].linear.weight = nn.Parameter(torch.ones(64, 64))
    with pytest.raises(PlacementError, match=r"layers\.2\.linear\.weight was exchanged"):
        model(x)
    handle.remove()
    assert model.layers[2].linear.weight is mine


def test_a_plan_for_another_model_is_refused(model):
    plan = plan_of(model, {})
    with pytest.raises(PlacementError, match=r"only the model has layers\.4"):
        place(Model(layers=5), plan)
    with pytest.raises(PlacementError, match=r"only the plan has layers\.3"):
        place(Model(layers=3), plan)
    with pytest.raises(PlacementError, match=r"layers\.0 has .* bytes, .* were planned"):
        place(Model(width=32), plan)


@torch.no_grad()
def test_an_exception_in_a_block_leaves_the_model_usable(model, x):
    want = model(x)
    handle = placed(model, "all")
    for width in (65, 64, 3, 64):
        if width == 64:
            assert torch.equal(model(x), want)
        else:
            with pytest.raises(RuntimeError):
                model(torch.randn(2, width))
    model.layers[1].linear.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(x)
    del model.layers[1].linear.forward
    assert torch.equal(model(x), want)
    handle.remove()
    assert torch.equal(model(x), want)


@torch.no_grad()
@pytest.mark.parametrize("tier", ["packed", "streamed_packed"])
def test_remove_unpacks_in_the_scratch_buffers_because_vram_may_be_full(model, x, tier, monkeypatch):
    want = model(x)
    weights = [p.clone() for p in model.parameters()]
    written = []

    def unpacked(packed, out):
        written.append(out.untyped_storage().data_ptr())
        return unpack(packed, out)

    names = [block.name for block in find_blocks(model)]
    plan = plan_of(model, dict.fromkeys(names, tier), PrefetchPool(2, scratches=1))
    handle = place_model(model, plan, ModuleWeights(), Streams(), work=PackedOperations(unpack=unpacked))
    assert torch.equal(model(x), want)
    written.clear()
    monkeypatch.setattr(
        "probes.placement.runtime.builder.unpack", lambda *_: pytest.fail("beside the buffers")
    )
    scratch = handle._engine.moving[0].decode_buffer.memory.untyped_storage().data_ptr()
    handle.remove()
    assert set(written) == {scratch}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_a_failure_while_placing_gives_the_model_back(model, x, monkeypatch):
    with torch.no_grad():
        want = model(x)
    monkeypatch.setattr(
        "probes.placement.runtime.builder.DeviceArena",
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("tried to allocate 1 GiB")),
    )
    before = list(model.parameters())
    with pytest.raises(PlacementError, match="VRAM was refused"):
        placed(model, "all")
    assert all(a is b and a.requires_grad for a, b in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        assert torch.equal(model(x), want)


def test_buffers_for_which_there_is_no_vram_give_the_model_back_with_an_error_of_ours(model, x, monkeypatch):
    with torch.no_grad():
        want = model(x)
    monkeypatch.setattr(
        "probes.placement.runtime.origins.ParameterOrigins.move_buffers",
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("tried to allocate 1 GiB")),
    )
    with pytest.raises(PlacementError, match="VRAM was refused"):
        placed(model, "streamed")
    with torch.no_grad():
        assert torch.equal(model(x), want)


def test_placing_twice_is_refused(model):
    placed(model, "streamed")
    with pytest.raises(PlacementError, match="placed already"):
        placed(model, "streamed")


def test_tensor_subclasses_are_refused():
    class Quantised(torch.Tensor):
        pass

    model = Model()
    model.layers[0].linear.weight = nn.Parameter(torch.zeros(64, 64).as_subclass(Quantised))
    with pytest.raises(PlacementError, match="tensor subclasses, such as those of quantised models"):
        find_blocks(model)


def test_a_parameter_without_a_shape_is_refused():
    with pytest.raises(PlacementError, match="no shape yet"):
        find_blocks(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)))


@torch.no_grad()
def test_threads_take_turns_with_a_placed_model(model):
    inputs = [torch.randn(2, 64) for _ in range(24)]
    want = [model(x) for x in inputs]
    placed(model, "all")
    got = [None] * len(inputs)

    def work(first):
        with torch.no_grad():
            for i in range(first, len(inputs), 4):
                got[i] = model(inputs[i])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def test_a_block_called_by_another_thread_within_a_pass_is_refused(model, x):
    placed(model, "streamed")
    errors = []

    def other():
        try:
            with torch.no_grad():
                model.layers[2](x)
        except PlacementError as error:
            errors.append(error)

    def within(x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return x

    model.layers[1].linear.forward = within
    model(x)
    assert "another thread" in str(errors[0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = self.encoder(x)
        return self.attention(x, x, x)[0]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, groups=2),
            nn.ConvTranspose2d(32, 4, 2),
        ).to(memory_format=torch.channels_last)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))

    def forward(self, x):
        return self.scale(self.net(x).mean((2, 3)))


class Mixture(nn.Module):
    """Experts that are chosen by their input, in another order each time."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)
        )

    def forward(self, x):
        best = self.gate(x).topk(2, -1).indices
        return torch.stack(
            [sum(self.experts[i](row) for i in chosen) for row, chosen in zip(x, best.tolist(), strict=True)]
        )


class Transposed(nn.Module):
    """Weights that share a storage: one is the other, transposed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)
        self.down.weight = nn.Parameter(self.up.weight.detach().t())
        self.again = nn.Linear(64, 48)
        self.again.weight = nn.Parameter(self.up.weight.detach()[:48])  # and a part of it

    def forward(self, x):
        return self.again(self.down(torch.tanh(self.up(x))))


@torch.no_grad()
@pytest.mark.parametrize("tier", [*MOVING, "cpu", "all"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Recurrent, (2, 5, 16)),
        (Attending, (2, 7, 64)),
        (Convolutions, (2, 3, 12, 12)),
        (Mixture, (5, 64)),
        (Transposed, (3, 64)),
        (lambda: nn.Linear(64, 64), (2, 64)),
    ],
)
def test_modules_of_many_kinds_compute_the_same_bits(make, shape, tier):
    torch.manual_seed(1)
    model = make().eval()
    inputs = [torch.randn(shape) for _ in range(3)]
    want = [model(x) for x in inputs]
    handle = placed(model, tier)
    assert all(torch.equal(model(x), y) for x, y in zip(inputs, want, strict=True))
    handle.remove()
    assert all(torch.equal(model(x), y) for x, y in zip(inputs, want, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("tier", ["all", "packed"])
def test_autocast_computes_the_same(model, x, tier):
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
    placed(model, tier)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), want)


@pytest.mark.parametrize("tier", ["all", *MOVING])
def test_under_inference_mode_and_after_it_the_outputs_are_the_same(model, x, tier):
    with torch.no_grad():
        want = model(x)
    with torch.inference_mode():
        handle = placed(model, tier)
        assert torch.equal(model(x), want)
    with torch.no_grad():
        assert torch.equal(model(x), want)
    with torch.inference_mode():
        handle.remove()
    assert not any(p.is_inference() for p in model.parameters())
    model.train()(x).sum().backward()  # trainable again
    assert model.layers[0].linear.weight.grad is not None


@pytest.mark.parametrize("tier", ["all", *TIERS])
@torch.inference_mode()
def test_a_model_made_under_inference_mode_is_placed_and_given_back(x, tier):
    model = Model().eval()
    before = list(model.parameters())
    want = model(x)
    handle = placed(model, tier)
    assert torch.equal(model(x), want)
    handle.remove()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(model(x), want)


@torch.no_grad()
@pytest.mark.parametrize("scratches", [0, 1, 2])
def test_with_the_objective_fast_few_rows_are_multiplied_with_packed_weights(model, x, scratches):
    want = model(x)
    many = torch.randn(100, 64)
    want_many = model(many)
    names = [block.name for block in find_blocks(model)]
    used = []

    def linear(x, packed, bias):
        used.append(x.shape[0])
        return nn.functional.linear(x, unpack(packed), bias)

    tiers = dict(zip(names, ["packed", "streamed_packed", "packed", "streamed_packed"], strict=True))
    plan = plan_of(model, tiers, PrefetchPool(2, scratches=scratches), objective="fast")
    handle = place_model(
        model, plan, ModuleWeights(), Streams(), work=PackedOperations(linear=linear, multiplies=bool)
    )
    for _ in range(2):
        assert torch.allclose(model(x), want)
        assert torch.equal(model(many), want_many)
    assert used == [2] * 8
    handle.remove()
    assert torch.equal(model(x), want)


@torch.no_grad()
def test_weights_too_narrow_for_a_packed_product_are_unpacked_once_a_call_not_for_each_product(model, x):
    """With rows of 64 numbers no packed product can be computed: each one would fetch its weight anew."""
    want, unpacked = model(x), []

    def unpacking(packed, out):
        unpacked.append(packed.shape)
        return unpack(packed, out)

    names = [block.name for block in find_blocks(model)]
    plan = plan_of(model, dict.fromkeys(names, "packed"), PrefetchPool(1, scratches=1), objective="fast")
    handle = place_model(model, plan, ModuleWeights(), Streams(), work=PackedOperations(unpack=unpacking))
    assert all(one.products is None for one in handle._engine.moving)
    assert torch.equal(model(x), want)
    assert unpacked
    handle.remove()


@torch.no_grad()
def test_a_report_says_what_is_taken_and_where_the_time_goes(model, x):
    handle = placed(model, "all")
    assert "unknown: no pass has been measured" in handle.report().gap()[0]
    measured = handle.measure(model, x)
    report = handle.report()
    assert len(measured.wall_s) == 5
    assert measured.middle_s > 0
    assert {use.tier for use in report.tiers} == set(TIERS[:4])
    assert report.vram_asked <= report.vram_taken <= 1.02 * report.vram_asked + 4096
    assert sum(use.weight_bytes for use in report.tiers) == sum(p.nbytes for p in model.parameters())
    assert "a pass takes" in str(report)
    assert "1 block of" in str(report)
    handle.remove()


@torch.no_grad()
def test_a_capture_of_a_model_that_is_placed_with_capture_is_one_graph_and_not_two(model, x):
    want = model(x)
    lanes = LateLanes(3)
    names = [block.name for block in find_blocks(model)]
    plan = plan_of(model, dict.fromkeys(names, "streamed"))
    work = PackedOperations(reads=lanes.reads)
    handle = place_model(model, plan, ModuleWeights(), lanes, capture=True, work=work)
    lanes.engine = handle._engine
    run = handle.captured(lambda x: model(x) * 2, x)
    assert torch.equal(run(x), want * 2)
    assert run.recorder.count == 1
    assert handle.recorder.count == 0
    assert torch.equal(model(x), want)
    with pytest.raises(PlacementError, match="other shapes"):
        run(torch.cat([x, x]))
    handle.remove()


class Positions(nn.Module):
    """A table that gives a part of itself, as Whisper's positions do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 64))

    def forward(self, x, wrap):
        return wrap(self.weight[: x.shape[0]])


@dataclass
class Wrapped:
    part: torch.Tensor


@torch.no_grad()
@pytest.mark.parametrize("tier", MOVING)
@pytest.mark.parametrize(
    ("wrap", "part"),
    [
        (lambda t: t, lambda t: t),
        (lambda t: {"a": [t, 1]}, lambda found: found["a"][0]),
        (Wrapped, lambda found: found.part),
    ],
    ids=["tensor", "dict", "dataclass"],
)
def test_a_weight_that_a_block_returns_keeps_its_values_while_other_blocks_are_called(x, tier, wrap, part):
    torch.manual_seed(0)
    positions, model = Positions(), Model()
    both = nn.ModuleList([positions, *model.layers]).eval()
    want = positions.weight[:2].clone()
    placed(both, tier)
    for _ in range(3):
        found = positions(x, wrap)
        for layer in model.layers:
            assert torch.equal(part(found), want)
            layer(x)


@torch.no_grad()
def test_a_block_without_weights_in_its_output_returns_the_very_object(model, x):
    given = [x]
    model.layers[1].forward = lambda x: given
    handle = placed(model, "streamed")
    assert model.layers[1](x) is given
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("tier", [*TIERS, "all"])
def test_a_parameter_without_dimensions_is_placed_and_given_back(x, tier):
    model = nn.Sequential(nn.Linear(64, 64), nn.PReLU(64), nn.Linear(64, 64))
    for layer in model:
        layer.gain = nn.Parameter(torch.tensor(2.5))
        layer.register_forward_hook(lambda module, _, y: y * module.gain)
    want = model(x)
    handle = placed(model, tier)
    assert torch.equal(model(x), want)
    handle.remove()
    assert torch.equal(model(x), want)
    assert model[0].gain.shape == ()


@torch.no_grad()
@pytest.mark.parametrize("tier", TIERS)
def test_placing_twice_is_refused_whatever_the_tiers_are(model, x, tier):
    want = model(x)
    handle = placed(model, tier)
    with pytest.raises(PlacementError, match="placed already"):
        placed(model, tier)
    if tier not in ("resident", "in_place"):  # these have nothing that a call brings
        with pytest.raises(PlacementError, match="placed already"):
            placed(nn.Sequential(*model.layers), tier)
    handle.remove()
    placed(model, tier)
    assert torch.equal(model(x), want)


@torch.no_grad()
@pytest.mark.parametrize("tier", ["resident", "streamed", "packed", "cpu"])
def test_a_compiled_placed_model_runs_as_it_is_instead_of_ending_in_an_error_of_torch(model, x, tier):
    want = model(x)
    handle = placed(model, tier)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), want)
    assert torch.equal(compiled(x), want)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises((RuntimeError, PlacementError), match="a placed model can't be compiled or exported"):
        whole(x)
    with pytest.raises(PlacementError, match=r"remove\(\) of the handle"):
        torch.export.export(model, (x,))
    assert torch.equal(model(x), want)
    handle.remove()
    assert torch.equal(torch.export.export(model, (x,)).module()(x), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_tracing_is_refused_because_a_trace_would_keep_addresses(model, x):
    want = model(x)
    placed(model, "streamed")
    with pytest.raises(PlacementError, match="can't be traced"):
        torch.jit.trace(model, (x,))
    assert torch.equal(model(x), want)


@torch.no_grad()
def test_a_trace_by_modes_is_refused_too(model, x):
    want = model(x)
    placed(model, "streamed")
    with pytest.raises(PlacementError, match="can't be traced"):
        make_fx(model)(x)
    with pytest.raises(PlacementError, match="can't be traced"), FakeTensorMode(allow_non_fake_inputs=True):
        model(x)
    with FlopCounterMode(display=False):
        assert torch.equal(model(x), want)
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("within", ["layers.0", "layers.0.linear"])
@torch.no_grad()
def test_remove_within_a_call_is_refused(model, x, within):
    want = model(x)
    handle = placed(model, "streamed")
    hook = model.get_submodule(within).register_forward_pre_hook(lambda *_: handle.remove())
    with pytest.raises(PlacementError, match="while this thread runs it"):
        model(x)
    hook.remove()
    assert torch.equal(model(x), want)
    handle.remove()
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("tier", ["resident", "streamed", "packed", "streamed_packed", "in_place", "cpu"])
@torch.no_grad()
def test_the_current_default_device_changes_nothing(model, x, tier):
    want = model(x)
    with torch.device("meta"):
        handle = placed(model, tier)
    assert torch.equal(model(x), want)
    with torch.device("meta"):
        handle.remove()
    assert torch.equal(model(x), want)


def test_a_parameter_that_is_a_buffer_too_is_refused(model):
    model.layers[2].register_buffer("same", model.layers[0].linear.weight)
    with pytest.raises(PlacementError, match=r"layers\.0\.linear\.weight is the buffer layers\.2\.same too"):
        placed(model, "packed")


@torch.no_grad()
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda plan: {"blocks": (*plan.blocks, plan.blocks[0])}, "twice"),
        (
            lambda plan: {"blocks": (replace(plan.blocks[0], tier="vram"), *plan.blocks[1:])},
            "the tier 'vram'",
        ),
        (lambda plan: {"rings": PrefetchPool(10**15)}, "aren't each from 0"),
        (lambda plan: {"rings": PrefetchPool(2, scratches=-3)}, r"plan\.rings\.scratches is -3"),
        (lambda plan: {"rings": PrefetchPool(2, ahead=-1)}, r"plan\.rings\.ahead is -1"),
    ],
)
def test_an_edited_plan_that_cannot_be_followed_is_refused(model, x, edit, said):
    want = model(x)
    plan = plan_of(model, {"layers.0": "streamed", "layers.1": "packed"}, objective="fast")
    with pytest.raises(PlacementError, match=said):
        place(model, replace(plan, **edit(plan)))
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(model, device):
    with pytest.raises(PlacementError):
        place(model, plan_of(model), device=device)


@torch.no_grad()
@pytest.mark.parametrize("what", ["host", "vram"])
def test_memory_that_the_system_refuses_is_an_error_and_the_model_is_as_before(model, x, monkeypatch, what):
    def refuse(*_args, **_options):
        raise (OSError(12, "Cannot allocate memory") if what == "host" else RuntimeError("can't allocate"))

    want = model(x)
    plan = plan_of(model, {"layers.0": "streamed"})
    with monkeypatch.context() as patch:
        if what == "host":
            patch.setattr("probes.placement.runtime.host_memory._Pages", refuse)
        else:
            patch.setattr("probes.placement.runtime.buffers.torch.empty", refuse)
        with pytest.raises(PlacementError, match="refused"):
            place(model, plan)
    assert torch.equal(model(x), want)


@torch.no_grad()
@pytest.mark.parametrize("tier", ["all", *MOVING, "cpu", "resident"])
def test_a_conversion_to_what_a_module_is_does_nothing(model, x, tier):
    """As the router of Switch Transformers does in each forward."""
    want, layer = model(x), model.layers[1]
    forward = type(layer).forward
    layer.forward = lambda *args: forward(layer.to(torch.float32).float(), *args)
    handle = placed(model, tier)
    for _ in range(3):
        assert torch.equal(model(x), want)
    assert model.float() is model
    with pytest.raises(PlacementError, match="only read"):
        layer.share_memory()
    handle.remove()
    assert torch.equal(model(x), want)


@torch.no_grad()
@pytest.mark.parametrize("tier", ["all", "resident", "in_place"])
@pytest.mark.parametrize(
    "change",
    [
        nn.Module.half,
        lambda m: m.to("meta"),
        lambda m: m.load_state_dict({n: v * 0 for n, v in m.state_dict().items()}),
        lambda m: next(m.children()).half(),
    ],
    ids=["half", "to", "load_state_dict", "part"],
)
def test_a_refused_change_leaves_no_weight_changed(model, x, tier, change):
    want = model(x)
    handle = placed(model, tier)
    with pytest.raises(PlacementError, match="only read"):
        change(model)
    assert torch.equal(model(x), want)
    handle.remove()
    change(model)


def test_a_pass_for_whose_graph_vram_is_too_small_is_done_as_always():
    """GPT-2 XL at batch 8: memory ran out while its pass was recorded, and the call failed."""

    class Short(LateLanes):
        def record(self, work, *, beside):
            raise torch.OutOfMemoryError("tried to allocate 100 MiB")

    model, x = Model().eval().requires_grad_(False), torch.randn(2, 64)
    plan = plan_of(model, {f"layers.{i}": "streamed" for i in range(4)})
    lanes = Short(1)
    work = PackedOperations(reads=lanes.reads)
    handle = place_model(model, plan, ModuleWeights(), lanes, capture=True, work=work)
    for number in range(4):
        model(x)
        assert int(model.layers[3].calls) == number + 1
    assert handle.report().not_captured == ("tried to allocate 100 MiB",)
    assert not handle.report().events


def test_an_interruption_that_ends_a_recording_is_no_reason_against_recording():
    """The driver complains of a recording that ends early, and torch raises that instead."""

    class Ended(LateLanes):
        def record(self, work, *, beside):
            try:
                raise KeyboardInterrupt
            finally:
                raise RuntimeError("the capture was invalidated")

    engine = Engine(Ended(1), ahead=2, fast=False, work=PackedOperations(), turns=Turns(), wanted=print)
    recorder, x = Recorder(engine), torch.ones(2)
    for _ in range(2):
        recorder.call(lambda y: y + 1, (x,), {})
    with pytest.raises(KeyboardInterrupt):
        recorder.call(lambda y: y + 1, (x,), {})
    assert not recorder.refused


def test_calls_that_all_differ_are_counted_in_bounded_memory(monkeypatch):
    monkeypatch.setattr("probes.placement.runtime.capture.MAX_COUNTED", 10)
    recorder = Recorder(
        Engine(LateLanes(1), ahead=2, fast=False, work=PackedOperations(), turns=Turns(), wanted=print)
    )
    for length in range(1, 100):
        x = torch.ones(length)
        assert torch.equal(recorder.call(lambda y: y + 1, (x,), {}), x + 1)
    assert len(recorder._seen) <= 10
    assert recorder.count == 0


class Slotted:
    """Keeps what it has in slots, as a dataclass with `slots=True` does."""

    __slots__ = ("offset", "unset")

    def __init__(self, offset):
        self.offset = offset


def numpys(number):
    return torch.tensor(number).numpy()[()]


@pytest.mark.parametrize("make", [Slotted, numpys, lambda n: slice(0, n), lambda n: {n}, range])
def test_a_recorder_knows_arguments_by_what_they_hold(make):
    """An object that is gone may have had the address of the next one."""
    one, other = make(1), make(2)
    assert call_key((one,)) == call_key((one,))
    assert call_key((one,)) != call_key((other,))
    assert len({call_key((make(number),)) for number in range(20)}) == 20


@pytest.mark.parametrize(
    ("thing", "change"),
    [
        (Slotted(1), lambda thing: setattr(thing, "offset", 2)),
        (Slotted(torch.zeros(2)), lambda thing: setattr(thing, "offset", torch.zeros(2))),
        ({1}, lambda thing: thing.add(2)),
        (deque([1]), lambda thing: thing.append(2)),
        (torch.zeros(2).numpy(), lambda thing: thing.fill(1)),
    ],
)
def test_an_argument_that_was_changed_is_another_one_to_a_recorder(thing, change):
    before = call_key((thing,))
    change(thing)
    assert call_key((thing,)) != before


def test_an_object_at_the_address_of_one_that_is_gone_is_another_one_to_a_recorder():
    class Opaque:
        pass

    keys = [call_key((Opaque(),)) for _ in range(5)]  # at one address
    assert len({id(key) for key in keys}) == 5
    assert not any(one == other for i, one in enumerate(keys) for other in keys[:i])
