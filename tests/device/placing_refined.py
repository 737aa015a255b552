"""Plans refined by a measured pass, and passes held to their budget: `run_placement.sh --only refined`.

The cases were written down before the first run: every model of `models()`, eager and captured, in 0.6 of its
bytes (or in the smallest budget that can be planned, if larger), the allocator capped at it. All are shown.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from placing_case import Bench
from placing_measure import differing_bits, free, wall_s
from placing_models import Model, bert, dit, experts, gpt2_xl, qwen_3b, tokens_of
from torch import nn

from probes.core.errors import PlacementError, PlanImpossible
from probes.placement import Plan, place

MIB = 1 << 20
SHARE, MORE = 0.6, 64 * MIB
OFF, EAGER = 0.07, 1.3  # the bars: share off after refining; eager over the larger of both references


class Recurrent(nn.Module):
    """An LSTM of 4 layers of 4096, in one module, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4096, 4096, 4, batch_first=True), nn.Linear(4096, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, tokens, 4096)."""
        return self.head(self.rnn(x)[0])


def recurrent() -> Model:
    """The LSTM, 32 steps."""
    return Model("LSTM, 4 layers of 4096", Recurrent, _numbers(32, 4096, "x"), tokens=32, std=0.01)


def _numbers(tokens: int, width: int, name: str) -> Callable[[int, torch.device], dict[str, Any]]:
    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        drawn = torch.Generator(device).manual_seed(1)
        x = torch.randn(batch, tokens, width, generator=drawn, device=device, dtype=torch.bfloat16)
        return {name: x}

    return inputs


def t5() -> Model:
    """T5-large: an encoder and a decoder of 24 layers."""

    def build() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
        return T5ForConditionalGeneration(T5Config(**sizes))

    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        ids = tokens_of(32128, 64)(batch, device)["input_ids"]
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}

    return Model("T5, large", build, inputs, lambda o: o.logits, tokens=64)


def whisper() -> Model:
    """Whisper of medium size: an encoder of 24 layers over 1,500 positions, a decoder over 64."""

    def build() -> nn.Module:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE.items()}
        return WhisperForConditionalGeneration(WhisperConfig(d_model=1024, **sides))

    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        drawn = torch.Generator(device).manual_seed(1)
        sound = torch.randn(batch, 80, 3000, generator=drawn, device=device, dtype=torch.bfloat16)
        ids = tokens_of(50000, 64)(batch, device)["input_ids"]
        return {"input_features": sound, "decoder_input_ids": ids, "use_cache": False}

    return Model("Whisper, medium", build, inputs, lambda o: o.logits, tokens=64)


_SIDE = {"layers": 24, "attention_heads": 16, "ffn_dim": 4096}


class _Down(nn.Module):
    """A convolution of half as many positions, between two that keep them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            (nn.Conv2d(before, after, 3, 2, 1), nn.Conv2d(after, after, 3, 1, 1))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(32, after) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.silu(norm(convolution(x)))
        return x


