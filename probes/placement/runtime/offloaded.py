"""A parameter without values: it knows its shape, dtype and device, and fetches values when they are read.

A placed module's own forward finds its weights in place, because they are brought before its call. Whatever
else reads a weight (another module's forward, a scripted function, a debugger) meets this, and gets the right
values, slowly. It has no memory, so what asks for an address gets an error and never other numbers.

To who only asks, it looks like any parameter that wants no gradients. torch's encoders, for example, choose
another way where a weight has a `__torch_function__`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F

from probes.core.errors import PlacementError

Fetch = Callable[[], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
Lookup = Callable[[torch.Tensor], torch.Tensor]

_HOST: Final = torch.device("cpu")
_REMOVE: Final = "call remove() of the handle first"
# torch before 2.3 gives address 0 instead of an error
_HAVE_NO_ADDRESS: Final[Callable[[torch.Tensor], object]] = getattr(
    torch._C, "_set_throw_on_mutable_data_ptr", id
)


@dataclass(frozen=True)
class WeightAccess:
    """Where the values of a lazy parameter are found.

    `outline` has its shape, strides and dtype, on meta. `fetch` gives its values on `device`, `home` in host
    memory. `product(input, bias)` may compute a linear layer without them, or return None. `lookup(ids)`
    gives some rows. `wants` notes whether gradients are wanted. `attributes`: those of the model's own
    parameter, such as libraries give it.
    """

    label: str
    outline: torch.Tensor
    device: torch.device
    fetch: Fetch
    home: Fetch
    wants: Callable[[bool], None]
    attributes: dict[str, Any]
    product: Product | None = None
    lookup: Lookup | None = None

    def values(self) -> torch.Tensor:
        """Fetched as an ordinary tensor, like the lazy one: an inference tensor's views would not fit it."""
        with torch.inference_mode(False), torch.no_grad():
            return self.fetch()


class OffloadedParameter(torch.Tensor):  # type: ignore[misc]  # torch isn't there when types are checked
    """A parameter without values and without memory."""

    __slots__ = ("away",)
    __torch_function__ = torch._C._disabled_torch_function_impl
    _is_param = True  # so it is an instance of nn.Parameter

    away: WeightAccess

    @classmethod
    def of(cls, away: WeightAccess) -> "OffloadedParameter":
        """A tensor of this class whose values are elsewhere."""
        with torch.inference_mode(False):
            made: OffloadedParameter = torch.Tensor._make_wrapper_subclass(
                cls,
                away.outline.shape,
                strides=away.outline.stride(),
                dtype=away.outline.dtype,
                device=away.device,
                requires_grad=False,
            )
        _HAVE_NO_ADDRESS(made)
        made.away = away
        made.__dict__ = away.attributes  # type: ignore[misc]  # a tensor has both this and slots
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation, also those of scripts and transforms: on fetched values."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:  # `.data`, too
            return DetachedParameter.of(args[0].away)
        for one in _changed(func, args, kwargs):
            one.refuse_change(func.overloadpacket.__name__)
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == _HOST:
            return func(args[0].away.home(), **kwargs)  # several of them may not fit in VRAM
        return func(*_values(args), **_values(kwargs))

    def refuse_change(self, by: str) -> NoReturn:
        """Refuse what would be lost."""
        raise PlacementError(
            f"{self.away.label} can't be changed (by {by}): the weights of a placed model are only read",
            _REMOVE,
        )

    def _refuse_address(self, *_args: Any, **_options: Any) -> NoReturn:
        raise PlacementError(f"{self.away.label} has no address: its values are elsewhere", _REMOVE)

    data_ptr = share_memory_ = _refuse_address
    __dlpack__ = _refuse_address

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; it can't be set."""
        return self.detach()

    @data.setter
    def data(self, _values: torch.Tensor) -> None:
        self.refuse_change("data")

    @property
    def grad(self) -> None:
        """There are no gradients."""
        return

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.refuse_change("grad")

    @property
    def requires_grad(self) -> bool:
        """Placed weights want none, whatever is asked: what is asked counts after `remove()`."""
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> "OffloadedParameter":
        """Note it for `remove()`: no weight changes by it."""
        self.away.wants(bool(requires_grad))
        return self

    def __setitem__(self, _where: Any, _values: Any) -> NoReturn:
        """Refused: else a copy would be changed."""
        self.refuse_change("[...] =")

    def backward(self, *_args: Any, **_options: Any) -> NoReturn:
        """Refused."""
        self.refuse_change("backward")

    def numpy(self, *, force: bool = False) -> Any:
        """The values, which torch refuses to give of its subclasses."""
        return self.away.values().numpy(force=force)

    def tolist(self) -> Any:
        """Likewise."""
        return self.away.values().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Lazy({self.away.label}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy()


class DetachedParameter(OffloadedParameter):
    """What `detach()` and `.data` give of one."""

    __slots__ = ()
    _is_param = False

    def requires_grad_(self, requires_grad: bool = True) -> OffloadedParameter:
        """Refused: gradients of it would be those of a tensor of its own."""
        if requires_grad:
            self.refuse_change("requires_grad_")
        return self


class PackedParameter(OffloadedParameter):
    """One that has products or rows without its values."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Linear layers and lookups from here, everything else as of any other."""
        kwargs = kwargs or {}
        found = None
        if func is F.linear:
            found = _linear(*args, **kwargs)
        elif func is F.embedding:
            found = _embedding(*args, **kwargs)
        if found is not None:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def refuse_copy() -> NoReturn:
    """Refuse what would share buffers with the placed model."""
    raise PlacementError("a placed model can't be copied or pickled", _REMOVE)


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[OffloadedParameter]:
    """The lazy parameters that an operation would write to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (one for one in _several(given) if isinstance(one, OffloadedParameter))


def _several(given: Any) -> Any:
    return given if isinstance(given, list | tuple) else (given,)


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if (
        isinstance(input, OffloadedParameter)
        or not isinstance(weight, PackedParameter)
        or weight.away.product is None
    ):
        return None
    return weight.away.product(input, _values(bias))


def _embedding(
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *more: Any,
    **options: Any,
) -> torch.Tensor | None:
    """Rows alone; of the whole table where a largest norm is applied to it first."""
    if not isinstance(weight, PackedParameter) or weight.away.lookup is None:
        return None
    if max_norm is None:
        return weight.away.lookup(input)
    return F.embedding(_values(input), weight.away.values(), padding_idx, max_norm, *more, **options)


def _values(thing: Any) -> Any:
    if isinstance(thing, OffloadedParameter):
        return thing.away.values()
    if isinstance(thing, tuple | list):
        return type(thing)(map(_values, thing))
    if isinstance(thing, dict):
        return {key: _values(value) for key, value in thing.items()}
    return thing
