"""Runs the PTX of every kernel, launched as on a GPU, and prints a line of JSON for each case.

    TRITON_INTERPRET=0 ptx_child.py 90 80

For the first compute capability a case of each kernel of `probes.placement.packing.proof` in three orders of
warps, all bit patterns, and what only `unpack` does; for others one of each: Triton compiles for each target.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import emulated_ptx
import torch
from ptx_text import Refused
from standin_driver import StandInDriver, stand_in
from test_kernels import odd_weights
from test_round_trip import bits, forced
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from probes.placement.packing import codecs, proof
from probes.placement.packing.packed import B10
from probes.placement.packing.tensors import unpack

_SHARED = 227 << 10  # bytes of shared memory that a block may have
ORDERS = {0: "all warps together", 1: "the first warp first", -1: "the last warp first"}


@dataclass(frozen=True)
class Ordered:
    """A case, and the order of warps, as in `emulated_ptx.run`."""

    case: proof.Case
    order: int = 0


def cases(capability: int, *, first: bool) -> Iterator[Ordered]:
    every = list(proof.cases())
    for begin in range(0, len(every), 20):
        unpacks, all_patterns = "unpack" in every[begin].kernel, every[begin + 15]
        case = every[begin + (6 if unpacks else 4)]  # rows of escapes, or some in most rows
        for order in ORDERS if first else (0,):
            yield Ordered(replace(case, name=f"{case.name}, {ORDERS[order]}"), order)
        if first and unpacks:
            yield Ordered(all_patterns)
    if first:
        tensor = odd_weights(9, 2048)
        for skipped in (1, 2):
            yield unpacked(f"b12, {skipped} into memory", tensor, skipped=skipped)
            yield unpacked(f"f28, {skipped} into memory", tensor.float() * 1.0001, skipped=skipped)
            yield unpacked(f"b10, {skipped} into memory", tensor, B10, skipped=skipped)
        yield unpacked("b12, a part", tensor, part=True)
        yield unpacked("b10, a part", tensor, B10, part=True)


def unpacked(
    name: str, tensor: torch.Tensor, layout=None, *, skipped: int = 0, part: bool = False
) -> Ordered:
    """Into memory that has `skipped` weights before, or a `part`, whose escapes begin anywhere."""
    packed, wanted = forced(tensor, layout), tensor
    if part:
        packed = (whole := packed).part(whole.unit, whole.n_weights)
        wanted = tensor.view(-1)[whole.unit :].view(packed.shape)

    def prepare(device: torch.device) -> proof.Prepared:
        out = torch.empty(skipped + wanted.numel(), dtype=tensor.dtype)[skipped:].view(wanted.shape)
        bits(out).copy_(~bits(wanted))  # none is right yet
        return proof.Prepared(lambda: unpack(packed, out))

    def judge(out: torch.Tensor) -> str:
        bad = int((bits(out) != bits(wanted)).sum())
        return f"{bad:,} of {out.numel():,} weights" if bad else ""

    return Ordered(proof.Case(name, "unpack", wanted.numel(), prepare, judge))


def gpu_of(capability: int, order: Callable[[], int]) -> StandInDriver:
    """Triton launches on a GPU of that compute capability that isn't there (90: an H100)."""
    CUDABackend.make_cubin = lambda self, ptx, *_: ptx.encode()  # the PTX itself is what is loaded
    CUDABackend.hash = lambda self: f"emulated {self.target.arch}"  # in Triton's cache it is another code

    def run(code, blocks, values, buffers, metadata) -> emulated_ptx.Executed:
        arguments = [*(value for _, value in values), 0, 0]  # Triton's own scratch memory, which is none
        return emulated_ptx.run(code, blocks, arguments, buffers, shared=metadata.shared, order=order())

    target = GPUTarget("cuda", capability, emulated_ptx.WARP)
    load = lambda name, ptx: emulated_ptx.load(ptx.decode())  # noqa: E731
    return StandInDriver(target, _SHARED, load, run)


def tried(case: proof.Case, gpu: StandInDriver) -> dict[str, object]:
    """What became of a case."""
    try:
        wrong = gpu.outcome(case).wrong
    except Refused as refused:
        wrong = str(refused)
    executed = sum(int(launch.executed.by_block.sum()) for launch in gpu.launches)
    return {
        "case": case.name,
        "target": f"sm{gpu.target.arch}",
        "kernel": case.kernel,
        "kernels": [launch.kernel for launch in gpu.launches],
        "wrong": wrong,
        "instructions a weight": round(32 * executed / case.weights, 1),
    }


def main() -> None:
    """For each compute capability that the arguments name: 90."""
    codecs.DENSE_FROM = 0  # blocks as large as the kernel's
    orders = [0]
    for capability in sys.argv[1:]:
        gpu = gpu_of(int(capability), lambda: orders[0])
        stand_in(gpu, ptx=True)
        for ordered in cases(int(capability), first=capability == sys.argv[1]):
            orders[0] = ordered.order
            print(json.dumps(tried(ordered.case, gpu)), flush=True)


if __name__ == "__main__":
    main()
