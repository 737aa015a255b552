"""What goes wrong on purpose: memory refused while placing and in a pass, no pinned memory."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from placing_case import Bench
from placing_measure import differing_bits, free, host_bytes
from placing_models import square

from probes.core.errors import PlacementError, PlanImpossible
from probes.placement import place

MIB = 1 << 20
BUDGET = 512 * MIB  # for 24 layers of 32 MiB
SLACK = 64 * MIB  # of host memory, that torch's allocators keep


def trouble(group: Any) -> None:
    """Each kind of trouble; after each, memory is back and the model computes the same bits."""
    bench: Bench = group.bench(square(24, 4096))
    bench.resident(1)
    made = bench.plan(1, "exact", budget=BUDGET)
    with bench.placed(made):  # what stays for good, such as loaded kernels
        bench.one_pass(1)()
    board = group.board

    with _nothing_left(board, "VRAM refused while placing"), group.vram.capped(BUDGET // 2):
        refused = _raises(PlacementError, lambda: place(bench.module, made))
    board.bar("VRAM refused while placing: not a PlacementError", int(not refused), 0, "errors")

    one = bench.one_pass(1)  # holds its input, 8 KiB, as long as it lives
    with _nothing_left(board, "VRAM refused in a pass"), bench.placed(made):
        one()
        hook = bench.module[12].register_forward_pre_hook(_take_all)
        refused = _raises(torch.OutOfMemoryError, one)
        hook.remove()
        free()
        bits = differing_bits(one().cpu(), bench.reference(1).output)
    board.bar("VRAM refused in a pass: not an OutOfMemoryError", int(not refused), 0, "errors")
    board.bar("VRAM refused in a pass: differing bits of the next", bits, 0, "elements")

    with _nothing_left(board, "no pinned memory"), group.vram.capped(BUDGET):
        handle = place(bench.module, bench.spread("streamed", budget=BUDGET), pinned=False)
        bits = differing_bits(bench.one_pass(1)().cpu(), bench.reference(1).output)
        board.line({"no pinned memory": handle.report().why_pageable})
        handle.remove()
        del handle
    board.bar("no pinned memory: differing bits", bits, 0, "elements")

    refused = _raises(PlanImpossible, lambda: bench.plan(1, "exact", budget=16 * MIB))
    board.bar("a budget below the largest block: not a PlanImpossible", int(not refused), 0, "errors")
    with bench.placed(made):
        bits = differing_bits(bench.one_pass(1)().cpu(), bench.reference(1).output)
    board.bar("after all trouble: differing bits", bits, 0, "elements")


def _take_all(_module: Any, _args: Any) -> None:
    torch.empty(BUDGET, dtype=torch.uint8, device="cuda")


def _raises(kind: type[Exception], work: Any) -> bool:
    try:
        work()
    except kind:
        return True
    return False


def _settle() -> None:
    """What nothing uses goes back, also what glibc keeps: 145 MB after one refusal, and after five."""
    free()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


@contextmanager
def _nothing_left(board: Any, what: str) -> Iterator[None]:
    """Bars for VRAM and host memory: afterwards as before."""
    _settle()
    vram, host = torch.cuda.memory_allocated(), host_bytes()["VmRSS"]
    yield
    _settle()
    board.bar(f"{what}: VRAM left behind", torch.cuda.memory_allocated() - vram, 0, "bytes")
    board.bar(f"{what}: host memory left behind", host_bytes()["VmRSS"] - host, SLACK, "bytes")
