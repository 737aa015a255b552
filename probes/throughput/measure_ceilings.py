"""Measures the ceilings of this machine on torch: matrix products, copies, small operations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import torch

from probes.core.errors import OutOfMemory
from probes.core.unknown import Unknown
from probes.hardware.torch_build import first_line, refusals
from probes.measure.device import TorchWorkbench
from probes.measure.sampling import Effort, sample
from probes.measure.workbench import Operation
from probes.throughput.ceilings import (
    PRECISIONS,
    Ceiling,
    Ceilings,
    Device,
    DeviceCeilings,
    FlopCeiling,
    Precision,
    contenders,
    largest,
    rates,
)

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EFFORT = Effort(samples=30, at_least=5, budget_s=0.4)
SIDES = {"gpu": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024, 2048, 4096)}
LONGEST_S = 0.25  # of one matrix product
COPY_BYTES = {"gpu": 2**30, "cpu": 2**28}  # beyond any cache, and long next to a launch
LINK_BYTES = 2**28
# An H200's power limit takes a tenth of a burst's clock away within tens of milliseconds.
SETTLE_S = {"gpu": 0.5, "cpu": 0.1}
SETTLING = 8  # products handed over at once meanwhile
SHARE = 8  # the part of free device memory that a copy's buffer may take
FEW = 1024  # words of the small operation
LAUNCHES = 200  # in a sample
TF32_SINCE = 8  # the major version of a card's target: Ampere


def measure(bench: TorchWorkbench, devices: Sequence[Device], *, cpu_name: str = "cpu") -> Ceilings:
    """The ceilings of these devices. What the machine lacks or refuses is unknown with the reason."""
    return Ceilings(tuple(_device(bench, device, cpu_name) for device in devices))


def _device(bench: TorchWorkbench, device: Device, cpu_name: str) -> DeviceCeilings:
    on_gpu = device == "gpu"
    # the host's own clock times the CPU, also where there is a GPU
    by = bench if on_gpu else TorchWorkbench(has_gpu=False)
    link = (lambda source, target: _link(by, source, target)) if on_gpu else _no_link
    return DeviceCeilings(
        device=device,
        name=torch.cuda.get_device_name(0) if on_gpu else cpu_name,
        flop=tuple(FlopCeiling(precision, _flop(by, device, precision)) for precision in PRECISIONS),
        memory=_memory(by, device),
        to_device=link("cpu", "cuda"),
        from_device=link("cuda", "cpu"),
        launches=_launches(by, device),
    )


def _no_link(_source: str, _target: str) -> Unknown:
    return Unknown("the CPU computes where its inputs are")


def torch_device(device: Device) -> str:
    """Torch's name of a device."""
    return "cuda" if device == "gpu" else "cpu"


def supports(device: Device, precision: Precision) -> Unknown | None:
    """Why a device can't compute in a precision; None when it can."""
    if precision == "tf32":
        if device == "cpu":
            return Unknown("TF32 is a form of NVIDIA's tensor cores")
        if torch.version.hip:
            return Unknown("TF32 isn't measured on AMD cards")
        major = torch.cuda.get_device_capability(0)[0]
        if major < TF32_SINCE:
            return Unknown(f"this card (sm_{major}x) is older than TF32, which came with sm_80")
    return None


@contextmanager
def float32_as(precision: Precision) -> Iterator[None]:
    """How torch multiplies float32 matrices within the block: whole, or as TF32. Convolutions likewise."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _flop(bench: TorchWorkbench, device: Device, precision: Precision) -> Ceiling | Unknown:
    lacking = supports(device, precision)
    if lacking:
        return lacking

    def product(side: int, *, settle_s: float = 0.0) -> Ceiling:
        shape = (side, side)
        with refusals(f"three matrices of {side} x {side}"):
            # random content: a card draws less power, and keeps higher clocks, for zeros
            left, right = (
                torch.randn(shape, device=torch_device(device)).to(DTYPES[precision]) for _ in range(2)
            )
            out = torch.empty_like(left)
        multiply = partial(torch.mm, left, right, out=out)
        _settle(bench, multiply, settle_s)
        return _ceiling(bench, multiply, of=f"product of {side} x {side} matrices", work=_product_flop(side))

    def found() -> Ceiling | Unknown:
        bursts = rates(SIDES[device], product, work=_product_flop, longest_s=LONGEST_S)
        if isinstance(bursts, Unknown):
            return bursts
        # a burst runs at clocks that the card can't hold, and its best size isn't that of lasting work
        return largest(product(side, settle_s=SETTLE_S[device]) for side in contenders(bursts))

    with float32_as(precision), torch.inference_mode():
        return _tried(found)


def _settle(bench: TorchWorkbench, operation: Operation, seconds: float) -> None:
    """Keep the device busy until its clocks are those of lasting work."""
    until = perf_counter() + seconds
    while perf_counter() < until:
        bench.wall_s([operation] * SETTLING)


def _product_flop(side: int) -> float:
    return 2.0 * side**3


def _tried(find: Callable[[], Ceiling | Unknown]) -> Ceiling | Unknown:
    """What is found, or the refusal of a build that lacks the operation."""
    try:
        return find()
    except (OutOfMemory, RuntimeError) as error:
        return Unknown(error.message if isinstance(error, OutOfMemory) else first_line(error))


def _ceiling(bench: TorchWorkbench, operation: Operation, *, of: str, work: float) -> Ceiling:
    samples = sample(bench, [operation], effort=EFFORT, queued=True)
    by_device = not isinstance(samples.device_s, Unknown)
    seconds = samples.device_s if isinstance(samples.device_s, tuple) else samples.wall_s
    return Ceiling(of, work, seconds, "device" if by_device else "wall")


def _memory(bench: TorchWorkbench, device: Device) -> Ceiling | Unknown:
    n_bytes = COPY_BYTES[device]
    if device == "gpu":
        n_bytes = min(n_bytes, bench.vram_free_bytes() // SHARE)

    def copied() -> Ceiling:
        with refusals("two buffers to copy between"):
            source = torch.ones(n_bytes // 4, device=torch_device(device))
            target = torch.zeros_like(source)
        of = f"copy of {n_bytes >> 20} MiB within the device's memory"
        return _ceiling(bench, partial(target.copy_, source), of=of, work=2.0 * n_bytes)

    return _tried(copied)


def _link(bench: TorchWorkbench, source: str, target: str) -> Ceiling | Unknown:
    def copied() -> Ceiling:
        with refusals("two buffers to copy between"):
            ends = {
                "cpu": torch.ones(LINK_BYTES // 4, pin_memory=True),
                "cuda": torch.ones(LINK_BYTES // 4, device="cuda"),
            }
        copy = partial(ends[target].copy_, ends[source], non_blocking=True)
        where = "to the device" if target == "cuda" else "from the device"
        of = f"copy of {LINK_BYTES >> 20} MiB {where}, pinned"
        return _ceiling(bench, copy, of=of, work=float(LINK_BYTES))

    return _tried(copied)


def _launches(bench: TorchWorkbench, device: Device) -> Ceiling | Unknown:
    def launched() -> Ceiling:
        words = torch.zeros(FEW, device=torch_device(device))

        def many() -> None:
            for _ in range(LAUNCHES):
                words.add_(1)

        with torch.inference_mode():
            samples = sample(bench, [many], effort=EFFORT, queued=False, leads="wall")
        return Ceiling("additions to 1024 words, one after another", float(LAUNCHES), samples.wall_s, "wall")

    return _tried(launched)
