"""Models over several cards: each block computes on its card, activations follow, the bits are the model's.

The cards are simulated on the CPU: a tensor knows its card, and an operation that mixes two cards fails, as
it does on GPUs.
"""

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from late_lanes import LateLanes
from random_models import TIERS, Model, plan_of
from test_random_placements import exact_linear, inputs_of
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from probes.core.errors import PlacementError
from probes.placement import place, plan_cards
from probes.placement.models.modules import find_blocks
from probes.placement.runtime.multi_gpu import CurrentCard, place_on_cards
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import CardsPlan, PassTime, PrefetchPool

torch.set_num_threads(1)


class Mixed(AssertionError):
    """Tensors of two cards met in one operation, or of another card than the one that computes."""


class Somewhere(torch.Tensor):
    """A tensor that knows its card. Weights are plain tensors: they are where their block is."""

    cards: CurrentCard  # of the test that runs
    crossings = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor._version.__get__:  # known on the host
            return super().__torch_function__(func, types, args, kwargs)
        where = {
            one.card for one in tree_leaves((args, kwargs)) if isinstance(one, cls) and hasattr(one, "card")
        }
        if len(where) > 1:
            raise Mixed(f"{func} reads tensors of cards {sorted(where)}")
        now = cls.cards.now
        if where and now is not None and where != {now}:
            raise Mixed(f"{func} reads a tensor of card {where} while card {now} computes")
        made = super().__torch_function__(func, types, args, kwargs)
        card = next(iter(where), 0)
        return tree_map(lambda one: located(one, card) if isinstance(one, torch.Tensor) else one, made)


def located(tensor, card):
    tensor = tensor.as_subclass(Somewhere)
    tensor.card = card
    return tensor


def crossing(thing, card):
    """What `Cards` does with GPUs: a copy on the other card, or the very same."""

    def cross(one):
        if not isinstance(one, torch.Tensor):
            return one
        if getattr(one, "card", 0) == card:
            return one
        Somewhere.crossings += 1
        with torch._C.DisableTorchFunctionSubclass():
            plain = one.detach().as_subclass(torch.Tensor).clone()
        return located(plain, card)

    return tree_map(cross, thing)


def over_cards(model, tiers, cuts, rings, objective="exact"):
    whole = plan_of(model, tiers, rings, objective=objective)
    edges = [0, *cuts, len(whole.blocks)]
    parts = [replace(whole, blocks=whole.blocks[a:b]) for a, b in pairwise(edges)]
    return CardsPlan(tuple(parts), PassTime(0.0, 0.0, 0.0, "link"), 0.0, 0)


def placed(model, plan, lanes, *, work=None):
    handle = place_on_cards(model, plan, [ModuleWeights() for _ in lanes], lanes, work=work, move=crossing)
    Somewhere.cards, Somewhere.crossings = handle._over, 0
    return handle


def run(seed):
    r = random.Random(seed * 11 + 5)
    torch.manual_seed(seed)
    model = Model(seed).eval()
    if model.mode == "direct":
        model.mode = "plain"  # reads a weight between blocks: that of another card can't be read there
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inputs = list(inputs_of(model, r, 3))
    with torch.no_grad():
        want = [model(*one) for one in inputs]
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    blocks = find_blocks(model)
    count = min(r.choice([2, 2, 3, 4]), len(blocks))
    cuts = sorted(r.sample(range(1, len(blocks)), count - 1))
    tiers = {block.name: r.choice(TIERS) for block in blocks if block.called}
    rings = PrefetchPool(slots=r.randint(1, 3), scratches=r.randint(1, 3), ahead=r.randint(0, 4))
    plan = over_cards(model, tiers, cuts, rings, r.choice(["exact", "fast"]))
    lanes = [LateLanes(seed * 10 + i) for i in range(count)]

    def reads(name, tensors):
        lanes[handle._over.now or 0].reads(name, tensors)

    with torch.no_grad():
        handle = placed(
            model, plan, lanes, work=PackedOperations(linear=exact_linear, multiplies=bool, reads=reads)
        )
        for _ in range(3):
            for given, expected in zip(inputs, want, strict=True):
                got = model(located(given[0], 0), *given[1:])
                assert getattr(got, "card", 0) == 0  # as `crossing` reads it
                assert torch.equal(got.as_subclass(torch.Tensor), expected), (seed, model.mode, tiers)
    for lane in lanes:
        lane.compute.drain()
    handle.remove()
    handle.remove()
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])
    assert not any("forward" in module.__dict__ for module in model.modules())
    with torch.no_grad():
        assert all(torch.equal(a, model(*one)) for a, one in zip(want, inputs, strict=True))
    return sum(lane.checked for lane in lanes)


def test_random_modules_over_several_cards_compute_the_same_without_a_stale_read_or_mixed_cards():
    seeds = range(340 if os.environ.get("ALL_CASES") else 40)  # `make thorough` has all
    assert sum(map(run, seeds)) > 6 * len(seeds)


class Chain(nn.Module):
    def __init__(self, mixes=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.mixes = mixes

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x) if self.mixes else layer(x)
        return x