class Unet(nn.Module):
    """A UNet of convolutions, 320 to 1,280 channels, whose skipped outputs are used on the way up."""

    WIDTHS = (320, 640, 1280, 1280)

    def __init__(self) -> None:
        super().__init__()
        widths = self.WIDTHS
        self.first = nn.Conv2d(4, widths[0], 3, 1, 1)
        self.down = nn.ModuleList(map(_Down, widths, widths[1:]))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * after, before, 4, 2, 1)
            for before, after in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.last = nn.Conv2d(2 * widths[0], 4, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 4, 64, 64)."""
        kept = [self.first(x)]
        for block in self.down:
            kept.append(block(kept[-1]))
        x = kept[-1]
        for block in self.up:
            x = nn.functional.silu(block(torch.cat((x, kept.pop()), 1)))
        return self.last(torch.cat((x, kept.pop()), 1))


def unet() -> Model:
    """The UNet, 64 x 64 positions."""

    def inputs(batch: int, device: torch.device) -> dict[str, Any]:
        drawn = torch.Generator(device).manual_seed(1)
        return {"x": torch.randn(batch, 4, 64, 64, generator=drawn, device=device, dtype=torch.bfloat16)}

    return Model("UNet of convolutions", Unet, inputs)


def models() -> list[tuple[Model, int]]:
    """All models, each with its batch."""
    return [
        (bert(), 8),
        (gpt2_xl(), 1),
        (qwen_3b(), 1),
        (experts(), 1),
        (dit(), 1),
        (recurrent(), 1),
        (t5(), 2),
        (whisper(), 1),
        (unet(), 2),
    ]


def refined(group: Any) -> None:
    """Each model, and the bars over all."""
    rows: list[dict[str, Any]] = []
    for model, batch in models():
        with group.tried(model.name):
            rows += _model(group, model, batch)
        free()
    board = group.board
    for how in ("eager", "captured"):
        off = [row["off"] for row in rows if row["how"] == how and row["off"] is not None]
        slower = [row["after_over_before"] for row in rows if row["how"] == how and row["after_over_before"]]
        if off:
            board.bar(f"after refining, {how}: predicted time, worst", max(off), OFF, "share off")
            board.bar(f"after refining, {how}: over before, worst", max(slower), 1.0 + NOISE, "x")
    ran_out = sum(row["ran_out"] for row in rows)
    board.bar("out of memory with the cap at the budget", ran_out, 0, "cases")
    board.figure("passes done again with more room", sum(row["again"] for row in rows), "cases")
    eager = [row["eager_over"] for row in rows if row.get("eager_over")]
    if eager:
        board.bar("eager placed pass over the larger of its references, worst", max(eager), EAGER, "x")


NOISE = 0.02  # of two measurements of the same pass


def _model(group: Any, model: Model, batch: int) -> list[dict[str, Any]]:
    bench: Bench = group.bench(model)
    weights = sum(p.numel() * p.element_size() for p in bench.module.parameters())
    bench.resident(batch)
    rows = []
    for how in ("captured", "eager"):
        row = _case(group, bench, _tight(bench, batch, weights, how == "captured"), how)
        rows.append({"model": model.name, "how": how, **row})
    placed_s = rows[0]["after_s"]
    if placed_s and rows[1]["after_s"]:
        larger = max(bench.reference(batch).eager_s, placed_s)
        rows[1]["eager_over"] = rows[1]["after_s"] / larger
    for row in rows:
        group.board.line({"refined": f"{model.name}, {row['how']}", **row})
    return rows


def _tight(bench: Bench, batch: int, weights: int, captured: bool) -> Plan:
    budget = int(SHARE * weights)
    while True:
        try:
            return bench.plan(batch, "exact", budget=budget, captured=captured)
        except PlanImpossible:
            budget += MORE


def _case(group: Any, bench: Bench, made: Plan, how: str) -> dict[str, Any]:
    """One case, first as planned, then refined; under the budget as a cap."""
    batch = made.workload.batch
    row: dict[str, Any] = {"ran_out": 0, "again": 0, "off": None, "after_over_before": None, "after_s": None}
    row["budget"], row["predicted_s"] = made.vram_budget, made.time.middle_s
    for refine in (False, True):
        handle = None
        try:
            with group.vram.capped(made.vram_budget), warnings.catch_warnings(record=True) as said:
                begun = time.perf_counter()
                handle = place(bench.module, made, capture=how == "captured", refine=refine and bench.machine)
                one = bench.one_pass(batch)
                for _ in range(4):
                    output = bench.model.output(one())
                row["placing_s"] = time.perf_counter() - begun
                seconds, peak = wall_s(one), group.vram.peak()
            row["again"] += len(said)
            row["after_s" if refine else "before_s"] = seconds
            row["peak_over_budget"] = peak["reserved"] / made.vram_budget
            reference = bench.reference(batch)
            graph = how == "captured" and handle.recorder and handle.recorder.count
            expected = reference.captured_output if graph else None
            bits = differing_bits(output.cpu(), reference.output if expected is None else expected)
            group.board.bar(
                f"{bench.model.name}, {how}, refine {refine}: differing bits", bits, 0, "elements"
            )
            if refine:
                row["refined"] = list(handle.report().events)
                row["off"] = abs(handle.plan.time.middle_s / seconds - 1)
                row["after_over_before"] = seconds / row["before_s"] if row.get("before_s") else None
        except torch.cuda.OutOfMemoryError as error:
            row["ran_out"], row["error"] = 1, str(error)[:300]
        except PlacementError as error:
            row["error"] = str(error)[:300]
        finally:
            if handle is not None:
                handle.remove()
            del handle
            free()
    return row
