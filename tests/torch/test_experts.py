"""Experts that are placed one by one give the bits of the unplaced model, whatever of them is in VRAM."""

import random
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from expert_models import (
    Listed,
    cache_of,
    experts_plan,
    mixtral,
    placed,
    plant,
    qwen2_moe,
    qwen3_moe,
)
from interrupting import moments
from torch import nn

from probes.core.errors import PlacementError
from probes.placement import place
from probes.placement.models.experts import find_experts
from probes.placement.packing import launch
from probes.placement.runtime import expert_cache, experts
from probes.placement.runtime.expert_cache import EVERY

pytest.importorskip("transformers")
torch.set_num_threads(1)
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
IDS = torch.tensor([[3, 14, 15, 92, 65], [35, 89, 79, 32, 38]])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(a, b):
    return torch.equal(bits(a), bits(b))


def generated(model, **options):
    ids = IDS[:1]
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return result.sequences, torch.stack(result.logits)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, qwen2_moe])
@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_generation_within_a_share_of_the_bytes_gives_the_same_tokens_and_bits(make, share, cache):
    model = make().eval()
    want = generated(model, **cache)
    handle = placed(model, experts_plan(model, share))
    for _ in range(2):
        assert all(map(same, generated(model, **cache), want))
    report = handle.report()
    assert 0 < report.experts.cached < report.experts.count
    assert report.experts.rate.chosen > 0
    assert f"{report.experts.rate.share:.1%}" in str(report)
    handle.remove()
    assert all(map(same, generated(model, **cache), want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_each_implementation_of_transformers_keeps_its_bits(implementation, dtype):
    model = qwen3_moe().to(dtype).eval()
    model.set_experts_implementation(implementation)
    want = model(IDS).logits
    handle = placed(model, experts_plan(model, 0.5))
    for _ in range(3 * EVERY):
        assert same(model(IDS).logits, want)
    handle.remove()


@torch.inference_mode()
def test_listed_experts_keep_their_bits_and_are_counted():
    for dtype in (torch.float32, torch.bfloat16):
        model = Listed().to(dtype).eval()
        x = torch.randn(5, 64).to(dtype)
        want = model(x)
        plan = experts_plan(model, 0.5, packed=dtype is torch.bfloat16)
        handle = placed(model, plan)
        for _ in range(3 * EVERY):
            assert same(model(x), want)
        chosen = handle.report().experts.rate.chosen
        assert 3 * EVERY * 3 * 2 <= chosen <= 3 * EVERY * 3 * 8  # each expert that has tokens, once a layer
        handle.remove()
        assert same(model(x), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.inference_mode()
def test_packed_experts_keep_every_bit_pattern(implementation):
    model = mixtral(hidden_size=256, intermediate_size=256, num_hidden_layers=1).bfloat16().eval()
    held = model.model.layers[0].mlp.experts
    held.gate_up_proj.data[3, 5, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e30])
    held.down_proj.data[0, 0, 0] = float("nan")
    model.set_experts_implementation(implementation)
    values = [parameter.detach().clone() for parameter in held.parameters()]
    want = model(IDS).logits
    handle = placed(model, experts_plan(model, 0.5, packed=True))
    (group,) = handle._builder.experts.groups
    assert all(tensor.item.form is not None for tensor in group.tensors)
    for _ in range(2 * EVERY):
        assert same(model(IDS).logits, want)
    for parameter, value in zip(held.parameters(), values, strict=True):
        assert same(parameter + 0, value + 0)  # read as a whole
    assert all(
        same(model.state_dict()[f"model.layers.0.mlp.experts.{name}"], value)
        for (name, _), value in zip(held.named_parameters(), values, strict=True)
    )
    handle.remove()
    assert all(same(p.data, value) for p, value in zip(held.parameters(), values, strict=True))


class Restless(expert_cache.ExpertCache):
    """Exchanges any experts, also those that passes read all the time."""

    draw = random.Random(0)

    def _wanted(self):
        inside = [n for n, place in enumerate(self._place_of) if place >= 0]
        outside = [n for n, place in enumerate(self._place_of) if place < 0]
        places = [place for place, _ in self._free]
        drawn = zip(
            places,
            self.draw.sample(outside, min(len(places), len(outside))),
            self.draw.sample(inside, min(len(places), len(inside))),
            strict=False,
        )
        return [expert_cache._Coming(expert, place, leaves) for place, expert, leaves in drawn]


# What kernels read by the table, in Triton's interpreter


@pytest.fixture
def by_kernel(monkeypatch):
    """Kernels run on the host, interpreted: in few programs, each of which takes its time."""
    monkeypatch.setattr(launch, "usable", lambda _device: True)
    monkeypatch.setattr(launch, "GATE_ROWS", 64)
    monkeypatch.setattr(launch, "DOWN_ROWS", 64)


@pytest.mark.parametrize(("dtype", "packed"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.usefixtures("by_kernel")
@torch.inference_mode()
def test_kernels_find_experts_by_the_table_while_it_changes(dtype, packed, monkeypatch):
    model = mixtral(hidden_size=256, intermediate_size=16, num_hidden_layers=1, num_local_experts=4)
    model = model.to(dtype).eval()
    model.set_experts_implementation("batched_mm")
    want = model(IDS[:1, :1]).logits
    monkeypatch.setattr(experts, "ExpertCache", Restless)
    handle = placed(model, experts_plan(model, fit=3, packed=packed))
    before = cache_of(handle)._place_of.copy()
    for _ in range(EVERY + 3):
        assert same(model(IDS[:1, :1]).logits, want)
    assert before != cache_of(handle)._place_of
    assert handle._builder.experts.by_kernel
    assert handle.report().experts.rate.chosen == (EVERY + 3) * 2
    handle.remove()


@pytest.mark.parametrize(("dtype", "packed"), [(torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.usefixtures("by_kernel")
@torch.inference_mode()
def test_fast_products_of_chosen_experts_are_those_of_the_library_but_for_rounding(dtype, packed):
    size = 512 if packed else 64
    model = mixtral(hidden_size=size, intermediate_size=size, num_hidden_layers=1, num_local_experts=4)
    model = model.to(dtype).eval()
    want = model(IDS[:1, :2]).logits.double()
    handle = placed(model, experts_plan(model, fit=2, packed=packed, objective="fast"))
    got = model(IDS[:1, :2]).logits.double()
    assert (got - want).abs().max() < 0.02 * want.abs().max()
    assert handle.report().experts.rate.chosen == 4
    handle.remove()


@pytest.mark.usefixtures("by_kernel")
@torch.inference_mode()
def test_an_id_without_an_expert_gives_nan_and_reads_nothing():
    model = mixtral(num_hidden_layers=1).eval()
    handle = placed(model, experts_plan(model))
    weights = model.model.layers[0].mlp.experts.down_proj
    assert weights[torch.tensor([8, 99, -9, -1000])].isnan().all()
    assert same(weights[torch.tensor([-1])], weights[torch.tensor([7])])
    with pytest.raises(IndexError, match="out of bounds"):
        weights[8]
    handle.remove()


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize(("chosen", "refused"), [(-1, True), (-9, True), (4, False)])
@torch.inference_mode()
def test_fast_products_show_an_id_below_zero_and_leave_out_those_of_other_devices(chosen, refused):
    model = mixtral(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_local_experts=4).eval()
    module = model.model.layers[0].mlp.experts
    x, shares = torch.randn(1, 64), torch.full((1, 2), 0.5)
    handle = placed(model, experts_plan(model, fit=2, objective="fast"))
    one = module(x, torch.tensor([[2, 2]]), shares)
    got = module(x, torch.tensor([[2, chosen]]), shares)
    assert bool(got.isnan().all()) is refused
    assert refused or torch.allclose(2 * got, one)
    handle.remove()


# A pass that runs out of memory


class Failures(list):
    """What is still to fail: a pass that is done again doesn't restore this."""


class RunsOut(torch.nn.Module):
    """The gate of a layer, for which memory runs out as often as it is told."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.failures = gate, Failures()

    def forward(self, x):
        if self.failures:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.failures.pop()}.")
        return self.gate(x)


@pytest.mark.filterwarnings("ignore:a pass ran out of memory")
@torch.inference_mode()
def test_the_cache_of_experts_gives_up_room_before_any_block_streams():
    model = mixtral().eval()
    gate = model.model.layers[1].mlp.gate = RunsOut(model.model.layers[1].mlp.gate)
    want, one = model(IDS).logits, model(IDS[:1]).logits
    plan = experts_plan(model, fit=20)
    handle = placed(model, plan)
    resident = handle.report().tiers
    places, taken = cache_of(handle).places, handle.report().vram_taken
    gate.failures.append("1.00 KiB")
    assert same(model(IDS).logits, want)
    report = handle.report()
    assert report.tiers == resident
    assert 0 < cache_of(handle).places < places
    assert report.vram_taken <= 0.8 * taken
    assert "the cache of experts is" in report.events[0]
    assert "stream from now on" not in report.events[0]
    gate.failures.append("1.00 GiB")  # more than there is: all that can move does
    assert same(model(IDS[:1]).logits, one)
    assert cache_of(handle).places == 0
    assert handle.report().events[-1].count("stream from now on") == 1
    for _ in range(2 * EVERY):
        assert same(model(IDS).logits, want)
    handle.remove()
    assert same(model(IDS).logits, want)


@torch.inference_mode()
def test_a_plan_with_experts_says_that_it_is_not_refined():
    model = mixtral().eval()
    want = model(IDS).logits
    plan = experts_plan(model)
    kept = tuple(
        replace(block, host_bytes=2 * block.weight_bytes)
        if "expert" in block.tier
        else replace(block, vram_bytes=block.weight_bytes)
        for block in plan.blocks
    )
    host = replace(plan.host, pinned=sum(block.host_bytes for block in kept))
    budget = {
        "blocks": kept,
        "host": host,
        "vram_budget": 1 << 30,
        "host_budget": 1 << 30,
        "vram": replace(plan.vram, weights=1 << 29),
    }
    handle = place(model, replace(plan, **budget), refine="h200")
    assert same(model(IDS).logits, want)
    assert "not refined: experts are placed one by one" in str(handle.report())
    handle.remove()


# The hit rate, planted


@pytest.mark.parametrize("hits", [0, 10, 15, 18])
@torch.inference_mode()
def test_the_report_has_the_planted_hit_rate(hits):
    """10 tokens choose 2 experts each, of which `hits` in 20 are in VRAM: 0, 0.5, 0.75, 0.9."""
    model = mixtral(num_local_experts=16).eval()
    model.set_experts_implementation("batched_mm")
    handle = placed(model, experts_plan(model, fit=24))
    cache = cache_of(handle)
    for layer in range(3):
        own = [(n, cache.is_cached(16 * layer + n)) for n in range(16)]
        inside, outside = ([n for n, cached in own if cached is want] for want in (True, False))
        chosen = [inside[n % len(inside)] for n in range(hits)]
        chosen += [outside[n % len(outside)] for n in range(20 - hits)]
        plant(model, layer, torch.tensor(chosen).view(10, 2))
    model(IDS)
    rate = handle.report().experts.rate
    assert (rate.chosen, rate.hits) == (60, 3 * hits)
    assert handle.report().experts.rate.share == hits / 20
    handle.remove()


@torch.inference_mode()
def test_the_cache_fills_with_what_a_skewed_router_chooses_most():
    """Routes are drawn from a Zipf distribution: the n-th of a shuffled order has 1/n of the weight."""
    model = mixtral(num_local_experts=32, num_hidden_layers=2).eval()
    model.set_experts_implementation("batched_mm")
    plan = experts_plan(model, fit=16)
    handle = placed(model, plan)
    share = handle.report().experts.cached / 64
    order = torch.randperm(32)
    weights = torch.empty(32)
    weights[order] = 1 / torch.arange(1, 33)
    for step in range(60):
        if step == 40:
            before = handle.report().experts.rate
        for layer in range(2):
            plant(
                model,
                layer,
                torch.multinomial(weights, 2, generator=torch.Generator().manual_seed(step))[None],
            )
        model(IDS[:1, :1])
    after = handle.report().experts.rate
    late = (after.hits - before.hits) / (after.chosen - before.chosen)
    best = float(weights.topk(7).values.sum() / weights.sum())  # 7 of 32 in each layer
    assert late > 0.7 * best > 1.5 * share
    handle.remove()


# Updates beside passes


class Impatient(Restless):
    """Doesn't look whether copies are done."""

    def update(self):
        if self._coming is not None:
            self._arrived()
        super().update()


class Careless(Restless):
    """Copies over experts that passes may be reading still."""

    def update(self):
        self._free = [(place, None) for place, _ in self._free]
        super().update()


@pytest.mark.parametrize("seed", range(6))
@torch.inference_mode()
def test_no_pass_reads_what_a_copy_overwrites(seed, monkeypatch):
    monkeypatch.setattr(experts, "ExpertCache", Restless)
    run_late(seed)


def run_late(seed, **options):
    torch.manual_seed(seed)
    model = mixtral(num_local_experts=8, num_hidden_layers=2).eval()
    model.set_experts_implementation(("batched_mm", "grouped_mm")[seed % 2])
    inputs = [torch.randint(3, 90, (1, 3)) for _ in range(4)]
    want = [model(ids).logits for ids in inputs]
    handle = placed(model, experts_plan(model, fit=4 + seed % 4), seed=seed, **options)
    before = cache_of(handle)._place_of.copy()
    for step in range(24):
        for _ in range(3):  # more often than passes need it
            lanes = handle._engine.streams
            lanes.stir()
            if seed % 3 == 0:  # copies are quick, and passes late
                lanes.copy.drain()
            cache_of(handle)._passes = EVERY
            handle.follow_experts()
        which = (step // 8 + seed) % 4  # others become popular
        assert same(model(inputs[which]).logits, want[which])
    handle.finish()
    changed = before != cache_of(handle)._place_of
    handle.remove()
    return changed


def test_others_come_into_vram_meanwhile():
    with torch.inference_mode():
        assert any(map(run_late, range(4)))


@torch.inference_mode()
def test_recorded_passes_find_the_experts_that_came_after_the_recording():
    assert any(run_late(seed, capture=True) for seed in (0, 2, 4))


@pytest.mark.parametrize("broken", [Impatient, Careless])
def test_what_orders_copies_and_passes_is_needed(broken, monkeypatch):
    monkeypatch.setattr(experts, "ExpertCache", broken)
    monkeypatch.setattr(Restless, "draw", random.Random(0))
    with pytest.raises(AssertionError), torch.inference_mode():  # Stale is one
        list(map(run_late, range(40)))


def test_an_update_that_is_interrupted_leaves_a_table_that_is_right():
    with torch.inference_mode():
        model = mixtral(num_local_experts=8, num_hidden_layers=1).eval()
        model.set_experts_implementation("batched_mm")
        want = model(IDS[:1]).logits
        handle = placed(model, experts_plan(model, fit=4))
        cache, interrupted = cache_of(handle), 0

        def work():
            cache._popularity = cache._popularity.flip(0)  # others are wanted each time
            cache._passes = EVERY
            model(IDS[:1])

        work()
        for moment in moments(work):
            interrupted += moment.run(work)
            assert same(model(IDS[:1]).logits, want), moment.where
            assert not (set(cache._place_of) & {place for place, _ in cache._free})
        assert interrupted > 60
        handle.remove()
        assert same(model(IDS[:1]).logits, want)


def test_threads_take_turns_while_experts_come_and_go():
    model = mixtral(num_local_experts=8).eval()
    model.set_experts_implementation("batched_mm")
    inputs = [torch.randint(3, 90, (1, 3)) for _ in range(4)]
    with torch.inference_mode():
        want = [model(ids).logits for ids in inputs]
    handle = placed(model, experts_plan(model, fit=9))
    wrong: list[object] = []

    def passes(which):
        try:
            with torch.inference_mode():
                for _ in range(12):
                    if not same(model(inputs[which]).logits, want[which]):
                        wrong.append(which)
                    handle.report()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=passes, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert wrong == []
    assert handle.report().experts.rate.chosen == 4 * 12 * 3 * 3 * 2
    handle.remove()


# Odd routes and models


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.inference_mode()
def test_experts_that_are_never_or_always_chosen_ties_and_no_tokens(implementation):
    model = mixtral(num_hidden_layers=2).eval()
    model.set_experts_implementation(implementation)
    routes = {
        "one alone": torch.tensor([[5, 5]] * 4),
        "all": torch.arange(8).view(4, 2),
        "none": torch.empty(0, 2, dtype=torch.int64),
    }
    held = model.model.layers[0].mlp.experts
    given = {name: (torch.randn(len(ids), 64), ids, torch.rand(ids.shape)) for name, ids in routes.items()}
    want = {name: held(*one) for name, one in given.items()}
    tied = nn.Parameter(torch.zeros_like(model.model.layers[1].mlp.gate.weight))
    model.model.layers[1].mlp.gate.weight = tied  # all experts are equally likely
    logits = model(IDS).logits
    handle = placed(model, experts_plan(model, 0.5))
    for _ in range(2 * EVERY):
        for name, one in given.items():
            assert same(held(*one), want[name]), name
        assert same(model(IDS).logits, logits)
    handle.remove()


@torch.inference_mode()
def test_vram_for_no_expert_for_one_and_for_all():
    model = mixtral(num_hidden_layers=1).eval()
    want = model(IDS).logits
    for fit in (0, 1, 8):
        handle = placed(model, experts_plan(model, fit=fit))
        for _ in range(2 * EVERY):
            assert same(model(IDS).logits, want)
        assert handle.report().experts.cached == fit
        assert handle.report().experts.rate.share == pytest.approx(fit / 8, abs=0.13)
        handle.remove()


@torch.inference_mode()
def test_what_is_not_made_of_experts_is_refused_with_the_reason():
    model = mixtral(num_hidden_layers=1).eval()
    plan = experts_plan(model)
    wrong = tuple(
        replace(block, tier="experts") if block.name == "lm_head" else block for block in plan.blocks
    )
    with pytest.raises(PlacementError, match="lm_head can't be placed expert by expert"):
        place(model, replace(plan, blocks=wrong))
    held = model.model.layers[0].mlp.experts
    turned = held.down_proj.detach().transpose(1, 2).contiguous().transpose(1, 2)
    held.down_proj = nn.Parameter(turned)
    with pytest.raises(PlacementError, match="stored transposed"):
        place(model, plan)


def test_experts_are_found_by_their_name_and_shapes():
    found = {one.name: (one.count, one.chosen, one.listed) for one in find_experts(Listed())}
    assert found == {f"layers.{n}.experts": (8, 2, True) for n in range(3)}
    fused = find_experts(qwen3_moe())
    assert {(one.count, one.chosen, one.listed) for one in fused} == {(16, 4, False)}
    other = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])})
    assert find_experts(other) == ()


@torch.inference_mode()
def test_places_hold_each_expert_once():
    model = mixtral().eval()
    handle = placed(model, experts_plan(model, fit=12))
    for _ in range(6 * EVERY):
        model(IDS)
        used = sorted(place for place in cache_of(handle)._place_of if place >= 0)
        assert all(a < b for a, b in pairwise(used))
    handle.remove()
