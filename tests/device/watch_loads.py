"""Loads whose saturation is known beforehand; run as the watched command: `watch_loads.py KIND SECONDS`.

At the end it prints a line of JSON: what it did itself, by its own count.
"""

import json
import sys
import time
from collections.abc import Callable

import torch

SIDE = 8192
COPY_BYTES = 1 << 30
BATCH, TOKENS, WIDTH, LAYERS, WORDS = 16, 512, 1024, 12, 8192


def product() -> tuple[Callable[[], None], dict[str, float]]:
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(a, b), {"flop": 2.0 * SIDE**3}


def spin() -> tuple[Callable[[], None], dict[str, float]]:
    """One block of one thread, which waits: busy, and no work at all."""
    return lambda: torch.cuda._sleep(20_000_000), {}


def copy() -> tuple[Callable[[], None], dict[str, float]]:
    a = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return lambda: b.copy_(a), {"memory_bytes": 2.0 * COPY_BYTES}


def upload() -> tuple[Callable[[], None], dict[str, float]]:
    a = torch.empty(COPY_BYTES // 4, dtype=torch.uint8).pin_memory()
    b = torch.empty_like(a, device="cuda")
    return lambda: b.copy_(a, non_blocking=True), {"to_card_bytes": COPY_BYTES / 4}


def download() -> tuple[Callable[[], None], dict[str, float]]:
    a = torch.empty(COPY_BYTES // 4, dtype=torch.uint8).pin_memory()
    b = torch.empty_like(a, device="cuda")
    return lambda: a.copy_(b, non_blocking=True), {"from_card_bytes": COPY_BYTES / 4}


def train() -> tuple[Callable[[], None], dict[str, float]]:
    """A training step of a small transformer: bf16 autocast, AdamW, random words."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(WORDS, WIDTH),
        torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
        torch.nn.Linear(WIDTH, WORDS),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    words = torch.randint(WORDS, (BATCH, TOKENS), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = model(words)
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1).float(), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1) - WORDS * WIDTH
    return step, {"flop": 6.0 * weights * BATCH * TOKENS}


def fragments() -> tuple[Callable[[], None], dict[str, float]]:
    """Every second block of a filled cache is kept: half of what is reserved is unused, in pieces."""
    held = [torch.empty(4 << 20, device="cuda", dtype=torch.uint8) for _ in range(1024)]
    del held[::2]
    return lambda: time.sleep(0.05 if held else 1), {}


LOADS = {one.__name__: one for one in (product, spin, copy, upload, download, train, fragments)}


def main(kind: str, seconds: float) -> None:
    once, work = LOADS[kind]()
    once()
    torch.cuda.synchronize()
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        for _ in range(4):
            once()
        torch.cuda.synchronize()
        count += 4
    took = time.monotonic() - begun
    rates = {f"{name}_per_s": amount * count / took for name, amount in work.items()}
    print(json.dumps({"kind": kind, "begun_s": begun, "ended_s": begun + took, "count": count, **rates}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
