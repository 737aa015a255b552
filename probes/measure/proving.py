"""Runs the kernels of placement on this machine's card, case by case, and compares bits and times."""

import importlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch

from probes.core.errors import DeviceUnusable
from probes.placement.packing import launch, proof
from probes.records.files import reading

_REPEATS: Final = 20
_WARM: Final = 3
SCHEMA: Final = 1


@dataclass(frozen=True)
class Proved:
    """One case on a card. `recorded`: the emulated targets whose result had the same bits."""

    case: str
    kernel: str
    weights: int
    wrong: str  # empty: nothing differs from what it must be
    digest: str
    recorded: tuple[str, ...]
    median_s: float | None  # of one launch, by the device's clock; None where it wasn't timed


def card() -> torch.device:
    """The first card. Raises DeviceUnusable where there is none that Triton compiles kernels for."""
    if not torch.cuda.is_available():
        raise DeviceUnusable(
            "no card that torch can use: kernels run on one",
            "see `weir probe doctor`; this torch must be built for ROCm or CUDA, and the card be visible",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    if not launch.usable(device):
        raise DeviceUnusable(
            f"{torch.cuda.get_device_name(device)} runs none of these kernels: Triton is missing, or "
            "compiles none for it",
            "its torch must bring Triton (triton, pytorch-triton-rocm); AMD's gfx908, gfx90a, gfx94x, "
            "gfx95x, gfx11xx and gfx12xx have kernels, and NVIDIA's from compute capability 8.0 on",
        )
    return device


def machine(device: torch.device) -> dict[str, str]:
    """What ran: the card, its target, and versions."""
    facts = torch.cuda.get_device_properties(device)
    return {
        "card": torch.cuda.get_device_name(device),
        "target": str(getattr(facts, "gcnArchName", "") or f"sm_{facts.major}{facts.minor}"),
        "torch": str(torch.__version__),
        "triton": str(importlib.import_module("triton").__version__),
        "hip": str(torch.version.hip or ""),
        "cuda": str(torch.version.cuda or ""),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def prove(
    device: torch.device,
    kernels: str = "",
    timed: "Callable[[Callable[[], torch.Tensor]], float | None] | None" = None,
) -> Iterator[Proved]:
    """Run the cases whose kernel's name has `kernels` in it. What raises an error is a wrong case.

    Raises ReportError where the recorded results can't be read.
    """
    with reading(proof.RECORDED, "it is part of this package: install that again"):
        known = proof.recorded()
    for case in proof.cases():
        if kernels not in case.kernel:
            continue
        seconds = None
        try:
            prepared = case.prepare(device)
            outcome = case.outcome(prepared)
            seconds = (timed or seconds_of)(prepared.begin)
        except Exception as error:  # Triton's own errors are of no common kind
            outcome = proof.Outcome(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "")
        same = [target for target, digest in known.get(case.name, {}).items() if digest == outcome.digest]
        yield Proved(
            case.name, case.kernel, case.weights, outcome.wrong, outcome.digest, tuple(same), seconds
        )


def seconds_of(begin: Callable[[], torch.Tensor]) -> float:
    """The median time of one launch, by events on the device's stream."""
    for _ in range(_WARM):
        begin()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
    for first, last in pairs:
        first.record()
        begin()
        last.record()
    torch.cuda.synchronize()
    return float(median(first.elapsed_time(last) for first, last in pairs)) / 1e3


def document(facts: dict[str, str], rows: list[Proved]) -> dict[str, Any]:
    """The report to send back."""
    return {
        "kind": "proof",
        "schema_version": SCHEMA,
        "machine": facts,
        "cases": [vars(row) | {"recorded": list(row.recorded)} for row in rows],
    }
