"""Random modules with random plans, on lanes with adversarial timing: same outputs, no stale read."""

import os
import random
from copy import deepcopy
from dataclasses import replace

import torch
from late_lanes import LateLanes
from random_models import TIERS, Model, plan_of

from probes.placement.models.modules import find_blocks
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
MOVING = ("packed", "streamed_packed", "streamed", "streamed")
SEEDS = range(420 if os.environ.get("ALL_CASES") else 60)
FOUND = (26_141, 203_320)  # where the stand-in for a graph did what no graph does


def inputs_of(model, r, passes):
    for _ in range(passes):
        shuffled = model.mode == "shuffled" and r.random() < 0.7
        order = [r.randrange(10) for _ in range(r.randint(1, 9))] if shuffled else None
        yield torch.randint(0, 20, (r.randint(1, 3), 4)), order


def exact_linear(x, packed, bias):
    """A product with packed weights whose sums are rounded as the library's."""
    return torch.nn.functional.linear(x, unpack(packed), bias)


def conversion(model, seed, tiers):
    """What bfloat16 becomes, and the blocks that are converted for each call."""
    if model.head.weight.dtype is not torch.bfloat16:
        return "", ()
    r = random.Random(seed)
    kept = [name for name, tier in tiers.items() if tier not in ("in_place", "cpu") and r.random() < 0.5]
    return r.choice(["", "float16", "float32"]), kept


def run(seed, passes=3):
    r = random.Random(seed * 7 + 1)
    torch.manual_seed(seed)
    model = Model(seed).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(r.random() < 0.5)
    inputs = list(inputs_of(model, r, passes))
    before = {name: (p, p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    among = TIERS if r.random() < 0.5 else MOVING
    tiers = {block.name: r.choice(among) for block in find_blocks(model) if block.called}
    rings = PrefetchPool(slots=r.randint(1, 3), scratches=r.randint(1, 3), ahead=r.randint(0, 4))
    if seed % 2 == 0:  # blocks larger than a slot go through several, piece by piece
        rings = replace(rings, slots=r.randint(1, 6), pieces=4, slot_bytes=r.choice([2048, 4096, 8192]))
        tiers = {name: "streamed_packed" if r.random() < 0.6 else tier for name, tier in tiers.items()}
    lanes = LateLanes(seed)
    becomes, kept = conversion(model, seed, tiers)
    converted = deepcopy(model).to(getattr(torch, becomes)) if becomes else model
    with torch.no_grad():
        own, want = [model(*one) for one in inputs], [converted(*one) for one in inputs]
    objective = r.choice(["exact", "exact", "fast"])
    plan = plan_of(model, tiers, rings, objective=objective, becomes=becomes, kept=kept if becomes else ())
    work = PackedOperations(linear=lanes.product(exact_linear), multiplies=bool, reads=lanes.reads)
    with torch.no_grad():
        handle = place_model(model, plan, ModuleWeights(), lanes, capture=r.random() < 0.3, work=work)
    lanes.engine = handle._engine
    lanes.in_pieces = sum(len(one.pieces) > 1 for one in handle._engine.moving)
    with torch.inference_mode() if r.random() < 0.5 else torch.no_grad():
        for _ in range(r.choice([1, 1, 5])):  # captured passes come with the third
            if r.random() < 0.4:  # a block on its own, between passes
                x = torch.ones(2, model.d, dtype=converted.head.weight.dtype)
                model.layers[r.randrange(len(model.layers))](x)
            got = [model(*one).clone() for one in inputs]
            for a, b in zip(want, got, strict=True):
                assert torch.equal(a, b), (seed, model.mode, tiers)
    lanes.compute.drain()
    handle.remove()
    for name, p in model.named_parameters():
        old, values, trains = before[name]
        assert p is old
        assert torch.equal(p, values)
        assert p.requires_grad == trains
    with torch.no_grad():
        assert all(torch.equal(a, model(*one)) for a, one in zip(own, inputs, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
    return lanes.checked, lanes.replayed, lanes.in_pieces


def test_random_modules_placed_at_random_compute_the_same_without_a_stale_read():
    """`make thorough` has 420 of them, and `make bench-placement` a thousand."""
    checked, replayed, in_pieces = zip(*map(run, (*SEEDS, *FOUND)), strict=True)
    assert sum(checked) > 8 * len(SEEDS)
    assert sum(replayed) > len(SEEDS) // 6
    assert sum(map(bool, in_pieces)) > len(SEEDS) // 12
