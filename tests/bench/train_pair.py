"""Our loop and a loop as people write it, epoch by epoch in turns, on equal models and the same samples.

One rank; started by torchrun for several. Rank 0 prints a line of JSON: the seconds of each pair of epochs,
ours first.

The bare loop reads no loss, keeps no time, and knows no signal: it is the fastest that can be written.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))

from probes.training.guard import Guard, StopAgreement
from probes.training.loop import HALVES, RATE, Trainer
from probes.training.models import Workload, loss_of, workload
from probes.training.report import Settings

WARM = 1  # pairs that aren't counted


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
    """MODEL BATCH PRECISION SAMPLES TOKENS PAIRS WORKERS THREADS DEVICE."""
    model, batch, precision, samples, tokens, pairs, workers, threads, kind = sys.argv[1:]
    settings = Settings(
        model,
        batch=int(batch),
        precision=precision,
        samples=int(samples),
        tokens=int(tokens),
        workers=int(workers),
        device=kind,
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

    seconds = []
    for number in range(int(pairs) + WARM):
        if number == WARM:  # what is there stays: a collection of it would fall into one epoch of either
            gc.collect()
            gc.freeze()
        each = {
            "ours": lambda: ours.epoch(lambda: agreement.here(ours.place.step)),
            "bare": lambda number=number: theirs(number),
        }
        order = ("ours", "bare") if number % 2 else ("bare", "ours")
        took = {name: timed(each[name]) for name in order}
        seconds.append((took["ours"], took["bare"]))
    if rank == 0:
        sums = [
            (e.data_s + e.compute_s + _known(e.exchange_s) + _known(e.waiting_s)) / e.wall_s
            for e in ours.epochs[WARM:]
        ]
        rate = samples and [e.samples * world / e.wall_s for e in ours.epochs[WARM:]]
        data = [e.data_s / e.wall_s for e in ours.epochs[WARM:]]
        result = {"pairs": seconds[WARM:], "sums": sums, "rate": rate, "data": data}
        result["settings"] = replace(settings).__dict__
        print(json.dumps(result), flush=True)
    if world > 1:
        distributed.barrier()
    os._exit(0)


def _known(value: object) -> float:
    return value if isinstance(value, float) else 0.0


if __name__ == "__main__":
    main()
