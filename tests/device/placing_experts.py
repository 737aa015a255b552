"""Experts one by one: planted hit rates on the layers of a 30B-A3B model, and whole models of transformers.

Random weights don't route as trained ones do, so routes are planted: for the hit rates by what is in VRAM,
for the cache's own choice from a Zipf distribution over the experts of each layer in a shuffled order.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from placing_generate import NEW, ROOM, decoded
from placing_measure import captured, differing_bits, free, wall_s
from placing_models import Model, tokens_of
from torch import nn

from probes.core.errors import PlacementError
from probes.placement import Handle, Plan, place, plan
from probes.placement.runtime.host_memory import zero_copy

GIB = 2**30
LAYERS, EXPERTS, CHOSEN, WIDTH, INNER = int(os.environ.get("EXPERT_LAYERS", "48")), 128, 8, 2048, 768
IN_VRAM = LAYERS * GIB // 3  # 16 GiB for all 48
HIT_RATES = (0.0, 0.5, 0.75, 0.9)
SHARE = 0.3  # of a whole model's bytes
ZIPF_PASSES = 200


class Layers(nn.Module):
    """Experts alone, as transformers has them, with routes that are planted in `ids` (layers, tokens,
    chosen).
    """

    def __init__(
        self, layers: int = LAYERS, count: int = EXPERTS, width: int = WIDTH, inner: int = INNER
    ) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            hidden_size=width, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=CHOSEN
        )
        config._experts_implementation = "batched_mm"
        self.top_k = CHOSEN
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.top_k = CHOSEN
            layer.experts = Qwen3MoeExperts(config).bfloat16()
            self.layers.append(layer)
        self.register_buffer("ids", torch.zeros(layers, 1, CHOSEN, dtype=torch.int64))
        self.register_buffer("shares", torch.full((1, CHOSEN), 1 / CHOSEN, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, ids in zip(self.layers, self.ids, strict=True):
            x = x + layer.experts(x, ids, self.shares)
        return x


def fill(model: Layers) -> None:
    """Gaussian weights: one expert's, shifted for each other, for drawing 29 billion takes minutes."""
    with torch.no_grad():
        for layer, module in enumerate(model.layers):
            for parameter in module.experts.parameters():
                drawn = torch.randn(parameter[0].numel(), generator=torch.Generator().manual_seed(layer))
                one = (0.02 * drawn).to(parameter.dtype)
                for n in range(len(parameter)):
                    parameter[n] = one.roll(8191 * n).view(parameter[n].shape)


def route(handle: Handle, hit_rate: float) -> torch.Tensor:
    """Ids of which, over all layers, this share is in VRAM now; as many in each layer as is possible."""
    cache = handle._builder.experts.cache  # where each expert is
    layers, count = len(handle.model.layers), cache.count // len(handle.model.layers)
    ids, due = [], 0.0
    for layer in range(layers):
        there = [n for n in range(count) if cache.is_cached(layer * count + n)]
        away = [n for n in range(count) if not cache.is_cached(layer * count + n)]
        due += hit_rate * CHOSEN
        hits = min(round(due), CHOSEN, len(there))
        due -= hits
        ids.append([[*there[:hits], *away[: CHOSEN - hits]]])
    return torch.tensor(ids)


