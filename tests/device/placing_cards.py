"""Models over two cards: the same bits as on one, the links alone and together, a pass against one card.

Run from the repository root on a machine with two GPUs: python tests/device/placing_cards.py --out FOLDER
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from probes.placement import CardsPlan, Plan, place, plan, plan_cards

GIB = 1 << 30
SMALL = bool(os.environ.get("WEIR_TRY"))  # to try the code on a CPU
WIDTH, LAYERS = (64, 12) if SMALL else (8192, 24)
DEVICE = "cpu" if SMALL else "cuda:0"
COPIED = 1 << (16 if SMALL else 28)


class Linears(nn.Module):
    """Square layers, one after another; with `skips`, the code between them adds an earlier output."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)
        )
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=(2.0 / WIDTH) ** 0.5)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        kept = [x]
        for layer in self.layers:
            kept.append(torch.relu(layer(kept[-1])))
            if self.skips and len(kept) % 4 == 0:
                kept[-1] = kept[-1] + kept[-4]
        return kept[-1]


def wait() -> None:
    """For every GPU."""
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)


def wall_s(work: Callable[[], object], times: int = 9) -> float:
    """Median seconds of a pass, after three."""
    for _ in range(3):
        work()
    found = []
    for _ in range(times):
        wait()
        began = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - began)
    return median(found)


def links() -> dict[str, float]:
    """GB/s from pinned host memory to each card alone, and to both at once."""
    if SMALL:
        return {}
    host = [torch.empty(COPIED, dtype=torch.uint8).pin_memory() for _ in range(2)]
    card = [torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2)]
    streams = [torch.cuda.Stream(i) for i in range(2)]

    def copy(*numbers: int) -> None:
        for _ in range(4):
            for i in numbers:
                with torch.cuda.stream(streams[i]):
                    card[i].copy_(host[i], non_blocking=True)

    found = {}
    for name, numbers in (("card 1", (0,)), ("card 2", (1,)), ("both", (0, 1))):
        seconds = wall_s(lambda numbers=numbers: copy(*numbers))
        found[name] = 4 * len(numbers) * COPIED / seconds / 1e9
    return found


def run(model: nn.Module, made: Plan | CardsPlan, x: torch.Tensor, want: torch.Tensor) -> dict[str, Any]:
    """Place, compare bits, time, give back."""
    handle = place(model, made, **({"device": "cpu"} if SMALL else {}))
    with torch.inference_mode():
        same = [bool(torch.equal(model(x).cpu(), want)) for _ in range(4)]
        seconds = wall_s(lambda: model(x))
    parts = handle.cards if isinstance(made, CardsPlan) else [handle]
    row = {
        "wall_ms": round(seconds * 1e3, 3),
        "predicted_ms": round(made.time.middle_s * 1e3, 3),
        "same_bits": all(same),
        "vram_gib": [round(one.report().vram_taken / GIB, 2) for one in parts],
        "pinned_gib": [round(one.report().pinned_taken / GIB, 2) for one in parts],
        "numa_nodes": [str(host.node if (host := one._builder.host) else "none") for one in parts],
        "tiers": [{use.tier: use.blocks for use in one.report().tiers} for one in parts],
    }
    handle.remove()
    if not SMALL:
        torch.cuda.empty_cache()
        row["left_bytes"] = [torch.cuda.memory_allocated(i) for i in range(2)]
    return row


def generated() -> dict[str, Any]:
    """Greedy tokens of a language model over two cards, with a cache that grows."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=64 if SMALL else 1536,
        num_hidden_layers=4 if SMALL else 28,
        num_attention_heads=4 if SMALL else 12,
        num_key_value_heads=2,
        intermediate_size=128 if SMALL else 8960,
        vocab_size=1000 if SMALL else 151936,
        dtype="bfloat16",
    )
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False).to(DEVICE)
    model.generation_config.pad_token_id = 0
    prompt = torch.randint(0, 1000, (1, 16), device=DEVICE)

    def tokens() -> list[int]:
        with torch.inference_mode():
            return model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0].tolist()

    want = tokens()
    model.to("cpu")
    vram = 2 * GIB
    made = plan_cards(model, cards=2, vram=vram, machine="h200", batch=1, tokens=16, context=64)
    handle = place(model, made, **({"device": "cpu"} if SMALL else {}))
    same = [tokens() == want for _ in range(2)]
    began = time.perf_counter()
    tokens()
    row = {"same_tokens": all(same), "tokens_s": round(24 / (time.perf_counter() - began), 1)}
    row["tiers"] = [{use.tier: use.blocks for use in one.report().tiers} for one in handle.cards]
    handle.remove()
    return row


def compared(model: Linears, batch: int) -> dict[str, Any]:
    """Everything on one card, then placed over two and, without skips, on one."""
    x = torch.randn(batch, WIDTH, device=DEVICE).bfloat16()
    said = f"batch {batch}, skips {model.skips}"
    model.to(DEVICE)
    with torch.inference_mode():
        want = model(x).cpu()
        resident = wall_s(lambda: model(x))
    rows: dict[str, Any] = {f"all resident on card 1, {said}": {"wall_ms": round(resident * 1e3, 3)}}
    print(*rows.items(), flush=True)
    model.to("cpu")
    cases: list[tuple[str, Plan | CardsPlan]] = [
        (f"2 cards, {n} GiB each", plan_cards(model, cards=2, vram=n * GIB, machine="h200", batch=batch))
        for n in (4, 1)
    ]
    if not model.skips:
        cases += [
            (f"1 card, {n} GiB", plan(model, vram=n * GIB, machine="h200", batch=batch)) for n in (1, 2)
        ]
    for name, made in cases:
        rows[f"{name}, {said}"] = run(model, made, x, want)
        print(name, said, rows[f"{name}, {said}"], flush=True)
    return rows


def main() -> None:
    """A line for each measurement; OUT/cards.json has them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: dict[str, Any] = {"links_gb_s": links()}
    print("links, GB/s:", rows["links_gb_s"], flush=True)
    for skips in (False, True):
        torch.manual_seed(1)
        model = Linears(skips=skips).eval().requires_grad_(False)
        for batch in (1, 256):
            rows |= compared(model, batch)
        del model
    rows["generate"] = generated()
    print("generate", rows["generate"], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "cards.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
