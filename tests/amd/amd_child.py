"""Runs the cases of `probes.placement.packing.proof` on emulated AMD machine code: a line of JSON for each.

    TRITON_INTERPRET=0 amd_child.py TARGET [SHARE...]

A share as 0/2 is every second case; `counted` is those whose instructions the cost model of plans rests on:
large matrices, no weight an escape.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import launched
import torch
from machine import Executed, Fault
from standin_driver import StandInDriver, stand_in
from triton.backends.compiler import GPUTarget

from probes.placement.packing import proof
from probes.placement.packing.packed import B10, B12

WAVES = {"gfx1100": 32, "gfx1201": 32, "gfx90a": 64, "gfx942": 64}  # lanes of a wave
RESULTS = {"out", "y", "hidden", "counts"}  # tensors that kernels write
_SHARED = 64 << 10  # bytes of LDS that a workgroup may have


class Gpu(StandInDriver):
    """A GPU of a target that isn't there. `before` is shown each launch before it runs."""

    def __init__(self, target: str, before: Callable[[launched.Launch], None] = lambda of: None) -> None:
        self._before = before
        load = lambda name, binary: launched.load(bytes(binary), name, target)  # noqa: E731
        super().__init__(GPUTarget("hip", target, WAVES[target]), _SHARED, load, self._run)

    def _run(self, kernel, groups, values, buffers, metadata) -> Executed:
        threads = metadata.num_warps * self.target.warp_size
        given = [*values, ("*", 0), ("*", 0)]  # Triton's own scratch memory, of which there is none
        of = launched.Launch(kernel, (groups, 1), threads, given, buffers, metadata.shared, RESULTS)
        self._before(of)
        executed = of.run()
        of.memory.copy_out()
        return executed


def settle(target: str, before: Callable[[launched.Launch], None] = lambda of: None) -> Gpu:
    """Let Triton and our launcher start on a GPU of that target."""
    gpu = Gpu(target, before)
    stand_in(gpu, narrow=WAVES[target] == 32)
    return gpu


def tried(case: proof.Case, gpu: Gpu) -> dict:
    """What became of a case."""
    begun = time.monotonic()
    try:
        outcome = gpu.outcome(case)
        wrong, digest = outcome.wrong, outcome.digest
    except Fault as fault:
        wrong, digest = str(fault), ""
    launches = [of.kernel for of in gpu.launches]
    if not wrong and len(launches) != len(case.kernel.split(",")):
        wrong = f"launched: {launches}"
    instructions = sum((of.executed.instructions for of in gpu.launches), Counter())
    transactions = sum((of.executed.transactions for of in gpu.launches), Counter())
    # scalar ones are left out: a unit of its own executes them beside the others
    vectors = sum(count for name, count in instructions.items() if not name.startswith("S_"))
    return {
        "target": gpu.target.arch,
        "buffers": os.environ.get("AMDGCN_USE_BUFFER_OPS") != "0",
        "case": case.name,
        "kernel": case.kernel,
        "weights": case.weights,
        "wrong": wrong,
        "digest": digest,
        "instructions": dict(instructions),
        "transactions": dict(transactions),
        "a weight": {
            "instructions": round(vectors * gpu.target.warp_size / case.weights, 1),
            "transactions": round((transactions["loads"] + transactions["stores"]) / case.weights, 4),
        },
        "seconds": round(time.monotonic() - begun, 2),
    }


def counted() -> Iterator[proof.Case]:
    for kernel, layout in (("unpack_b12", B12), ("unpack_planes b10", B10)):
        yield proof.unpacked(kernel, (16, 8192), "no escapes", torch.bfloat16, layout)
    for kernel, batch in (("one_row even", 1), ("few_rows even", 5)):
        yield proof.product(kernel, (64, 4096), "no escapes", batch)


def main() -> None:
    target, shares = sys.argv[1], sys.argv[2:] or ["0/1"]
    gpu = settle(target)
    for share in shares:
        first, _, step = share.partition("/")
        chosen = counted() if share == "counted" else list(proof.cases())[int(first) :: int(step)]
        for case in chosen:
            print(json.dumps(tried(case, gpu)), flush=True)


if __name__ == "__main__":
    main()
