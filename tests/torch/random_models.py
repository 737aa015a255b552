"""Random modules and plans, for tests of the runtime."""

import random

import torch
from torch import nn

from probes.placement.models.modules import find_blocks
from probes.placement.types import BlockPlan, HostUse, PassTime, Plan, PrefetchPool, VramUse, Workload

TIERS = ("resident", "packed", "streamed_packed", "streamed", "in_place", "cpu")


def plan_of(model, tiers=None, rings=None, *, objective="exact", names=None, becomes="", kept=()):
    """A plan with these tiers, resident where none is named."""
    tiers = tiers or {}
    blocks = tuple(
        BlockPlan(
            *(b.name, tiers.get(b.name, "resident"), b.n_bytes, 0, 0, 2 * b.n_bytes + 4096, 0.0),
            kept=b.name in kept,
        )
        for b in find_blocks(model, names)
    )
    vram, host, time = VramUse(0, 0, 0, 0, 0, 0, 0, 0), HostUse(0, 0, 0), PassTime(0.0, 0.0, 0.0, "link")
    rings = rings or PrefetchPool()
    return Plan(
        *("random", "test", "none", objective, Workload(), 0, 0, blocks, rings, vram, host, time),
        bfloat16_becomes=becomes,
    )


class Layer(nn.Module):
    def __init__(self, r, d, dtype):
        super().__init__()
        h = r.choice([d, 2 * d, 4])
        self.norm = nn.LayerNorm(d, dtype=dtype)
        self.up = nn.Linear(d, h, dtype=dtype, bias=r.random() < 0.5)
        self.down = nn.Linear(h, d, dtype=dtype)
        if r.random() < 0.3:
            self.register_buffer("scale", torch.rand(d).to(dtype))
        self.extra = nn.Parameter(torch.randn(d).to(dtype)) if r.random() < 0.3 else None
        if r.random() < 0.2:  # stored transposed
            self.up.weight = nn.Parameter(self.up.weight.detach().t().contiguous().t())

    def forward(self, x):
        y = self.down(torch.relu(self.up(self.norm(x))))
        if hasattr(self, "scale"):
            y = y * self.scale
        if self.extra is not None:
            y = y + self.extra
        return x + y


class Nested(nn.Module):
    """A layer that calls another block within its own call."""

    def __init__(self, inner, d, dtype):
        super().__init__()
        self.own = nn.Linear(d, d, dtype=dtype)
        self.others = (inner,)  # a tuple: not a child

    def forward(self, x):
        return self.own(x) + 0.1 * self.others[0](x)


class Model(nn.Module):
    """Layers of several sizes, with ties, shared layers, parameters of its own, and calls in any order."""

    def __init__(self, seed):
        super().__init__()
        r = random.Random(seed)
        d = self.d = r.choice([8, 12, 48, 64])  # only larger ones gain by packing
        dtype = r.choice([torch.float32, torch.bfloat16, torch.float16, torch.float32])
        self.embed = nn.Embedding(20, d, dtype=dtype)
        self.layers = nn.ModuleList(Layer(r, d, dtype) for _ in range(r.randint(1, 7)))
        if r.random() < 0.3:
            self.layers.append(self.layers[0])
        if r.random() < 0.3:
            self.layers.append(Nested(self.layers[0], d, dtype))
        if r.random() < 0.2:  # an inner weight of two layers
            self.layers[-1].tie = self.layers[0].norm
        self.head = nn.Linear(d, 20, bias=False, dtype=dtype)
        if r.random() < 0.5:
            self.head.weight = self.embed.weight
        self.root = nn.Parameter(torch.randn(d).to(dtype)) if r.random() < 0.3 else None
        self.mode = r.choice(["plain", "twice", "shuffled", "direct", "recursive"])

    def forward(self, ids, order=None):
        x = self.embed(ids)
        if self.root is not None:
            x = x + self.root
        layers = list(self.layers)
        if order is not None:
            layers = [layers[i % len(layers)] for i in order]
        for layer in layers:
            x = layer(x)
            if self.mode == "twice":
                x = layer(x)
            if self.mode == "direct":  # a weight read outside its module's call
                weight = self.layers[0].up.weight
                x = x + 0.1 * nn.functional.linear(x, weight[:1].expand(self.d, self.d))
        return self.head(x)
