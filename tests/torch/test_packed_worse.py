"""Weights that pack worse than plans assume stay within the planned VRAM: some blocks stream instead."""

from dataclasses import replace

import pytest
import torch
from late_lanes import LateLanes
from safetensors.torch import save_file
from torch import nn

from probes.core.errors import PlacementError
from probes.placement import load, place, plan
from probes.placement.planner import tiers
from probes.placement.planner.machine import profile
from probes.placement.planner.tiers import rounded
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.weight_sources import ModuleWeights

torch.set_num_threads(1)
WIDTH, LAYERS = 1024, 12
# its link and its CPU are so slow that plans pack
SLOW = replace(
    profile("h200"), link_rate=1e8, zero_copy_rate=1e7, link_alpha_s=1e-6, cpu_rate=1e6, cpu_flops=1e6
)


class Stack(nn.Module):
    def __init__(self, dtype, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=i % 3 == 0, dtype=dtype) for i in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def random_bits(parameter):
    """Every number is as likely as any other, infinities and those that aren't numbers left out."""
    whole = torch.int16 if parameter.element_size() == 2 else torch.int32
    parameter.view(whole).random_(torch.iinfo(whole).min, torch.iinfo(whole).max)
    parameter[~torch.isfinite(parameter)] = 1.0


def heavy_tailed(parameter):
    parameter.copy_(torch.randn(parameter.shape).mul_(6).exp_())


@torch.no_grad()
def built(dtype, draw):
    torch.manual_seed(0)
    model = Stack(dtype).eval()
    for parameter in model.parameters():
        draw(parameter)
    return model


def planned(model, share, **options):
    """A plan for this share of the weights, beside what a pass takes."""
    use = plan(model, vram=2**40, machine=SLOW, **options).vram
    beside = use.activations + use.workspace + use.rounding
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return plan(model, vram=int(share * weights) + beside, machine=SLOW, **options)


def arena_of(made):
    """Bytes of VRAM that the plan counts for weights, slots and scratch buffers, as they are allocated."""
    return rounded(made.vram.weights + made.vram.slots + made.vram.scratch)


def tiers_of(made):
    return [block.tier for block in made.blocks]


def bits(tensor):
    """The same of numbers that aren't equal to themselves."""
    return tensor.contiguous().view(torch.uint8)


def state(model):
    return {name: bits(tensor).clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("draw", [random_bits, heavy_tailed])
@pytest.mark.parametrize("objective", ["exact", "fast"])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_model_stays_within_the_vram_that_its_plan_counts(monkeypatch, dtype, draw, objective, pieces):
    monkeypatch.setattr(tiers, "LEAST_PIECE", (64 << 10) if pieces else (1 << 40))
    model, x = built(dtype, draw), torch.randn(2, WIDTH).to(dtype)
    before, parameters = state(model), list(model.parameters())
    with torch.no_grad():
        want = bits(model(x))
        spilled = 0
        for seed, share in enumerate((0.3, 0.6, 0.9)):
            made = planned(model, share, objective=objective)
            lanes = LateLanes(seed)
            work = PackedOperations(linear=lambda *_: None, reads=lanes.reads)
            handle = place_model(model, made, ModuleWeights(), lanes, capture=seed == 1, work=work)
            lanes.engine = handle._engine
            report = handle.report()
            assert report.vram_taken <= arena_of(made)
            spilled += report.spilled
            for _ in range(4):
                assert torch.equal(bits(model(x)), want)
                lanes.compute.drain()
            handle.remove()
            assert same(state(model), before)
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            assert torch.equal(bits(model(x)), want)
    assert spilled


def test_blocks_that_do_not_pack_go_through_the_slots_of_pieces(monkeypatch):
    """Slots became as large as whole blocks, beyond the plan."""
    monkeypatch.setattr(tiers, "LEAST_PIECE", 64 << 10)
    model = built(torch.bfloat16, random_bits)
    made = planned(model, 0.3)
    assert made.rings.pieces > 1
    handle = place(model, made, device="cpu")
    through = [one for one in handle._engine.moving if one.staging]
    assert through
    assert all(len(one.pieces) > 1 for one in through)
    assert handle._builder.staging_bytes <= made.rings.slot_bytes
    assert handle.report().spilled < tiers_of(made).count("packed")
    handle.remove()


def test_a_tensor_whose_bytes_are_no_multiple_of_the_alignment_goes_through_in_pieces(monkeypatch):
    monkeypatch.setattr(tiers, "LEAST_PIECE", 16 << 10)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1021, 1021, dtype=torch.bfloat16) for _ in range(LAYERS))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            random_bits(parameter)
        before, x = state(model), torch.randn(2, 1021).to(torch.bfloat16)
        own = bits(model[5].weight + 0)
        want = bits(model(x))
        made = planned(model, 0.3)
        assert made.rings.pieces > 1
        handle = place(model, made, device="cpu")
        assert any(len(one.pieces) > 1 for one in handle._engine.moving)
        assert torch.equal(bits(model(x)), want)
        assert torch.equal(bits(model[5].weight + 0), own)  # outside its call
        handle.remove()
    assert same(state(model), before)


def test_a_report_says_how_many_blocks_stream_instead():
    model = built(torch.bfloat16, random_bits)
    made = planned(model, 0.9)
    handle = place(model, made, device="cpu")
    report = handle.report()
    assert f"{report.spilled} blocks of these were to stay in VRAM and stream" in str(report)
    assert sum(use.blocks for use in report.tiers if use.tier == "packed") == (
        tiers_of(made).count("packed") - report.spilled
    )
    handle.remove()


