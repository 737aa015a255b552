"""Ctrl-C before any bytecode of a placed model's call: the next call is right, and no thread waits."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch
from interrupting import PASSED_OVER, moments
from late_lanes import LateLanes
from random_models import plan_of
from safetensors.torch import save_file
from test_random_placements import exact_linear
from test_several_cards_run import over_cards
from torch import nn

from probes.placement import place
from probes.placement.loading import load
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights, WeightSource
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
ALL_CASES = bool(os.environ.get("ALL_CASES"))  # as `make thorough` has it
NAMES = [f"layers.{number}" for number in range(4)]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Outer(nn.Module):
    """Calls another block within its own call."""

    def __init__(self, inner):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.others = (inner,)

    def forward(self, x):
        return self.linear(x) + self.others[0](x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Inner(), Inner(), Inner()])
        self.layers.append(Outer(self.layers[0]))
        self.requires_grad_(False).eval()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


ANOTHER = ThreadPoolExecutor(1, initializer=partial(torch.set_num_threads, 1))


def in_another_thread(work):
    """What `work` returns there; an error where it waits for ever."""
    return ANOTHER.submit(work).result(timeout=60)


def interrupt_everywhere(model, x, want, *, thorough, finish=int):
    """Interrupt passes, and look at the model after each."""
    for _ in range(4):
        model(x)
    away = [id(value) for value in model.parameters()]
    found = moments(lambda: model(x), thorough=thorough)
    interrupted = 0
    for one in found:
        interrupted += one.run(lambda: model(x))
        assert [id(value) for value in model.parameters()] == away, one.where
        assert torch.equal(in_another_thread(lambda: model(x)), want), one.where
        assert torch.equal(model(x), want), one.where
        finish()
    return interrupted


def placed(tiers, lanes, rings, *, objective="exact", work=None, **options):
    model = Model()
    tiers = {name: tiers[i % len(tiers)] for i, name in enumerate(NAMES)}
    plan = plan_of(model, tiers, rings, names=NAMES, objective=objective)
    return model, place_model(model, plan, ModuleWeights(), lanes, work=work, **options)


def weights_of(model):
    return {name: value.clone() for name, value in model.named_parameters()}


def same(model, weights):
    return all(torch.equal(value, weights[name]) for name, value in model.named_parameters())


WAYS = [
    (["streamed"], PrefetchPool(1)),
    (["streamed", "streamed_packed", "packed"], PrefetchPool(2, scratches=2)),
    (["streamed_packed", "packed", "cpu"], PrefetchPool(1, scratches=1)),
]


@pytest.fixture(params=[False, True] if ALL_CASES else [False], ids=("lines", "bytecodes")[: 1 + ALL_CASES])
def thorough(request):
    return request.param


@pytest.mark.parametrize(("tiers", "rings"), WAYS, ids=["streamed", "mixed", "packed"])
def test_after_an_interruption_anywhere_in_a_call_the_model_computes_the_same(tiers, rings, thorough):
    weights, x = weights_of(Model()), torch.randn(2, 64)
    want = Model()(x)
    model, handle = placed(tiers, Streams(), rings)
    assert interrupt_everywhere(model, x, want, thorough=thorough) > (
        400 // (PASSED_OVER + 1) if thorough else 70
    )
    handle.remove()
    assert same(model, weights)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2] if ALL_CASES else [1])
def test_after_an_interruption_nothing_reads_what_is_overwritten(capture, seed, thorough):
    """The lanes put work off as long as the marks allow. With `capture` passes are replayed."""
    x = torch.randn(2, 64)
    want, lanes = Model()(x), LateLanes(seed)
    work = PackedOperations(linear=lanes.product(exact_linear), multiplies=bool, reads=lanes.reads)
    model, handle = placed(
        ["streamed", "streamed_packed", "packed"],
        *(lanes, PrefetchPool(2, scratches=2, ahead=2)),
        objective="fast" if seed else "exact",
        work=work,
        capture=capture,
    )
    lanes.engine = handle._engine
    assert interrupt_everywhere(model, x, want, thorough=thorough, finish=lanes.compute.drain) > (
        400 // (PASSED_OVER + 1) if thorough else 70
    )
    assert lanes.checked > 1000


def test_after_an_interruption_blocks_are_read_from_disk_again(tmp_path, thorough):
    weights, x = weights_of(Model()), torch.randn(2, 64)
    want = Model()(x)
    own = {name: value for name, value in Model().state_dict().items() if "others" not in name}
    save_file(own, tmp_path / "model.safetensors")
    plan = plan_of(Model(), dict.fromkeys(NAMES, "disk"), PrefetchPool(2), names=NAMES)
    model = load(Model, tmp_path, plan, device="cpu", cache=False)
    assert interrupt_everywhere(model, x, want, thorough=thorough) > (
        400 // (PASSED_OVER + 1) if thorough else 70
    )
    model.placement.remove()
    assert same(model, weights)


def test_after_an_interruption_over_several_cards_all_compute_the_same(thorough):
    x = torch.randn(2, 64)
    want, model = Model()(x), Model()
    plan = over_cards(model, {NAMES[0]: "streamed", NAMES[2]: "packed"}, [2], PrefetchPool())
    handle = place(model, plan, device="cpu")
    assert interrupt_everywhere(model, x, want, thorough=thorough) > (
        400 // (PASSED_OVER + 1) if thorough else 70
    )
    assert not torch.overrides._get_current_function_mode_stack()
    handle.remove()
    assert same(model, weights_of(Model()))


def test_an_interrupted_first_pass_over_several_cards_leaves_no_watcher_behind(thorough):
    x = torch.randn(2, 64)
    want = Model()(x)

    def first():
        model = Model()
        handle = place(model, over_cards(model, {NAMES[0]: "streamed"}, [2], PrefetchPool()), device="cpu")
        return model, partial(model, x), handle

    for one in moments(first()[1], thorough=thorough):
        model, work, handle = first()
        one.run(work)
        assert not torch.overrides._get_current_function_mode_stack(), one.where
        assert torch.equal(in_another_thread(work), want), one.where
        handle.remove()
        assert torch.equal(model(x), want)


@pytest.mark.parametrize(
    "tier", ["streamed", "streamed_packed", "packed"] if ALL_CASES else ["streamed_packed"]
)
def test_an_interrupted_removal_is_completed_by_another(tier, thorough):
    weights, x = weights_of(Model()), torch.randn(2, 64)
    want = Model()(x)

    def removal():
        model, handle = placed([tier], Streams(), PrefetchPool(2, scratches=2))
        model(x)
        return model, handle

    for one in moments(removal()[1].remove, thorough=thorough):
        model, handle = removal()
        one.run(handle.remove)
        in_another_thread(handle.remove)
        assert same(model, weights), one.where
        assert torch.equal(model(x), want), one.where
        assert not any("forward" in module.__dict__ for module in model.modules()), one.where


class Recovering(WeightSource):
    """Bytes whose announcements have to be forgotten after an interruption."""

    recovered = 0

    def recover(self):
        self.recovered += 1


def test_after_an_interrupted_step_each_wire_forgets_what_was_announced():
    model, handle = placed(["streamed"], Streams(), PrefetchPool(2))
    x, moving = torch.randn(2, 64), handle._engine.moving
    want = model(x)
    for one in moving:
        one.weight_source = Recovering(one.weight_source.whole())
    handle._engine.changing = True  # as an interruption leaves it
    assert torch.equal(model(x), want)
    assert [one.weight_source.recovered for one in moving] == [1] * len(moving)


class Recursive(nn.Module):
    """Calls itself once, and goes on where that call is interrupted."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, inner=True):
        found = self.linear(x)
        if inner:
            try:
                self(x, inner=False)
            except KeyboardInterrupt:
                self.interrupted = True
        return found + self.linear(x)


