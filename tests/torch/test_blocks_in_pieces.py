"""A packed block that is larger than a slot goes through several, piece by piece: same bits, less VRAM."""

from dataclasses import replace

import pytest
import torch
from late_lanes import LateLanes
from placement_plans import plan_of
from safetensors.torch import save_file
from torch import nn

from probes.placement import load
from probes.placement.models.modules import describe_module
from probes.placement.planner import tiers
from probes.placement.planner.machine import profile
from probes.placement.planner.rules import Pass
from probes.placement.planner.tiers import options
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
WIDTH, LAYERS, PIECES = 256, 6, 4


def layers(dtype):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))).eval()


def plan_in_pieces(model, *, slots, objective="exact"):
    plan = plan_of(model, {f"{i}": "streamed_packed" if i % 2 else "packed" for i in range(LAYERS)})
    block = max(sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in model)
    rings = PrefetchPool(slots=slots, slot_bytes=block // PIECES, scratches=1, ahead=slots, pieces=PIECES)
    return replace(plan, rings=rings, objective=objective)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("slots", "capture", "objective"), [(1, False, "exact"), (3, True, "fast")])
def test_a_block_larger_than_its_slots_computes_the_same(dtype, slots, capture, objective):
    torch.manual_seed(0)
    model = layers(dtype)
    x = torch.randn(2, WIDTH, dtype=dtype)
    with torch.no_grad():
        want = model(x)
        lanes = LateLanes(slots)
        plan = plan_in_pieces(model, slots=slots, objective=objective)
        # a product of few rows stays with the library, so that sums are rounded alike
        work = PackedOperations(linear=lambda *_: None, reads=lanes.reads)
        handle = place_model(model, plan, ModuleWeights(), lanes, capture=capture, work=work)
        lanes.engine = handle._engine
        cut = [one for one in handle._engine.moving if one.staging]
        assert all(len(one.pieces) >= PIECES - 1 for one in cut)
        assert handle._builder.staging_bytes <= plan.rings.slot_bytes
        for _ in range(6):
            assert torch.equal(model(x), want)
        lanes.compute.drain()
        assert (lanes.replayed > 0) == capture
        model[1](x)  # unexpectedly
        assert torch.equal(model(x), want)
        lanes.compute.drain()
        handle.remove()
        assert torch.equal(model(x), want)


@pytest.mark.parametrize(("slots", "ended"), [(1, True), (2, False)])
def test_only_copies_through_a_single_slot_end_a_graphs_stream(slots, ended):
    """With two slots the empty kernel would hold up the next copy, which waits for nothing else."""
    model = layers(torch.float32)
    plan = plan_of(model, {f"{i}": "streamed" for i in range(LAYERS)})
    plan = replace(plan, rings=replace(plan.rings, slots=slots, ahead=slots))
    lanes = LateLanes(0)
    handle = place_model(
        model, plan, ModuleWeights(), lanes, capture=True, work=PackedOperations(reads=lanes.reads)
    )
    lanes.engine = handle._engine
    with torch.inference_mode():
        for _ in range(4):
            model(torch.ones(1, WIDTH))
    lanes.compute.drain()
    assert lanes.replayed
    assert (lanes.ended > 0) == ended
    handle.remove()


@pytest.mark.parametrize("dense", [False, True])
def test_plans_count_the_pieces_that_a_block_is_cut_into(monkeypatch, dense):
    """Parts of different tensors rarely share a slot, so pieces aren't equal: a layer of experts has 10."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16)
            self.second = nn.Linear(2048, 2560, dtype=torch.bfloat16)
            self.third = nn.Linear(1024, 3072, dtype=torch.bfloat16)

    monkeypatch.setattr(tiers, "LEAST_PIECE", 64 << 10)  # bytes
    torch.manual_seed(0)
    model = nn.Sequential(Layer())
    for weights in model.parameters():
        nn.init.normal_(weights, std=2**-5.5)  # the Gaussian ones that take most, as plans count them
    block, machine = describe_module(model).blocks[0], profile("h200")
    work = Pass(1, 1, 1, "exact", captured=True)
    cut = next(one for one in options(block, machine, work) if one.pieces > 1 and one.dense == dense)
    plan = plan_of(model, {"0": "streamed_packed"})
    rings = PrefetchPool(slots=2, slot_bytes=cut.slot_bytes, scratches=1, ahead=2, pieces=cut.pieces)
    plan = replace(plan, rings=rings, blocks=(replace(plan.blocks[0], dense=dense),))
    handle = place_model(model, plan, ModuleWeights(), Streams())
    made = handle._engine.moving[0].pieces
    want = [machine.link_alpha_s + piece.target.numel() / machine.link_rate for piece in made]
    assert [copy_s for copy_s, _ in cut.parts] == pytest.approx(want, rel=0.02)
    handle.remove()


def test_a_checkpoint_is_loaded_in_pieces(tmp_path):
    torch.manual_seed(1)
    model = layers(torch.float32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    plan, x = plan_in_pieces(model, slots=2), torch.randn(2, WIDTH)
    with torch.inference_mode():
        want = model(x)
        for _ in range(2):  # the second time from the cache
            placed = load(
                lambda: layers(torch.float32), tmp_path, plan, device="cpu", cache=tmp_path / "packed"
            )
            assert all(len(one.pieces) > 2 for one in placed.placement._engine.moving if one.staging)
            assert torch.equal(placed(x), want)
            placed.placement.remove()
            assert torch.equal(placed(x), want)


def test_a_weight_that_is_read_outside_its_call_is_put_together():
    torch.manual_seed(2)
    model = layers(torch.bfloat16)
    own = model[1].weight.detach().clone()
    with torch.no_grad():
        handle = place_model(model, plan_in_pieces(model, slots=2), ModuleWeights(), Streams())
        assert torch.equal(model[1].weight + 0, own)
        handle.remove()
