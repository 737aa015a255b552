"""Operations of each class that plans count by: in a size whose bytes hardly count, and in a large one."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F

from probes.measure.workbench import ClassedWork
from probes.placement.models.operations import OperationKind
from probes.records.rows import ClassWork

COUNT: Final = 16  # small operations in one work: the host takes longer than its own clock for them
ROWS, WIDTH = 2048, 1024  # of a large one's numbers in 16 bits: 4 MiB, as activations that stay in a cache
SMALL: Final = (16, 64)
# kernels that the planner counts for the operations below: probes/placement/trace.py
LAUNCHES: Final = {"attention": 2, "scan": 2, "convolution": 4}


def class_work(name: ClassWork, device: torch.device) -> ClassedWork:
    """The work of this name on a device. A CPU gets smaller ones, in float32."""
    size, _, what = name.rpartition(" ")
    if size == "products":
        return _products(getattr(torch, what), device)
    return _of_class(what, device, large=size == "large")  # type: ignore[arg-type]


def _products(dtype: torch.dtype, device: torch.device) -> ClassedWork:
    rows, width = (2048, 4096) if device.type == "cuda" else (256, 1024)
    x, weight = _numbers((rows, width), device, dtype), _numbers((width, width), device, dtype)
    return ClassedWork(partial(F.linear, x, weight), flops=2 * rows * width * width)


def _of_class(kind: OperationKind, device: torch.device, *, large: bool) -> ClassedWork:
    gpu = device.type == "cuda"
    dtype = torch.float16 if gpu else torch.float32
    number, flops = 2 if gpu else 4, 0
    if kind == "attention":
        tokens = (2048 if gpu else 256) if large else 16
        given = [_numbers((1, 16, tokens, 64), device, dtype) for _ in range(3)]
        run: Callable[..., Any] = partial(F.scaled_dot_product_attention, *given)
        flops, moved = 4 * 16 * tokens * tokens * 64, 4 * given[0].numel() * number
    elif kind == "convolution":
        batch, channels, side = (8 if gpu else 1, 256 if gpu else 64, 64) if large else (1, 16, 8)
        x = _numbers((batch, channels, side, side), device, dtype)
        weight = _numbers((channels, channels, 3, 3), device, dtype)
        run = partial(F.conv2d, x, weight, padding=1)
        flops, moved = 2 * x.numel() * channels * 9, 2 * x.numel() * number
    else:
        x = _numbers((ROWS, WIDTH) if large else SMALL, device, dtype)
        run, moved = partial(_ELEMENTS[kind], x), 2 * x.numel() * number
        moved = moved // 2 if kind == "reduction" else moved
    count = 1 if large else COUNT
    return ClassedWork(partial(_repeated, run, count), count, LAUNCHES.get(kind, 1), flops, moved)


def _numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _repeated(run: Callable[[], object], count: int) -> None:
    for _ in range(count):
        run()


def _strided(x: torch.Tensor) -> torch.Tensor:
    return x + x[:, :1]


_ELEMENTS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "plain": torch.relu,
    "strided": _strided,
    "norm": partial(F.softmax, dim=-1),
    "reduction": partial(torch.mean, dim=-1),
    "scan": partial(torch.cumsum, dim=-1),
}
