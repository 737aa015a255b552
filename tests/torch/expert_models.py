"""Models with experts, their routes planted or not, and plans that place the experts one by one."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from late_lanes import LateLanes
from random_models import plan_of
from torch import nn

from probes.placement.models.experts import find_experts
from probes.placement.models.modules import find_blocks
from probes.placement.packing.format import aligned
from probes.placement.runtime.expert_cache import fixed_bytes
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place, place_model
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import ExpertsPlan

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}


def mixtral(**changed):
    import transformers

    config = transformers.MixtralConfig(
        **SIZES | {"intermediate_size": 96, "num_local_experts": 8} | TOKENS | changed
    )
    return transformers.MixtralForCausalLM(config)


def qwen3_moe(**changed):
    import transformers

    own = {"intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}
    own |= {"num_experts": 16, "num_experts_per_tok": 4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | own | TOKENS | changed))


def qwen2_moe():
    """With an expert that every token has."""
    import transformers

    own = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    own |= {"num_experts": 16, "num_experts_per_tok": 4}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES, **own, **TOKENS))


class Expert(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ListedMixture(nn.Module):
    """As transformers had it before version 5: a list of experts, and a loop over those that were chosen."""

    def __init__(self, hidden, inner, count, top_k):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(count))

    def forward(self, x):
        shares, chosen = torch.topk(F.softmax(self.gate(x), dim=-1, dtype=torch.float), self.top_k)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).nonzero().flatten().tolist():
            which, tokens = torch.where(mask[expert])
            out.index_add_(0, tokens, self.experts[expert](x[tokens]) * shares[tokens, which, None])
        return out


class Listed(nn.Module):
    """Layers with listed experts, and a head."""

    def __init__(self, hidden=64, inner=48, count=8, top_k=2, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(ListedMixture(hidden, inner, count, top_k) for _ in range(layers))
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Planted(nn.Module):
    """A router of transformers whose choices are planted: `routes` (tokens, chosen)."""

    def __init__(self, routes, dtype):
        super().__init__()
        self.register_buffer("routes", routes)
        self.dtype = dtype

    def forward(self, x):
        shares = torch.full(self.routes.shape, 1 / self.routes.shape[-1], dtype=self.dtype)
        return x.new_zeros(1), shares, self.routes


def plant(model, layer, routes):
    """Let a layer of a transformers model choose these experts."""
    block = model.model.layers[layer].mlp
    block.gate = Planted(routes, model.dtype)


def experts_plan(model, share=0.5, *, packed=False, objective="exact", fit=None):
    """All experts one by one, in `share` of the model's bytes with everything else; `fit`: so many."""
    names = [experts.name for experts in find_experts(model)]
    blocks = [block.name for block in find_blocks(model) if not block.name.startswith(tuple(names))]
    plan = plan_of(
        model,
        dict.fromkeys(names, "experts_packed" if packed else "experts"),
        names=[*blocks, *names],
        objective=objective,
    )
    whole = sum(parameter.nbytes for parameter in model.parameters())
    apart = [parameter for name in names for parameter in model.get_submodule(name).parameters()]
    count = sum(experts.count for experts in find_experts(model))
    each = sum(parameter.nbytes for parameter in apart) // count
    room = int(share * whole) - (whole - each * count)
    if fit is not None:
        module = find_experts(model)[0]
        sizes = [p.nbytes // (1 if module.listed else module.count) for p in module.module.parameters()]
        if module.listed:
            sizes = sizes[: len(sizes) // module.count]
        columns = len(sizes) * (5 if packed else 1)
        room = aligned(fixed_bytes(count, columns)) + fit * sum(aligned(n) for n in sizes)
    return replace(plan, experts=ExpertsPlan(count, 0.0, each, 0, max(room, 0), 0.0, 0.0, 0.0))


def placed(model, plan, *, seed=None, **options):
    """Placed here; with a seed, on lanes that put off what they may."""
    if seed is None:
        return place(model, plan, **options)
    lanes = LateLanes(seed)
    with torch.inference_mode(False), torch.no_grad():
        handle = place_model(
            model, plan, ModuleWeights(), lanes, work=PackedOperations(reads=lanes.reads), **options
        )
    lanes.engine = handle._engine
    return handle


def cache_of(handle):
    return handle._builder.experts.cache