def zero_copy_rate(n_bytes: int = 2 * GIB) -> float:
    """Bytes a second at which a kernel reads pinned memory."""
    pinned = torch.zeros(n_bytes // 8, dtype=torch.int64).pin_memory()
    seen = zero_copy(pinned)
    return n_bytes / wall_s(seen.sum, samples=3)


def _frozen(
    work: Callable[..., Any], model: Layers, x: torch.Tensor, ids: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Seconds of the captured pass with these routes, and its output."""
    model.ids.copy_(ids)
    seconds = wall_s(lambda: work(x))
    return seconds, work(x).cpu()


def layers_of_30b(group: Any, *, objective: str = "exact") -> None:
    """128 x 8 of 2048 x 768, 48 layers (57 GB) in 16 GiB, batch 1, planted hit rates."""
    model, name = Layers().eval(), f"{LAYERS} layers of 128 experts, {objective}"
    fill(model)
    x = torch.randn(1, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    rate = zero_copy_rate()
    made = plan(model, vram=IN_VRAM, machine=group.machine, captured=True, objective=objective)
    found: dict[float, tuple[torch.Tensor, float, torch.Tensor, int]] = {}
    with torch.inference_mode(), group.vram.capped(IN_VRAM):
        handle = place(model, made)
        try:
            handle._builder.experts.cache.follows = False
            work = handle.captured(model, x)
            for hit_rate in HIT_RATES:
                ids, before = route(handle, hit_rate), handle.report().experts.rate
                seconds, output = _frozen(work, model, x, ids)
                after = handle.report().experts.rate
                seen = (after.hits - before.hits) / (after.chosen - before.chosen)
                group.board.figure(f"{name}, planted {hit_rate}: measured hit rate", seen, "share")
                missing = (1 - seen) * LAYERS * CHOSEN * handle._builder.experts.cache.place_bytes
                found[hit_rate] = ids, seconds, output, missing
            _zipf(group, handle, work, model, x, name)
            group.board.line({"case": name, "vram": group.vram.peak(), "plan": str(made.experts)})
        finally:
            handle.remove()
    del handle
    free()
    _against_resident(group, model, x, made, found, rate, name)
    if objective == "exact":  # last: what accelerate has held isn't placed again
        for other, other_s in _by_accelerate(group, model, x, found[0.0][0]).items():
            for hit_rate, (_, seconds, _, _) in found.items():
                title = f"{name}, hit rate {hit_rate}: {other} over ours"
                group.board.bar(title, other_s / seconds, 10, "x", at_least=True)


def _against_resident(
    group: Any,
    model: Layers,
    x: torch.Tensor,
    made: Plan,
    found: dict[float, tuple[torch.Tensor, float, torch.Tensor, int]],
    rate: float,
    name: str,
) -> None:
    """The bars: against the same kernels with every expert in VRAM."""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    resident = replace(
        made,
        vram_budget=0,  # by hand: the same tiers, and a cache for all
        host_budget=0,
        experts=replace(made.experts, cache_bytes=whole + GIB),
    )
    with torch.inference_mode():
        handle = place(model, resident)
        try:
            handle._builder.experts.cache.follows = False
            work = handle.captured(model, x)
            for hit_rate, (ids, seconds, output, missing) in found.items():
                resident_s, wanted = _frozen(work, model, x, ids)
                limit = missing / rate + resident_s
                group.board.bar(
                    f"{name}, hit rate {hit_rate}: over missing bytes / zero-copy rate + resident",
                    seconds / limit,
                    1.15,
                    "x",
                    seconds=seconds,
                    resident_s=resident_s,
                    missing_bytes=int(missing),
                    zero_copy_rate=rate,
                    predicted_s=made.experts.seconds(hit_rate),
                )
                bits = differing_bits(output, wanted)
                group.board.bar(f"{name}, hit rate {hit_rate}: differing bits", bits, 0, "elements")
        finally:
            handle.remove()
    free()


def _zipf(
    group: Any, handle: Handle, work: Callable[..., Any], model: Layers, x: torch.Tensor, name: str
) -> None:
    """Passes whose routes are drawn from a Zipf distribution, while the cache follows them."""
    handle._builder.experts.cache.follows = True
    draw = torch.Generator().manual_seed(3)
    weights = torch.stack([1 / (torch.randperm(EXPERTS, generator=draw) + 1.0) for _ in range(LAYERS)])
    times, rates = [], []
    for step in range(ZIPF_PASSES):
        model.ids.copy_(torch.multinomial(weights, CHOSEN, generator=draw)[:, None])
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work(x)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        if step % 50 == 49:
            rates.append(handle.report().experts.rate)
    late = (rates[-1].hits - rates[-2].hits) / (rates[-1].chosen - rates[-2].chosen)
    group.board.figure(f"{name}, Zipf routes: hit rate of the last 50 of 200 passes", late, "share")
    group.board.figure(f"{name}, Zipf routes: median of those passes", median(times[-50:]) * 1e3, "ms")


def _by_accelerate(group: Any, model: Layers, x: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    """Seconds of a pass by accelerate in the same VRAM, with pageable and with pinned memory."""
    from placing_peers import accelerated

    found = {}
    model.ids.copy_(ids)
    for name, pinned in (("accelerate", False), ("accelerate, pinned", True)):
        whole, margin = ("Qwen3MoeExperts",), min(3 * GIB, IN_VRAM // 4)
        try:
            with (
                torch.inference_mode(),
                group.vram.capped(IN_VRAM),
                accelerated(model, IN_VRAM, pinned=pinned, whole=whole, margin=margin) as other,
            ):
                found[name] = wall_s(lambda other=other: other(x), samples=2)
        except (RuntimeError, ValueError) as error:
            group.board.line({"case": name, "error": f"{type(error).__name__}: {error}"[:300]})
        model.to("cpu")
        free()
    return found


def mixtral_shaped() -> Model:
    """Mixtral's layers of 8 experts of 4096 x 14336, 6 of them: 18 GB."""

    def build() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(MixtralConfig(num_hidden_layers=6))

    return Model(
        "Mixtral, 6 layers", build, tokens_of(32000, 32, use_cache=False), lambda o: o.logits, tokens=32
    )


def qwen3_shaped() -> Model:
    """Layers of Qwen3-30B-A3B, 12 of them: 16 GB."""

    def build() -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                hidden_size=WIDTH,
                moe_intermediate_size=INNER,
                num_experts=EXPERTS,
                num_experts_per_tok=CHOSEN,
                num_hidden_layers=12,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,
                norm_topk_prob=True,
                vocab_size=151936,
            )
        )

    return Model(
        "Qwen3-MoE, 12 layers", build, tokens_of(151936, 32, use_cache=False), lambda o: o.logits, tokens=32
    )


