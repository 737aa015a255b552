"""Runs the cases of `probes.placement.packing.proof` on emulated AMD machine code: a line of JSON for each.

    TRITON_INTERPRET=0 amd_child.py TARGET [SHARE [KIND]]

With a share as 0/2, every second case; KIND: only cases with this word in their name.
"""

import json
import os
import sys
import time
from collections import Counter

import torch
from machine import Executed, Fault
from standin_amd import WAVES, stand_in

from probes.placement.packing import launch, proof


class OnGpu(torch.Tensor):
    """In host memory, but the launcher chooses for it what it chooses for a GPU's tensor."""

    is_cuda = True


def settle(target: str) -> list[Executed]:
    """Let the launcher take tensors in host memory for a GPU's; what is launched is added to the list."""
    launch.usable = lambda device: True
    launch._has_ptx = lambda device: False
    launch.has_narrow_wavefronts = lambda device: WAVES[target] == 32
    started = launch.start
    launch.start_again = lambda *_: False  # with addresses alone

    def start(kernel, grid, tensors, numbers, constants, **rest):
        if "FACTORS" in constants:  # the matrix units' type on a GPU
            import triton.language as tl

            constants = {**constants, "FACTORS": tl.bfloat16}
        started(kernel, grid, tensors, numbers, constants, **rest)

    launch.start = start
    return stand_in(target).executed


def tried(case: proof.Case, target: str, executed: list[Executed]) -> dict:
    """What became of a case."""
    executed.clear()
    begun = time.monotonic()
    try:
        outcome = case.outcome(torch.device("cpu"))
        wrong, digest = outcome.wrong, outcome.digest
    except Fault as fault:
        wrong, digest = str(fault), ""
    if not wrong and len(executed) != 1:
        wrong = f"{len(executed)} launches"
    instructions = sum((of.instructions for of in executed), Counter())
    transactions = sum((of.transactions for of in executed), Counter())
    return {
        "target": target,
        "buffers": os.environ.get("AMDGCN_USE_BUFFER_OPS") != "0",
        "case": case.name,
        "kernel": case.kernel,
        "weights": case.weights,
        "wrong": wrong,
        "digest": digest,
        "instructions": dict(instructions),
        "transactions": dict(transactions),
        "seconds": round(time.monotonic() - begun, 2),
    }


def main() -> None:
    target, share = sys.argv[1], (sys.argv[2:3] or ["0/1"])[0]
    first, step = map(int, share.split("/"))
    executed = settle(target)
    chosen = [case for case in proof.cases() if all(word in case.name for word in sys.argv[3:])]
    for case in chosen[first::step]:
        print(json.dumps(tried(case, target, executed)), flush=True)


if __name__ == "__main__":
    main()