@torch.no_grad()
@pytest.mark.parametrize(("mixes", "first", "later"), [(False, 6, 2), (True, 6, 6)])
def test_activations_cross_once_where_the_code_between_blocks_only_passes_them_on(mixes, first, later):
    """Three layers on each of two cards: there and back for each at first, then there once and back once."""
    model = Chain(mixes).eval()
    x = torch.randn(2, 16)
    want = model(x)
    plan = over_cards(model, {}, [3], PrefetchPool())
    handle = placed(model, plan, [LateLanes(1), LateLanes(2)])
    for crossings in (first, later, later):
        Somewhere.crossings = 0
        assert torch.equal(model(located(x, 0)).as_subclass(torch.Tensor), want)
        assert Somewhere.crossings == crossings
    handle.remove()


@torch.no_grad()
@torch.no_grad()
def test_attention_takes_the_same_way_in_the_first_pass_as_on_one_card():
    """Torch computes such a layer by one function, and otherwise where somebody watches its operations."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 4).eval().requires_grad_(False)
    x = torch.randn(1, 4, 64)
    want = model(x)
    handle = place(model, plan_cards(model, cards=2, vram=64 << 20, machine="h200"))
    assert [torch.equal(model(x), want) for _ in range(3)] == [True] * 3
    handle.remove()


def test_a_later_call_that_computes_between_blocks_is_not_given_tensors_of_two_cards():
    """As with labels: only then is the loss computed from what the last block returns."""

    class WithLabels(Chain):
        hidden = False

        def forward(self, x, labels=None):
            made = super().forward(x)
            if self.hidden:
                made = made + x
            return made if labels is None else made - labels

    model = WithLabels().eval()
    x = torch.randn(2, 16)
    without, with_labels = model(x), model(x, labels=x)
    handle = placed(model, over_cards(model, {}, [3], PrefetchPool()), [LateLanes(1), LateLanes(2)])
    for _ in range(2):
        assert torch.equal(model(located(x, 0)).as_subclass(torch.Tensor), without)
        got = model(located(x, 0), labels=located(x, 0))
        assert torch.equal(got.as_subclass(torch.Tensor), with_labels)
    model.hidden = True  # no argument shows it: torch's own error, once
    with pytest.raises(Mixed):
        model(located(x, 0))
    assert torch.equal(model(located(x, 0)).as_subclass(torch.Tensor), without + x)
    handle.remove()


@torch.no_grad()
def test_buffers_and_what_is_used_between_blocks_have_a_card_that_computes_with_them():
    class WithRoot(Chain):
        def __init__(self):
            super().__init__()
            self.root = nn.Parameter(torch.randn(16))

        def forward(self, x):
            return super().forward(x) + self.root

    model = WithRoot().eval().requires_grad_(False)
    blocks = [block.name for block in find_blocks(model)]
    plan = over_cards(model, {}, [3], PrefetchPool())
    assert "root" in [block.name for block in plan.cards[blocks.index("root") >= 3].blocks]
    want = model(torch.ones(1, 16))
    handle = placed(model, plan, [LateLanes(1), LateLanes(2)])
    got = model(located(torch.ones(1, 16), 0))
    assert torch.equal(got.as_subclass(torch.Tensor), want)
    handle.remove()


@torch.no_grad()
def test_a_plan_over_cards_runs_on_the_cpu_and_reports_each_card():
    model = Chain().eval().requires_grad_(False)
    x = torch.randn(2, 16)
    want = model(x)
    handle = place(model, over_cards(model, {"layers.4": "streamed"}, [3], PrefetchPool()), device="cpu")
    handle.measure(model, x, passes=2)
    said = handle.report()
    assert "card 1:" in said
    assert "card 2:" in said
    assert "a pass through all takes" in said
    assert torch.equal(model(x), want)
    with pytest.raises(PlacementError, match="placed already"):
        place(model, over_cards(model, {}, [3], PrefetchPool()), device="cpu")
    handle.remove()
    assert torch.equal(model(x), want)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: {"device": ["cpu"]}, "2 cards, 1 devices"),
        (lambda plan: {"capture": True}, "can't be captured"),
        (lambda plan: {"plan": replace(plan, cards=())}, "no card"),
        (lambda plan: {"plan": replace(plan, cards=plan.cards[:1] * 2)}, "twice"),
        (lambda plan: {"plan": replace(plan, cards=plan.cards[:1])}, "only the model has layers"),
        (lambda plan: {"plan": {"cards": 2}}, "by a Plan, not by a dict"),
    ],
)
def test_a_plan_over_cards_that_does_not_fit_is_refused_and_the_model_is_as_before(change, said):
    model = Chain().eval()
    x = torch.randn(2, 16)
    want = model(x)
    plan = over_cards(model, {"layers.0": "streamed"}, [3], PrefetchPool())
    with pytest.raises(PlacementError, match=said):
        place(model, **{"plan": plan, "device": "cpu", **change(plan)})
    assert torch.equal(model(x), want)
    assert not any("forward" in module.__dict__ for module in model.modules())


@torch.no_grad()
def test_a_card_that_fails_while_the_others_are_placed_leaves_the_model_as_before(monkeypatch):
    model = Chain().eval()
    x = torch.randn(2, 16)
    want, before = model(x), {id(p) for p in model.parameters()}
    plan = over_cards(model, {"layers.0": "streamed", "layers.4": "packed"}, [3], PrefetchPool())

    class Failing(ModuleWeights):
        def fill(self, entry, target):
            raise PlacementError("no more")

    lanes = [LateLanes(1), LateLanes(2)]
    with pytest.raises(PlacementError, match="no more"):
        place_on_cards(model, plan, [ModuleWeights(), Failing()], lanes)
    assert torch.equal(model(x), want)
    assert {id(p) for p in model.parameters()} == before