def whole_models(group: Any) -> None:
    """Decoding in 0.3 of a model's bytes: the table, streaming all experts, accelerate pinned and default."""
    for make in (mixtral_shaped, qwen3_shaped):
        with group.tried(make.__name__):
            _whole_model(group, make())
            free()


def _whole_model(group: Any, model: Model) -> None:
    from placing_peers import accelerated

    bench = group.bench(model)
    bench.module.set_experts_implementation("batched_mm")
    ids = bench.model.inputs(1, bench.device)["input_ids"][:, :8]  # a prompt whose chosen experts fit beside
    budget = int(SHARE * sum(parameter.nbytes for parameter in bench.module.parameters()))
    with torch.inference_mode():
        resident_s, wanted = decoded(bench.module, ids, lambda step: captured(step)[0])
    bench.module.to("cpu")
    free()
    made = plan(
        bench.module, vram=budget, machine=bench.machine, tokens=ids.shape[1], context=ROOM, captured=True
    )
    took: dict[str, float] = {"all resident, captured": resident_s}
    with bench.placed(made) as handle:
        took["table"], tokens = decoded(bench.module, ids, handle.captured)
        rate = handle.report().experts
        group.board.line({"case": model.name, "vram": group.vram.peak(), "experts": str(rate)})
    group.board.bar(
        f"{model.name} in 0.3 of its bytes: other tokens", int((tokens != wanted).sum()), 0, "tokens"
    )
    streaming = plan(
        bench.module, vram=budget, machine=bench.machine, tokens=4096, captured=False
    )  # of so many tokens that whole layers stream
    for name, work in (("streaming all experts", streaming),):
        try:
            with bench.placed(work):
                took[name], _ = decoded(bench.module, ids, lambda step: step)
        except (PlacementError, torch.cuda.OutOfMemoryError) as error:
            group.board.line({"case": f"{model.name}, {name}", "error": str(error)[:300]})
    for name, pinned in (("accelerate", False), ("accelerate, pinned", True)):
        with (
            group.vram.capped(budget),
            accelerated(
                bench.module,
                budget,
                pinned=pinned,
                whole=("MixtralExperts", "Qwen3MoeExperts"),
                margin=min(3 * GIB, budget // 2),
            ) as other,
        ):
            took[name], _ = decoded(other, ids, lambda step: step)
        bench.module.to("cpu")
        free()
    for name, seconds in took.items():
        group.board.figure(f"{model.name} in 0.3 of its bytes, {name}", NEW / seconds, "tokens/s")
    for name in ("accelerate", "accelerate, pinned"):
        group.board.figure(f"{model.name}: table over {name}", took[name] / took["table"], "x")


def experts(group: Any) -> None:
    """All of it."""
    for objective in ("exact", "fast"):
        with group.tried(f"{LAYERS} layers of 128 experts, {objective}"):
            layers_of_30b(group, objective=objective)
        free()
    whole_models(group)
