"""Counts what a pass asks for, by watching the operations that torch dispatches.

FLOP are those of torch's own counter. Bytes are a model: each operation reads its inputs and writes its
outputs once; views move nothing, and operations that pick (gather, index) read only what they pick.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from probes.machine.torchfacts import first_line
from probes.shared.unknown import Unknown
from probes.throughput.direct.scanned import Work

PICKING = ("gather", "index", "index_select", "embedding", "slice_scatter", "select_scatter")


class _Traffic(TorchDispatchMode):  # type: ignore[misc]
    """Adds up the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0
        self.operations = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        if not _is_view(func):
            written = _sizes(tree_leaves(out))
            read = _sizes(tree_leaves((args, kwargs or {})))
            if func.overloadpacket.__name__ in PICKING:
                read = min(read, 2 * written)  # what is picked, and as many indices
            self.n_bytes += read + written
            self.operations += 1
        return out


def _is_view(func: Any) -> bool:  # noqa: ANN401
    returns = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def _sizes(values: Iterable[object]) -> int:
    """Bytes of the tensors, an expanded dimension counted once."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            strides = zip(value.shape, value.stride(), strict=True)
            total += value.element_size() * _product(size for size, stride in strides if stride)
    return total


def _product(sizes: Iterable[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def work(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], autocast: torch.dtype | None
) -> Work | Unknown:
    """What one pass of the module with these inputs asks for; tensors on torch's meta device cost nothing.

    Autocast does nothing there: with it, give tensors of a device.
    """
    flops, traffic = FlopCounterMode(display=False), _Traffic()
    cast = torch.autocast(inputs[0].device.type, dtype=autocast) if autocast else nullcontext()
    try:
        # not in inference mode, in which operations aren't taken apart into those that run
        with torch.no_grad(), cast, flops, traffic:
            out = module(*inputs)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return Unknown(f"the pass can't be counted: {first_line(error)}")
    weights = _sizes([*module.parameters(), *module.buffers()])
    given = _sizes(inputs)
    return Work(
        flop=float(flops.get_total_flops()),
        op_bytes=float(traffic.n_bytes),
        least_bytes=float(weights + given + _sizes(tree_leaves(out))),
        input_bytes=given,
        operations=traffic.operations,
    )
