"""Training in 0.40 of plain VRAM, measured: see run_training_beyond.sh.

Plain is torch's own loop with `AdamW(fused=True)` under autocast to bfloat16. VRAM is the most bytes that
torch's allocator had handed out during steps (`max_memory_allocated`), for plain and ours alike; what it had
reserved is beside it. A step's time is the mean over a run of steps behind one another, the median of 3 runs,
after 2 steps. Batches were written down before the first run: 8, 16, 32 images; 1, 2, 4 sequences of 1,024
tokens.
"""

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from board import Board, tell
from torch import nn
from training_models import Case, qwen, vit, with_lora

from probes.placement import PlanImpossible, Training, TrainingPlan, plan_training, train
from probes.placement.planner.machine import nearest_profile, profile
from probes.placement.training.step_time import Begins, StepTime, step_time, traced_step

DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # the CPU only rehearses --smoke: its figures say nothing
SHARE = 0.40
AMP = torch.bfloat16
GIB = 1 << 30
PARTS = ("vit", "qwen", "half", "losses", "peers", "lora", "predict")


def _finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if DEVICE == "cpu":
        return
    _finish()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    torch.cuda.reset_peak_memory_stats()


def link_rates() -> dict[str, float]:
    """Bytes a second to the card, to the host, and each way while both are busy: 1 GiB in pinned memory."""
    if DEVICE == "cpu":
        return {"to_card": 1e9, "to_host": 1e9, "two_way": 1e9}
    n = GIB
    up, down = (torch.empty(n, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, back = (torch.empty(n, dtype=torch.uint8, device="cuda") for _ in range(2))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def timed(*ways: str) -> float:
        found = []
        for _ in range(4):
            _finish()
            begun = time.perf_counter()
            for _ in range(4):
                if "up" in ways:
                    with torch.cuda.stream(one):
                        there.copy_(up, non_blocking=True)
                if "down" in ways:
                    with torch.cuda.stream(other):
                        down.copy_(back, non_blocking=True)
            _finish()
            found.append((time.perf_counter() - begun) / 4)
        return n / statistics.median(found[1:])

    rates = {"to_card": timed("up"), "to_host": timed("down"), "two_way": timed("up", "down")}
    free()
    return rates


class Loop:
    """An ordinary training loop."""

    def __init__(self, case: Case, size: int, optimizer: Any) -> None:
        self.case, self.optimizer = case, optimizer
        self.given = case.batch(size, 0)

    def step(self, given: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=AMP):
            loss = self.case.loss(self.case.model, given or self.given)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def seconds(self, *, runs: int, least_s: float) -> float:
        for _ in range(2):
            self.step()
        _finish()
        begun = time.perf_counter()
        self.step()
        _finish()
        times = max(2, min(30, round(least_s / (time.perf_counter() - begun))))
        found = []
        for _ in range(runs):
            begun = time.perf_counter()
            for _ in range(times):
                self.step()
            _finish()
            found.append((time.perf_counter() - begun) / times)
        return statistics.median(found)


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, **more)


class Bench:
    def __init__(self, board: Board, *, smoke: bool, steps: int) -> None:
        self.board, self.smoke, self.steps = board, smoke, steps
        self.link = link_rates()
        self.quick = {"runs": 1, "least_s": 0.05} if smoke else {"runs": 3, "least_s": 0.5}
        for name, rate in self.link.items():
            board.figure(f"link, {name}", rate / 1e9, "GB/s")

    # ---- plain and ours ----------------------------------------------------------------------------------

    def plain(self, case: Case, size: int) -> dict[str, float]:
        free()
        optimizer = adamw(case.model, fused=True)
        loop = Loop(case, size, optimizer)
        seconds = loop.seconds(**self.quick)
        found = {
            "step_s": seconds,
            **_vram(),
        }
        del loop, optimizer
        case.model.zero_grad()
        free()
        return found

    def predicted(self, case: Case, size: int, *, measure: bool) -> StepTime:
        """A plain step by the card's profile, or with each of its operations as measured here."""
        given = case.batch(size, 0)

        def step(begins: Begins) -> None:
            optimizer = adamw(case.model, fused=True)
            for _ in range(2):
                begins("forward")
                with torch.autocast(DEVICE, dtype=AMP):
                    loss = case.loss(case.model, given)
                begins("backward")
                loss.backward()
                begins("optimizer")
                optimizer.step()
                optimizer.zero_grad()

        name = torch.cuda.get_device_name(0) if DEVICE == "cuda" else "NVIDIA H200"
        device = torch.device("cuda", 0) if DEVICE == "cuda" else torch.device("cpu")
        work = traced_step(case.model, step, DEVICE, measure=device if measure else None)
        return step_time(work, profile(nearest_profile(name, "sm_90")))

    @contextmanager
    def ours(self, case: Case, size: int, vram: int, **more: Any) -> Iterator[tuple[Training, Loop]]:
        free()
        optimizer = adamw(case.model, fused=True)
        given = case.batch(size, 0)
        begun = time.perf_counter()

        def planned_for(budget: int) -> TrainingPlan:
            return plan_training(
                case.model,
                optimizer,
                budget,
                lambda model: case.loss(model, given),
                autocast=AMP,
                link=self.link["two_way"],
                **more,
            )

        plan = planned_for(_least(planned_for) if self.smoke else vram)
        planned = time.perf_counter()
        training = train(case.model, optimizer, plan)
        tell(f"planned in {planned - begun:.1f} s, placed in {time.perf_counter() - planned:.1f} s")
        free()
        try:
            yield training, Loop(case, size, optimizer)
        finally:
            training.remove()
            optimizer.state.clear()
            case.model.zero_grad()

    def beyond(self, case: Case, size: int, *, limit: float, half: bool = False) -> None:
        """One batch: plain, then ours in 0.40 of its VRAM."""
        if half:
            case.model.checkpointing = True  # plain fits the card with it only; our plan chooses by itself
        plain = self.plain(case, size)
        vram = int(SHARE * plain["allocated"])
        time_ = self.predicted(case, size, measure=False)
        busy = time_.forward_s + time_.backward_s
        rate = time_.flops / (
            plain["step_s"] * busy / (busy + time_.optimizer_s)
        )  # of this card, in this model
        if half:
            case.model.checkpointing = False
        try:
            with self.ours(case, size, vram, rate=rate) as (training, loop):
                seconds = loop.seconds(**self.quick)
                use = training.plan
                peak = _vram()["allocated"]
                reserved = _vram()["reserved"]
        except PlanImpossible as error:
            self.board.bar(
                f"{case.name}, batch {size}: step in {SHARE} of plain VRAM",
                1e9,
                limit,
                "x",
                failed=error.message,
            )
            return
        crossing = max(use.to_card_bytes, use.to_host_bytes) / self.link["two_way"]
        of = plain["step_s"] if half else max(plain["step_s"], crossing)
        facts = {
            "plain_ms": plain["step_s"] * 1e3,
            "ours_ms": seconds * 1e3,
            "crossing_ms": crossing * 1e3,
            "plan_predicted_ms": use.predicted_s * 1e3,
            "states_in_vram": sum(b.states == "vram" for b in use.blocks),
            "recomputed": sum(b.activations != "kept" for b in use.blocks),
            "moved": sum(b.activations == "moved" for b in use.blocks),
            "blocks": len(use.blocks),
            "plain_gib": plain["allocated"] / GIB,
            "ours_gib": peak / GIB,
            "planned_gib": use.vram.total / GIB,
            "plain_reserved_gib": plain["reserved"] / GIB,
            "ours_reserved_gib": reserved / GIB,
        }
        what = "plain step" if half else "max(plain step, crossing)"
        self.board.bar(f"{case.name}, batch {size}: step over {what}", seconds / of, limit, "x", **facts)
        if not self.smoke:
            share = peak / plain["allocated"]
            self.board.bar(f"{case.name}, batch {size}: VRAM over plain", share, SHARE, "x")

    # ---- parts ---------------------------------------------------------------------------------------------

    def vit(self) -> None:
        case = vit(DEVICE, small=self.smoke)
        for size in (2,) if self.smoke else (8, 16, 32):
            self.beyond(case, size, limit=1.15)

    def qwen(self) -> None:
        case = qwen(DEVICE, small=self.smoke)
        for size in (2,) if self.smoke else (1, 2, 4):
            self.beyond(case, size, limit=1.15)

    def half(self) -> None:
        """The batch at which a plan's traffic takes half the plain step, by a step at batch 32.

        Plain doesn't fit in 80 GB there as it is, so plain recomputes all blocks' activations.
        """
        case = vit(DEVICE, small=self.smoke, checkpointing=True)
        if self.smoke:
            return self.beyond(case, 2, limit=1.10, half=True)
        free()
        optimizer = adamw(case.model, fused=True)
        each = Loop(case, 32, optimizer).seconds(runs=1, least_s=0.3) / 32
        del optimizer
        case.model.zero_grad()
        trained = sum(p.nbytes for p in case.model.parameters())
        size = 8 * round(2 * 3 * trained / self.link["two_way"] / each / 8)
        self.beyond(case, size, limit=1.10, half=True)
        return None

    def losses(self) -> None:
        """Both loops from the same weights on the same batches, with torch's deterministic algorithms."""
        torch.use_deterministic_algorithms(True)  # warn_only leaves attention's backward pass as it was
        try:
            for make, size in ((vit, 4), (qwen, 1)):
                steps = 4 if self.smoke else self.steps
                case = make(DEVICE, small=self.smoke)
                before = {k: v.cpu().clone() for k, v in case.model.state_dict().items()}
                plain = self._curve(case, size, adamw(case.model, fused=True), steps)
                peak = _vram()["allocated"]
                case.model.load_state_dict(before)
                del before
                case.model.zero_grad()
                vram = int(SHARE * peak)
                with self.ours(case, size, vram) as (training, loop):
                    ours = self._curve(case, size, loop.optimizer, steps)
                    streamed = sum(b.states == "host" for b in training.plan.blocks)
                differ = sum(a != b for a, b in zip(plain, ours, strict=True))
                worst = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
                self.board.bar(
                    f"{case.name}: losses that differ in {steps} steps",
                    differ,
                    0,
                    "steps",
                    worst=worst,
                    first=plain[0],
                    last=plain[-1],
                    streamed_blocks=streamed,
                )
                del case, training, loop
        finally:
            torch.use_deterministic_algorithms(False)

    def _curve(self, case: Case, size: int, optimizer: Any, steps: int) -> list[float]:
        free()
        loop = Loop(case, size, optimizer)
        found = [loop.step(case.batch(size, seed)) for seed in range(steps)]
        return [float(loss) for loss in found]

    def peers(self) -> None:
        """The ViT at batch 16: torchao's offloaded optimizer, FSDP2 with CPU offload, and ours in 0.40."""
        size = 2 if self.smoke else 16
        case = vit(DEVICE, small=self.smoke)
        plain = self.plain(case, size)
        rows = {"plain": plain}
        vram = int(SHARE * plain["allocated"])
        with self.ours(case, size, vram) as (_, loop):
            rows["ours"] = {"step_s": loop.seconds(**self.quick)} | _vram()
        del loop
        for name, run in (("torchao CPUOffloadOptimizer", self._torchao), ("FSDP2 CPU offload", self._fsdp)):
            try:
                rows[name] = run(case, size)
            except Exception as error:  # a peer that fails is a row that says so
                self.board.waive(f"beside {name}", f"{type(error).__name__}: {str(error)[:300]}")
                traceback.print_exc()
            free()
        for name, row in rows.items():
            self.board.figure(
                f"{case.name}, batch {size}: {name}",
                row["step_s"] * 1e3,
                "ms",
                gib=row["allocated"] / GIB,
                reserved_gib=row["reserved"] / GIB,
            )
            if name not in ("plain", "ours"):
                ratio = rows["ours"]["step_s"] / row["step_s"]
                self.board.bar(f"ours over {name}", ratio, 1.0, "x")

    def _torchao(self, case: Case, size: int) -> dict[str, float]:
        from torchao.optim import CPUOffloadOptimizer

        free()
        trained = [p for p in case.model.parameters() if p.requires_grad]
        optimizer = CPUOffloadOptimizer(trained, torch.optim.AdamW, lr=1e-4, fused=True)
        found = {"step_s": Loop(case, size, optimizer).seconds(**self.quick)} | _vram()
        case.model.zero_grad()
        for parameter in trained:
            parameter._post_accumulate_grad_hooks = None
        return found

    def _fsdp(self, case: Case, size: int) -> dict[str, float]:
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # a host's name may lead nowhere
            os.environ.setdefault(name, "lo")
        store = dist.HashStore()
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if DEVICE == "cuda" else "gloo", store=store, rank=0, world_size=1
        )
        try:
            case.model.to("cpu")
            free()
            policy = {
                "mp_policy": MixedPrecisionPolicy(param_dtype=AMP, reduce_dtype=torch.float32),
                "offload_policy": CPUOffloadPolicy(),
            }
            for layer in case.model.layers:
                fully_shard(layer, **policy)
            fully_shard(case.model, **policy)
            return {"step_s": Loop(case, size, adamw(case.model, fused=True)).seconds(**self.quick)} | _vram()
        finally:
            dist.destroy_process_group()

    def predict(self) -> None:
        """Plain steps beside their predictions, by the card's profile and by their operations."""
        for make, sizes in ((vit, (8, 16, 32)), (qwen, (1, 2, 4))):
            case = make(DEVICE, small=self.smoke)
            for size in (2,) if self.smoke else sizes:
                taken = self.plain(case, size)["step_s"]
                facts: dict[str, float] = {}
                for how in ("profile", "operations"):
                    time_ = self.predicted(case, size, measure=how == "operations")
                    facts[f"off_by_{how}"] = round(time_.step_s / taken - 1, 3)
                    for part in ("step", "forward", "backward", "optimizer", "host"):
                        facts[f"predicted_by_{how}_{part}_ms"] = round(getattr(time_, f"{part}_s") * 1e3, 2)
                    free()
                what = f"{case.name}, batch {size}: plain step, measured"
                self.board.figure(what, taken * 1e3, "ms", **facts)
            del case

    def lora(self) -> None:
        """Qwen2.5-3B in bfloat16, adapters of rank 16 in float32, 1,024 tokens, batch 1, in 4 GiB."""
        case = with_lora(qwen(DEVICE, small=self.smoke, billions="3"))
        plain = self.plain(case, 1)
        vram = 4 * GIB
        with self.ours(case, 1, vram) as (training, loop):
            seconds = loop.seconds(**self.quick)
            peak, use = _vram()["allocated"], training.plan
            reserved = _vram()["reserved"]
        facts = {
            "resident_ms": plain["step_s"] * 1e3,
            "ours_ms": seconds * 1e3,
            "resident_gib": plain["allocated"] / GIB,
            "peak_gib": peak / GIB,
            "reserved_gib": reserved / GIB,
            "planned_gib": use.vram.total / GIB,
            "plan": str(use.vram),
            "packed_blocks": sum(b.frozen == "host" for b in use.blocks),
            "recomputed": sum(b.activations != "kept" for b in use.blocks),
            "to_card_gib": use.to_card_bytes / GIB,
            "crossing_ms": use.to_card_bytes / self.link["to_card"] * 1e3,
        }
        self.board.bar(f"{case.name}: step over resident", seconds / plain["step_s"], 1.5, "x", **facts)
        self.board.bar(f"{case.name}: peak in GiB", peak / GIB, vram / GIB, "GiB")
        off = abs(peak / use.vram.total - 1)
        self.board.bar(f"{case.name}: peak beside the plan's", off, 0.03 if not self.smoke else 1.0, "")


