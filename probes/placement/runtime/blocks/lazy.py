"""A parameter without values: it knows its shape, dtype and device, and fetches values when they are read.

A placed module's own forward finds its weights in place, because they are brought before its call. Whatever
else reads a weight (another module's forward, `state_dict`, a debugger) meets this, and gets the right
values, slowly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from probes.errors import PlacementError

Fetch = Callable[[], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
Lookup = Callable[[torch.Tensor], torch.Tensor]

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda"),
    *(
        "is_meta",
        "is_sparse",
        "is_quantized",
        "itemsize",
        "nbytes",
        "is_cpu",
        "is_mps",
        "is_nested",
        "is_xpu",
    ),
    *("is_mkldnn", "is_sparse_csr", "is_xla", "is_mtia", "is_vulkan", "names", "output_nr", "_version"),
)
# what may be asked of a weight without its values
_METADATA = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.get_device, torch.Tensor.__len__, torch.Tensor.__hash__, torch.Tensor.is_signed,
    torch.Tensor.is_inference, torch.Tensor.is_pinned,
    torch.is_floating_point, torch.is_complex, torch.numel,
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)),
}  # fmt: skip
# likewise, but a parameter without values would answer for its one element
_LAYOUT = {torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset}
# what would give an address of values that are gone by then
_ADDRESSES = {"data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "share_memory_"}
_WRITES = {"__setitem__", "__set__", "backward"}
_FIRST = (
    "input",
    "self",
    "tensor",
)  # what the tensor is called that a function changes (torch.nn.init: tensor)
_REMOVE = "call remove() of the handle first"


@dataclass(frozen=True)
class Away:
    """Where the values of a lazy parameter are found.

    `fetch` gives them on the parameter's device, `home` in host memory, `layout` on meta, with its strides.
    `product(input, bias)` may compute a linear layer without them, or return None. `lookup(ids)` gives some
    rows.
    """

    label: str
    fetch: Fetch
    home: Fetch
    layout: Fetch
    product: Product | None = None
    lookup: Lookup | None = None


class Lazy(nn.Parameter):  # type: ignore[misc]  # torch isn't there when types are checked
    """A parameter without values. Takes one element of memory."""

    away: Away

    @staticmethod
    def of(away: Away, *, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "Lazy":
        """A parameter whose values are elsewhere."""
        poison = torch.empty((), dtype=dtype, device=device).expand(shape)
        made: Lazy = torch.Tensor._make_subclass(Lazy, poison, False)
        made.away = away
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Metadata from here, everything else on fetched values."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _LAYOUT:
            return func(args[0].away.layout(), *args[1:], **kwargs)
        if func in (F.linear, F.embedding) and type(args[0]) is not Lazy:
            found = (_linear if func is F.linear else _embedding)(*args, **kwargs)
            if found is not None:
                return found
        _refuse(func, args, kwargs)
        if func is torch.Tensor.detach:  # state_dict's way to a tensor; a whole model wouldn't fit in VRAM
            return args[0].away.home()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_values(args), **_values(kwargs))

    def __repr__(self, **_: Any) -> str:
        return f"Lazy({self.away.label}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy()


def refuse_copy() -> NoReturn:
    """Refuse what would share buffers with the placed model."""
    raise PlacementError("a placed model can't be copied or pickled", _REMOVE)


def _refuse(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse writes, which would be lost, and addresses, which would be of memory that is freed at once."""
    name = getattr(func, "__name__", "")
    for one in _lazies(kwargs.get("out")):
        _refuse_change(one, name)
    target = next(iter((*args[:1], *(kwargs[key] for key in _FIRST if key in kwargs))), None)
    if name == "requires_grad_" and not _wants_gradients(args, kwargs):
        return
    for one in _lazies(target):
        if name in _ADDRESSES:
            raise PlacementError(f"{one.away.label} has no address: its values are elsewhere", _REMOVE)
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            _refuse_change(one, name)


def _refuse_change(target: Lazy, name: str) -> NoReturn:
    raise PlacementError(
        f"{target.away.label} can't be changed (by {name}): the weights of a placed model are only read",
        _REMOVE,
    )


def _lazies(thing: Any) -> list[Lazy]:
    """A parameter without values, or those in a list of tensors."""
    return [one for one in (thing if isinstance(thing, list | tuple) else (thing,)) if type(one) is Lazy]


def _wants_gradients(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if type(weight) is not Lazy or weight.away.product is None:
        return None
    return weight.away.product(input, _values(bias))


def _embedding(input: torch.Tensor, weight: Any, *_: Any, **options: Any) -> torch.Tensor | None:
    """Rows alone; a largest norm would be applied to the table itself."""
    if type(weight) is not Lazy or weight.away.lookup is None or options.get("max_norm") is not None:
        return None
    return weight.away.lookup(input)


def _values(thing: Any) -> Any:
    if type(thing) is Lazy:
        return thing.away.fetch()
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*map(_values, thing))
    if isinstance(thing, tuple | list):
        return type(thing)(map(_values, thing))
    if isinstance(thing, dict):
        return {key: _values(value) for key, value in thing.items()}
    return thing
