"""Experts one by one, without a GPU: what is counted, what the table says, and bits at planted hit rates.

Routes are planted: for the hit rates by what is in VRAM (here: the cache), for what the cache chooses by
itself
from a Zipf distribution over the experts of each layer in a shuffled order. The CPU gathers by torch
operations; tests/torch/test_experts.py runs the kernels, in Triton's interpreter.
"""

import ctypes
import time
from statistics import median

import torch
from board import Board
from expert_models import cache_of, experts_plan, placed, plant, qwen3_moe

LAYERS, EXPERTS, CHOSEN, TOKENS = 4, 64, 4, 10
HIT_RATES = (0.0, 0.5, 0.75, 0.9)
PASSES = 400
IMPLEMENTATIONS = ("batched_mm", "grouped_mm", "eager")


def bars(board: Board) -> None:
    """All of it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        _planted(board)
        _skewed(board)


def _model():
    changed = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    return qwen3_moe(**changed).bfloat16().eval()


def _planted(board: Board) -> None:
    """Hit rates, bits and the table, by every implementation of transformers."""
    ids = torch.randint(3, 90, (1, TOKENS))
    off, differing, wrong = 0.0, 0, 0
    for implementation in IMPLEMENTATIONS:
        for hit_rate in HIT_RATES:
            model = _model()
            model.set_experts_implementation(implementation)
            handle = placed(model, experts_plan(model, fit=LAYERS * EXPERTS // 2))
            wrong += _wrong_rows(handle)
            hits = round(hit_rate * TOKENS * CHOSEN)
            for layer in range(LAYERS):
                own = [cache_of(handle).is_cached(EXPERTS * layer + n) for n in range(EXPERTS)]
                there, away = ([n for n in range(EXPERTS) if own[n] is wanted] for wanted in (True, False))
                # in all tokens another expert, for grouped_mm and eager read each only once
                chosen = there[: min(hits, len(there))] + away[: TOKENS * CHOSEN - hits]
                chosen += there[: TOKENS * CHOSEN - len(chosen)]
                plant(model, layer, torch.tensor(chosen).view(TOKENS, CHOSEN))
            routes = [block.mlp.gate.routes for block in model.model.layers]
            output = model(ids).logits
            rate = handle.report().experts.rate
            planted = sum(
                cache_of(handle).is_cached(EXPERTS * layer + n)
                for layer, own in enumerate(routes)
                for n in (own.flatten() if implementation == "batched_mm" else own.unique()).tolist()
            )
            off = max(off, abs(rate.share - planted / rate.chosen))
            handle.remove()
            differing += int((output.view(torch.int16) != model(ids).logits.view(torch.int16)).sum())
    name = f"experts, {len(IMPLEMENTATIONS)} implementations x hit rates {HIT_RATES}"
    board.bar(f"{name}: differing bits against the unplaced model", differing, 0, "elements")
    board.bar(f"{name}: measured hit rate off the planted one", off, 0, "share")
    board.bar("experts: rows of the table that lead elsewhere", wrong, 0, "rows")


def _wrong_rows(handle) -> int:
    """Rows of the table at whose addresses there is something else than the expert's weights."""
    wrong, cache = 0, cache_of(handle)
    for n, expert in enumerate(cache._experts):
        for column, piece in enumerate(expert.slices):
            address = int(cache.table[n, column])
            there = (ctypes.c_uint8 * piece.n_bytes).from_address(address)
            wanted = expert.memory[piece.host :][: piece.n_bytes]
            wrong += not torch.equal(torch.frombuffer(there, dtype=torch.uint8), wanted)
    return wrong


def _skewed(board: Board) -> None:
    """What the cache reaches with Zipf routes, and what an update between two passes costs the host."""
    model = _model()
    model.set_experts_implementation("batched_mm")
    handle = placed(model, experts_plan(model, fit=LAYERS * EXPERTS // 4))
    draw = torch.Generator().manual_seed(3)
    weights = torch.stack([1 / (torch.randperm(EXPERTS, generator=draw) + 1.0) for _ in range(LAYERS)])
    token, times, before = torch.tensor([[5]]), [], None
    for step in range(PASSES):
        for layer, ids in enumerate(torch.multinomial(weights, CHOSEN, generator=draw)):
            plant(model, layer, ids[None])
        begun = time.perf_counter()
        handle.follow_experts()
        times.append(time.perf_counter() - begun)
        model(token)
        if step == PASSES // 2:
            before = handle.report().experts.rate
    after = handle.report().experts.rate
    late = (after.hits - before.hits) / (after.chosen - before.chosen)
    share = cache_of(handle).cached / (LAYERS * EXPERTS)
    board.figure("experts, Zipf routes: hit rate of the second half", late, "share", cached_share=share)
    board.bar("experts, Zipf routes: hit rate over the cached share", late / share, 2.0, "x", at_least=True)
    board.figure(
        "experts: an update between passes, host, median", median(times) * 1e6, "us", most=max(times) * 1e6
    )
    wrong = _wrong_rows(handle)
    board.bar("experts: rows that lead elsewhere after the updates", wrong, 0, "rows")
    handle.remove()
