"""Our loop and a loop as people write it, epoch by epoch in turns, on equal models and the same samples.

One rank; started by torchrun for several. A block is four epochs, ours, bare, bare, ours, and the next begins
with bare: so a machine that gets slower meets both alike. Epochs are short, and blocks many, since the speed
of a machine changes within seconds. Rank 0 prints a line of JSON: seconds of both in each block, ours first.

The bare loop reads no loss, keeps no time, and knows no signal: it is the fastest that can be written.
"""

import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from board import Board
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))

from probes.training.guard import Guard, StopAgreement
from probes.training.loop import HALVES, RATE, Trainer
from probes.training.models import Workload, loss_of, workload
from probes.training.report import Settings

WARM = 1  # blocks that aren't counted
WITHIN = 0.02


def judged(board: Board, name: str, printed: str) -> None:
    """The bars of what a run printed: the median of its blocks with its interval, and its parts' sum."""
    result = json.loads(printed.splitlines()[-1])
    ratios = sorted(ours / bare for ours, bare in result["blocks"])
    beside = round(0.98 * math.sqrt(len(ratios)))  # 95 % of medians are between these two, by the binomial
    middle = (len(ratios) - 1) / 2
    low, high = max(math.floor(middle) - beside, 0), min(math.ceil(middle) + beside, len(ratios) - 1)
    steps = 2 * result["steps"]  # of two epochs
    board.bar(
        f"{name}: our loop / bare loop, median of {len(ratios)} blocks of four epochs",
        statistics.median(ratios),
        1 + WITHIN,
        "ratio",
        interval=[round(ratios[low], 4), round(ratios[high], 4)],
        more_ms_a_step=round(1e3 * statistics.median(a - b for a, b in result["blocks"]) / steps, 3),
        step_ms=round(1e3 * statistics.median(b for _, b in result["blocks"]) / steps, 2),
        waiting_for_data=round(statistics.median(result["data"]), 3),
        samples_per_s=round(statistics.median(result["rate"]), 1),
        ratios=[round(ours / bare, 4) for ours, bare in result["blocks"]],
    )
    worst = max(abs(total - 1) for total in result["sums"])
    board.bar(f"{name}: |parts / wall - 1|, worst of {len(result['sums'])} epochs", worst, WITHIN, "ratio")


def bare(
    settings: Settings, work: Workload, device: torch.device, rank: int, world: int
) -> Callable[[int], None]:
    """What trains one epoch of this number."""
    module = work.module.to(device).train()
    if world > 1:
        module = DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "amp-fp16")
    sampler = DistributedSampler(work.samples, num_replicas=world, rank=rank, drop_last=True)
    loader = DataLoader(
        work.samples,
        batch_size=settings.batch,
        sampler=sampler,
        num_workers=settings.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        persistent_workers=settings.workers > 0,
    )
    half = HALVES.get(settings.precision)

    def epoch(number: int) -> None:
        sampler.set_epoch(number)
        for batch in loader:
            given = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            with torch.autocast(device.type, dtype=half, enabled=half is not None):
                loss = loss_of(module, given)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return epoch


def main() -> None:
    """MODEL BATCH PRECISION SAMPLES TOKENS BLOCKS WORKERS THREADS DEVICE."""
    model, batch, precision, samples, tokens, blocks, workers, threads, kind = sys.argv[1:]
    settings = Settings(
        model,
        batch=int(batch),
        precision=precision,
        samples=int(samples),
        tokens=int(tokens),
        workers=int(workers),
        device=kind,
        epochs=1,  # after it each epoch stands alone: no batch of ours is made in the bare loop's time
    )
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if kind == "gpu" else torch.device("cpu")
    if int(threads):
        torch.set_num_threads(int(threads))
    if kind == "gpu":
        torch.cuda.set_device(local)
    guard = Guard(rank, world, 300.0, lambda *_: os._exit(4))
    store = distributed.HashStore()
    if world > 1:
        found, _, _ = next(distributed.rendezvous("env://"))
        store = distributed.PrefixStore("weir", found)
        backend = "cpu:gloo,cuda:nccl" if kind == "gpu" else "gloo"
        distributed.init_process_group(
            backend, store=distributed.PrefixStore("group", found), rank=rank, world_size=world
        )
    guard.start()
    torch.manual_seed(1)
    ours = Trainer(settings, workload(settings, settings.samples), device, guard)
    torch.manual_seed(1)
    theirs = bare(settings, workload(settings, settings.samples), device, rank, world)
    agreement = StopAgreement(guard, store)

    def timed(epoch: Callable[[], object]) -> float:
        if world > 1:
            distributed.barrier()
        began = time.perf_counter()
        epoch()
        if world > 1:
            distributed.barrier()
        return time.perf_counter() - began

    def block(number: int) -> tuple[float, float]:
        each: dict[str, Callable[[], object]] = {
            "ours": lambda: ours.epoch(lambda: agreement.here(ours.place.step)),
            "bare": lambda: theirs(number),
        }
        outer, inner = ("bare", "ours") if number % 2 else ("ours", "bare")
        took = dict.fromkeys(each, 0.0)
        for name in (outer, inner, inner, outer):
            took[name] += timed(each[name])
        return took["ours"], took["bare"]

    for number in range(WARM):
        block(number)
    gc.collect()
    gc.freeze()  # what is there stays: a collection of it would fall into one epoch of either
    seconds = [block(number) for number in range(int(blocks))]
    if rank == 0:
        epochs = ours.epochs[2 * WARM :]
        result = {
            "blocks": seconds,
            "steps": epochs[0].steps,
            "sums": [
                (e.data_s + e.compute_s + _known(e.exchange_s) + _known(e.waiting_s)) / e.wall_s
                for e in epochs
            ],
            "rate": [e.samples * world / e.wall_s for e in epochs],
            "data": [e.data_s / e.wall_s for e in epochs],
            "settings": settings.__dict__,
        }
        print(json.dumps(result), flush=True)
    if world > 1:
        distributed.barrier()
    os._exit(0)


def _known(value: object) -> float:
    return value if isinstance(value, float) else 0.0


if __name__ == "__main__":
    main()
