"""Generation with Qwen2.5-3B: 64 tokens, resident and placed, eager by transformers' `generate` and as one
graph a token.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from placing_case import BUDGET, Bench
from placing_measure import captured, free
from placing_models import qwen_3b

from probes.placement import place
from probes.placement.models.inputs import cache_name

NEW = 64
TURNS = 9
ROOM = 128  # tokens that the cache has room for
ACCELERATE, ACCELERATE_PINNED = "accelerate device_map", "accelerate device_map, pinned"
MARGINS = (128 << 20, 256 << 20, 512 << 20, 1 << 30)  # of the budget, that accelerate gives no weights


def eager(
    model: Any, ids: torch.Tensor, *, samples: int = 5, new: int = NEW
) -> tuple[list[float], torch.Tensor]:
    """Seconds of each `generate` with its own growing cache, greedy, and the tokens."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    times, found = [], None
    for _ in range(samples):
        begun = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    assert found is not None
    return times, found[0, ids.shape[1] :].cpu()


class Decoder:
    """Greedy decoding with a cache of fixed size. A step reads and writes buffers that stay where they are,
    so it can be captured: token, position and cache are the same tensors each time.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        from transformers import StaticCache

        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=ROOM)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)

    def prefill(self, ids: torch.Tensor) -> None:
        """The prompt, and the first token."""
        self.cache.reset()
        places = torch.arange(ids.shape[1], device=ids.device)
        self._forward(ids, places)
        self.position.fill_(ids.shape[1])

    def step(self) -> None:
        """One more token."""
        self._forward(self.token, self.position)
        self.position.add_(1)

    def _forward(self, ids: torch.Tensor, places: torch.Tensor) -> None:
        logits = self.model(
            input_ids=ids,
            position_ids=places[None],
            cache_position=places,
            **{cache_name(self.model): self.cache},
            use_cache=True,
            attention_mask=self._mask(places),
            logits_to_keep=1,
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))

    def _mask(self, places: torch.Tensor) -> torch.Tensor:
        """Which of the cache's places each token sees: booleans (1, 1, tokens, ROOM)."""
        return (torch.arange(ROOM, device=places.device) <= places[:, None])[None, None]