@torch.no_grad()
def test_an_interrupted_call_within_a_call_leaves_the_outer_one_under_way():
    torch.manual_seed(0)
    model = nn.Sequential(Recursive(), Recursive(), Recursive()).eval().requires_grad_(False)
    x = torch.randn(2, 64)
    want = model(x)
    plan = plan_of(model, dict.fromkeys("012", "streamed"), PrefetchPool(1))
    moving = place_model(model, plan, ModuleWeights(), Streams())._engine.moving
    linear, depths = model[1].linear, []
    linear.register_forward_hook(lambda *_: depths.append(moving[1].depth))
    interrupted = 0
    for _ in range(2):  # what a first pass notes is no part of it
        model(x)
    for one in moments(lambda: model(x)):
        found = []
        for layer in model:
            layer.interrupted = False
        depths.clear()
        one.run(lambda: found.append(model(x)))  # noqa: B023  # called here
        interrupted += any(layer.interrupted for layer in model)
        assert all(torch.equal(output, want) for output in found), one.where
        assert all(depth > 0 for depth in depths), one.where
        assert [block.depth for block in moving] == [0, 0, 0], one.where
        assert torch.equal(model(x), want), one.where
    assert interrupted > 10


def pressed(*_args, **_options):
    raise KeyboardInterrupt


def test_a_second_interruption_while_a_call_is_abandoned_leaves_no_call_under_way(monkeypatch):
    model, x = Model(), torch.randn(2, 64)
    want = model(x)
    plan = plan_of(model, dict.fromkeys(NAMES, "streamed"), PrefetchPool(2))
    engine = place_model(model, plan, ModuleWeights(), Streams())._engine
    hook = model.layers[1].linear.register_forward_hook(pressed)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "abandon", pressed)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    hook.remove()
    assert [block.depth for block in engine.moving] == [0, 0, 0, 0]
    for _ in range(2):
        assert torch.equal(model(x), want)


class Calling(nn.Module):
    """Calls two other blocks within its own call, and goes on where the first is interrupted."""

    def __init__(self, *others):
        super().__init__()
        self.linear, self.others = nn.Linear(64, 64), others

    def forward(self, x):
        first, second = self.others
        with suppress(KeyboardInterrupt):
            first(x)
        return second(x) + self.linear(x)


@torch.no_grad()
def test_an_interrupted_call_within_a_call_leaves_the_outer_ones_weights_in_their_buffer(monkeypatch):
    torch.manual_seed(0)
    inner = [Inner(), Inner()]
    model = nn.Sequential(*inner, Calling(*inner)).eval()
    x = torch.randn(2, 64)
    want = model(x)
    plan = plan_of(model, dict.fromkeys("012", "streamed"), PrefetchPool(1))
    engine = place_model(model, plan, ModuleWeights(), Streams())._engine
    apart, asked = engine._apart, []

    def once(block):
        asked.append(block.name)
        return pressed() if len(asked) == 1 else apart(block)

    monkeypatch.setattr(engine, "_apart", once)
    assert torch.equal(model(x), want)
    assert asked == ["0", "1"]
