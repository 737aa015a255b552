"""Loads a checkpoint by plans of one tier, each in a process of its own, and prints what it took as JSON.

`python loading_child.py FOLDER TIER[,uncached]...`. In FOLDER is the model of `save`.
`python loading_child.py FOLDER TIER[,uncached],contiguous|channels_last...`: in FOLDER are convolutions.
The processes are forks of one, which has imported everything.
"""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # a first load imports it, in each fork for itself if it isn't here
from placement_plans import plan_of
from safetensors.torch import save_file
from torch import nn

from probes.placement.loading import load

WIDTHS = (64, 1024)  # of convolutions, to warm up and to measure
ORDERS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LAYERS, WIDTH, ROWS = 8, 2048, 10  # of bfloat16: 8 MiB each, 64 MiB in all, and an embedding of 80 MiB


def factory(layers: int = LAYERS, width: int = WIDTH) -> nn.Module:
    made = [nn.Embedding(ROWS * width, width, dtype=torch.bfloat16)]
    made += [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
    return nn.Sequential(*made)


def save(folder: Path, layers: int = LAYERS, width: int = WIDTH) -> int:
    """Write a checkpoint with random weights, of which those of the embedding repeat; its bytes."""
    torch.manual_seed(0)
    state = {f"{i + 1}.weight": (torch.randn(width, width) * 0.02).bfloat16() for i in range(layers)}
    state["0.weight"] = (torch.randn(width, width) * 0.02).bfloat16().repeat(ROWS, 1)
    save_file(state, folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in state.values())


def convolutions(width: int, order: str) -> nn.Module:
    """Three, of 18 MiB each with a width of 1024."""
    made = [nn.Conv2d(width, width, 3, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    return nn.Sequential(*made).to(memory_format=ORDERS[order])


def save_convolutions(folder: Path) -> None:
    """Write their checkpoints."""
    for width in WIDTHS:
        (folder / str(width)).mkdir()
        state = {f"{i}.weight": (torch.randn(width, width, 3, 3) * 0.02).bfloat16() for i in range(3)}
        save_file(state, folder / str(width) / "model.safetensors")


def of_convolutions(folder: Path, tier: str, order: str, *, cached: bool) -> None:
    """As `of_linears`, with them."""

    def placed(width: int) -> nn.Module:
        where = folder / str(width)
        with torch.device("meta"):
            plan = plan_of(convolutions(width, order), {str(i): tier for i in range(3)})
        kept = where / order if cached else False
        return load(lambda: convolutions(width, order), where, plan, device="cpu", cache=kept)

    small = placed(WIDTHS[0])
    with torch.inference_mode():
        small(torch.zeros(1, 64, 7, 7, dtype=torch.bfloat16))
    small.placement.remove()
    del small
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    base = resident("VmRSS")
    model = placed(WIDTHS[1])
    print(json.dumps({"grown": resident("VmHWM") - base}))
    model.placement.remove()


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most. The peak of getrusage may be the parent's."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def of_linears(folder: Path, tier: str, *, cached: bool) -> None:
    """Load the model of `save`, and print its peak of host memory."""
    small = folder / "small"
    if not small.exists():
        small.mkdir()
        save(small, 2, 512)

    def placed(where: Path, *size: int) -> nn.Module:
        with torch.device("meta"):
            model = factory(*size)
        tiers = {str(i + 1): tier for i in range(len(model) - 1)}
        plan = plan_of(model, tiers)
        if "packed" in tier:  # the embedding stays packed: no scratch buffer hides what loading takes
            table, *others = plan.blocks
            table = replace(table, tier="packed", table=True)
            plan = replace(plan, blocks=(table, *others), objective="fast")
        kept = where / "packed" if cached else False
        return load(lambda: factory(*size), where, plan, device="cpu", cache=kept)

    warm = placed(small, 2, 512)  # what torch allocates once
    with torch.inference_mode():
        warm(torch.zeros(1, dtype=torch.int64))
    warm.placement.remove()
    del warm
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    base = resident("VmRSS")
    begun = time.perf_counter()
    model = placed(folder)
    seconds = time.perf_counter() - begun
    peak = resident("VmHWM")
    with torch.inference_mode():
        checked = float(model(torch.arange(4)).float().sum())
    print(json.dumps({"base": base, "peak": peak, "seconds": seconds, "sum": checked}))


def load_once(folder: Path, case: str) -> None:
    """One case, as it is written on the command line."""
    tier, *more = case.split(",")
    cached, orders = "uncached" not in more, [word for word in more if word in ORDERS]
    if orders:
        of_convolutions(folder, tier, orders[0], cached=cached)
    else:
        of_linears(folder, tier, cached=cached)


def main(folder: Path, cases: list[str]) -> int:
    """Each case in a fork; 1 where one failed."""
    torch.set_num_threads(1)  # no thread is here when it forks
    for case in cases:
        child = os.fork()
        if not child:
            try:
                load_once(folder, case)
                sys.stdout.flush()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