def test_weights_that_pack_as_planned_stay_where_they_were_planned():
    model = built(torch.bfloat16, lambda parameter: parameter.normal_(0, 0.03))
    made = planned(model, 0.9)
    assert "packed" in tiers_of(made)
    handle = place(model, made, device="cpu")
    assert not handle.report().spilled
    assert "to stay in VRAM" not in str(handle.report())
    handle.remove()


def test_a_plan_without_budgets_is_followed_as_it_is():
    model = built(torch.bfloat16, random_bits)
    made = replace(planned(model, 0.9), vram_budget=0, host_budget=0)
    handle = place(model, made, device="cpu")
    assert not handle.report().spilled
    assert handle.report().vram_taken > arena_of(made)
    handle.remove()


def refused(model, made, match):
    before, x = state(model), torch.ones(1, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        want = bits(model(x))
        with pytest.raises(PlacementError, match=match) as caught:
            place(model, made, device="cpu")
        assert "pack worse than the Gaussian ones" in str(caught.value)
        assert caught.value.hint
        assert same(state(model), before)
        assert torch.equal(bits(model(x)), want)


def test_host_memory_beyond_its_budget_is_refused():
    model = built(torch.bfloat16, random_bits)
    made = planned(model, 0.9)
    assert made.host.total < 1 << 20
    refused(model, replace(made, host_budget=1 << 20), "of host memory, not the plan's 1")


def test_blocks_that_were_to_stream_packed_keep_to_the_host_budget_too():
    model = built(torch.bfloat16, random_bits)
    made = planned(model, 0.3)
    assert "streamed_packed" in tiers_of(made)
    refused(model, replace(made, host_budget=made.host.total), "of host memory, not the plan's")


def test_host_memory_for_what_streams_already_and_for_what_spills_together_keeps_to_the_budget():
    """Each by itself fits; together they don't."""
    model = built(torch.bfloat16, random_bits)
    made = planned(model, 0.6)
    planned_tiers = {block.name: block.tier for block in made.blocks}
    handle = place(model, replace(made, host_budget=1 << 40), device="cpu")
    taken = {"packed": 0, "streamed_packed": 0}  # of host memory, by the planned tier
    for one in handle._builder.placements:
        if one.tier == "streamed_packed":
            taken[planned_tiers[one.block.name]] += one.stored.n_bytes
    whole = handle._builder.host.used
    handle.remove()
    largest = max(taken.values())
    assert 0 < largest < whole - 1

    beside = made.host.total - sum(block.host_bytes for block in made.blocks)
    for most in (largest, whole - 1):
        refused(model, replace(made, host_budget=beside + most), "with those that would have to stream")
    place(model, replace(made, host_budget=beside + whole), device="cpu").remove()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1500, 512, dtype=torch.bfloat16)
        self.inner = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(512, 1500, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.inner(self.words(ids)))


def test_a_table_that_does_not_pack_is_in_host_memory_once():
    torch.manual_seed(0)
    model, ids = Tied().eval().requires_grad_(False), torch.arange(5)
    random_bits(model.words.weight)
    made = plan(model, vram=2**40, machine=SLOW)
    table = model.words.weight.nbytes
    blocks = tuple(
        replace(block, tier="packed", table=True, vram_bytes=3 * table // 4, host_bytes=table)
        if block.name == "words.weight"
        else block
        for block in made.blocks
    )
    use = replace(made.vram, weights=sum(block.vram_bytes for block in blocks), slots=0, scratch=0)
    rings = replace(made.rings, slots=1, slot_bytes=0, scratches=0, scratch_bytes=0)
    host = replace(made.host, pinned=table, pageable=0)
    made = replace(made, blocks=blocks, rings=rings, vram=replace(use, rounding=0), host=host)
    made = replace(made, vram_budget=1 << 40, host_budget=1 << 40)
    with torch.inference_mode():
        want = bits(model(ids))
        handle = place(model, made, device="cpu")
        report = handle.report()
        assert report.spilled
        assert report.pinned_asked < 1.5 * table
        assert torch.equal(bits(model(ids)), want)
        handle.remove()
        assert torch.equal(bits(model(ids)), want)


def test_vram_that_no_choice_keeps_to_is_refused():
    model = built(torch.bfloat16, random_bits)
    made = planned(model, 0.3)
    largest = max(block.host_bytes for block in made.blocks)
    blocks = tuple(
        replace(block, tier="streamed_packed", vram_bytes=0, host_bytes=largest) for block in made.blocks
    )
    rings = replace(made.rings, slots=6)
    use = replace(made.vram, weights=0, slots=6 * rings.slot_bytes)
    host = replace(made.host, pinned=LAYERS * largest)
    made = replace(made, blocks=blocks, rings=rings, vram=use, host=host)
    made = replace(made, vram_budget=1 << 40, host_budget=1 << 40)
    refused(model, made, "too few blocks can stream instead")


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_checkpoint_is_loaded_within_the_same_vram(monkeypatch, tmp_path, cached, pieces):
    monkeypatch.setattr(tiers, "LEAST_PIECE", (64 << 10) if pieces else (1 << 40))
    model, x = built(torch.bfloat16, heavy_tailed), torch.randn(2, WIDTH).to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    before = state(model)
    with torch.device("meta"):
        described = Stack(torch.bfloat16)
    made = planned(described, 0.6)
    assert (made.rings.pieces > 1) == pieces
    with torch.inference_mode():
        want = bits(model(x))
        for _ in range(1 + cached):  # the second time from the cache
            loaded = load(
                lambda: Stack(torch.bfloat16),
                tmp_path,
                made,
                device="cpu",
                cache=tmp_path / "packed" if cached else False,
            )
            report = loaded.placement.report()
            assert report.spilled
            assert report.vram_taken <= arena_of(made)
            for _ in range(3):
                assert torch.equal(bits(loaded(x)), want)
            loaded.placement.remove()
            assert same(state(loaded), before)