def decoded(
    model: Any, ids: torch.Tensor, capture: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[float, torch.Tensor]:
    """Seconds for 64 tokens, the prompt's pass included, each step as `capture` makes it; and the tokens."""
    decoder = Decoder(model, ids.device)
    with torch.inference_mode():
        decoder.prefill(ids)
        step = capture(decoder.step)
        found = []
        for _ in range(3):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            decoder.prefill(ids)
            tokens = [decoder.token.clone()]
            for _ in range(NEW - 1):
                step()
                tokens.append(decoder.token.clone())
            torch.cuda.synchronize()
            found.append((time.perf_counter() - begun, torch.cat(tokens, 1)[0].cpu()))
    return sorted(found, key=lambda one: one[0])[1]


def qwen(group: Any) -> None:
    """The bars of Qwen2.5-3B."""
    bench: Bench = group.bench(qwen_3b())
    ids = bench.model.inputs(1, bench.device)["input_ids"]
    resident_s, placed_s, resident, placed = _in_turns(bench, ids)
    with torch.inference_mode():
        static_s, static = decoded(bench.module, ids, lambda step: captured(step)[0])
    bench.resident(1)
    tokens_per_s = {
        "all-resident, eager": NEW / median(resident_s),
        "all-resident, captured": NEW / static_s,
        "placed, eager": NEW / median(placed_s),
    }
    group.board.line({"case": "Qwen2.5-3B, eager samples", "resident_s": resident_s, "placed_s": placed_s})
    with bench.placed(bench.plan(1, "exact", context=ROOM)) as handle:
        graph_s, graph = decoded(bench.module, ids, handle.captured)
        tokens_per_s["placed, captured"] = NEW / graph_s
        group.board.line({"case": "Qwen2.5-3B, generate", "vram": group.vram.peak(), "budget": BUDGET})
    with bench.placed(bench.plan(1, "fast", context=ROOM)) as handle:
        fast_s, _ = decoded(bench.module, ids, handle.captured)
        tokens_per_s["placed, captured, fused"] = NEW / fast_s
    group.keep("Qwen2.5-3B, one pass of 32 tokens", bench.measure(bench.plan(1, "exact")), bench)
    others = {}
    for name, pinned in ((ACCELERATE, False), (ACCELERATE_PINNED, True)):
        tokens_per_s[name], others[name] = _accelerated(group, bench, ids, name, pinned=pinned)
    for name, rate in tokens_per_s.items():
        group.board.figure(f"Qwen2.5-3B, {name}", rate, "tokens/s")
    _bars(group.board, tokens_per_s)
    group.board.figure("Qwen2.5-3B: different tokens among the 64", len(set(resident.tolist())), "tokens")
    group.board.bar("Qwen2.5-3B: other tokens, eager", int((placed != resident).sum()), 0, "tokens")
    group.board.bar("Qwen2.5-3B: other tokens, captured", int((graph != static).sum()), 0, "tokens")
    for name, tokens in others.items():
        group.board.bar(f"Qwen2.5-3B: other tokens, {name}", int((tokens != resident).sum()), 0, "tokens")


def _accelerated(
    group: Any, bench: Bench, ids: torch.Tensor, name: str, *, pinned: bool
) -> tuple[float, torch.Tensor]:
    """accelerate's tokens a second, warm, and its tokens; with as many weights in VRAM as it runs with."""
    from placing_peers import accelerated

    for margin in MARGINS:
        try:
            with (
                group.vram.capped(BUDGET),
                accelerated(
                    bench.module, BUDGET, pinned=pinned, whole=("Qwen2DecoderLayer",), margin=margin
                ) as dispatched,
            ):
                eager(dispatched, ids, samples=1, new=4)
                times, tokens = eager(dispatched, ids, samples=2)
                group.board.line({"case": f"Qwen2.5-3B, {name}", "samples_s": times, "margin_bytes": margin})
                return NEW / median(times), tokens
        except torch.cuda.OutOfMemoryError:
            group.board.line({"case": f"Qwen2.5-3B, {name}", "out_of_memory_with_margin_bytes": margin})
        finally:
            bench.module.to("cpu")
            free()
    raise RuntimeError(f"{name} runs out of memory with each margin: {MARGINS}")


def _in_turns(bench: Bench, ids: torch.Tensor) -> tuple[list[float], list[float], torch.Tensor, torch.Tensor]:
    """Seconds of eager `generate` by the whole model and by a placed copy of it, and the tokens of both.

    In turns: both are bound by the host, whose speed changes by a third within a minute. The copy has the
    budget for itself, less what libraries took for the whole model already.
    """
    made = bench.plan(1, "exact", context=ROOM, captured=False)
    copy = deepcopy(bench.module).to("cpu")
    free()
    eager(bench.module, ids, samples=1)
    resident_s, placed_s = [], []
    with bench.vram.capped(torch.cuda.memory_reserved() + BUDGET - made.vram.workspace):
        handle = place(copy, made)
        try:
            _, placed = eager(copy, ids, samples=2)
            for _ in range(TURNS):
                seconds, resident = eager(bench.module, ids, samples=1)
                resident_s += seconds
                placed_s += eager(copy, ids, samples=1)[0]
        finally:
            handle.remove()
    del handle, copy
    free()
    return resident_s, placed_s, resident, placed


def _bars(board: Any, rates: dict[str, float]) -> None:
    base = rates["all-resident, eager"]
    best = max(rates["placed, captured"], rates["placed, captured, fused"])
    board.bar(
        "Qwen2.5-3B: placed over resident, eager", rates["placed, eager"] / base, 0.85, "x", at_least=True
    )
    exact = rates["placed, captured"]
    board.bar("Qwen2.5-3B: captured (same bits) over resident eager", exact / base, 2.0, "x", at_least=True)
    board.bar("Qwen2.5-3B: captured over resident eager", best / base, 2.0, "x", at_least=True)
    for name in (ACCELERATE, ACCELERATE_PINNED):
        board.bar(
            f"Qwen2.5-3B: captured (same bits) over {name}", exact / rates[name], 12.0, "x", at_least=True
        )
    whole = rates["all-resident, captured"]
    board.figure("Qwen2.5-3B: captured (same bits) over all-resident, captured", exact / whole, "x")
    board.figure("Qwen2.5-3B: captured, fused, over all-resident, captured", best / whole, "x")
