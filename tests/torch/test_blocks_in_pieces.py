"""A packed block that is larger than a slot goes through several, piece by piece: same bits, less VRAM."""

from dataclasses import replace

import pytest
import torch
from late_lanes import LateLanes
from placement_plans import plan_of
from safetensors.torch import save_file
from torch import nn

from probes.placement import load
from probes.placement.runtime.blocks.lanes import HostLanes
from probes.placement.runtime.blocks.moving import Arithmetic
from probes.placement.runtime.place import settle
from probes.placement.runtime.settling import ModuleSource
from probes.placement.values import Rings

torch.set_num_threads(1)
WIDTH, LAYERS, PIECES = 256, 6, 4


def layers(dtype):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))).eval()


def plan_in_pieces(model, *, slots, objective="exact"):
    plan = plan_of(model, {f"{i}": "streamed_packed" if i % 2 else "packed" for i in range(LAYERS)})
    block = max(sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in model)
    rings = Rings(slots=slots, slot_bytes=block // PIECES, scratches=1, ahead=slots, pieces=PIECES)
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
        work = Arithmetic(linear=lambda *_: None, reads=lanes.reads)
        handle = settle(model, plan, ModuleSource(), lanes, capture=capture, work=work)
        lanes.engine = handle._engine
        cut = [one for one in handle._engine.moving if one.slots]
        assert all(len(one.pieces) >= PIECES - 1 for one in cut)
        assert handle._settling.slot_bytes <= plan.rings.slot_bytes
        for _ in range(6):
            assert torch.equal(model(x), want)
        lanes.compute.drain()
        assert (lanes.replayed > 0) == capture
        model[1](x)  # unexpectedly
        assert torch.equal(model(x), want)
        lanes.compute.drain()
        handle.remove()
        assert torch.equal(model(x), want)


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
            assert all(len(one.pieces) > 2 for one in placed.placement._engine.moving if one.slots)
            assert torch.equal(placed(x), want)
            placed.placement.remove()
            assert torch.equal(placed(x), want)


def test_a_weight_that_is_read_outside_its_call_is_put_together():
    torch.manual_seed(2)
    model = layers(torch.bfloat16)
    own = model[1].weight.detach().clone()
    with torch.no_grad():
        handle = settle(model, plan_in_pieces(model, slots=2), ModuleSource(), HostLanes())
        assert torch.equal(model[1].weight + 0, own)
        handle.remove()