def _least(planned_for: Callable[[int], object]) -> int:
    """The least budget, in which everything that can moves: the smoke test's."""
    budget = 1 << 20
    while True:
        try:
            planned_for(budget)
            return budget
        except PlanImpossible as error:
            budget = max(budget + (1 << 20), int(error.hint.split("=")[1].split()[0]) << 20)


def _vram() -> dict[str, float]:
    if DEVICE == "cpu":
        return {"allocated": 80 << 20, "reserved": 80 << 20}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/training"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    failed = 0
    for part in args.only.split(","):
        begun = time.perf_counter()
        board = Board(
            f"training-{part}",
            command=f"tests/device/run_training_beyond.sh --only {part}",
            whole=not args.smoke,
            results=args.out / "bars",
        )
        board.figure(
            "card",
            torch.cuda.get_device_name(0) if DEVICE == "cuda" else "none: a rehearsal",
            "",
            torch=torch.__version__,
        )
        run: Callable[[], None]
        try:
            run = getattr(Bench(board, smoke=args.smoke, steps=args.steps), part)
            run()
        except Exception as error:  # the other parts go on
            traceback.print_exc()
            board.waive(part, f"failed: {type(error).__name__}: {str(error)[:500]}")
            failed = 1
        failed |= board.finish()
        gc.collect()
        tell(f"part {part}: {time.perf_counter() - begun:.0f} s")
        free()
    return failed


if __name__ == "__main__":
    sys.exit(main())
