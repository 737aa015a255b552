"""Which tensor of a checkpoint fills which parameter or buffer of a model, and what doesn't fit."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from probes.errors import PlacementError
from probes.placement.models.description import DTYPE_BITS
from probes.placement.models.headers import DTYPES, StoredTensor

SHOWN = 4  # names of each kind in a message


@dataclass(frozen=True, eq=False)
class Target:
    """A parameter or a buffer of the model, under all of its names, the first one first."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]  # every module that holds it, and its name there
    is_parameter: bool
    needed: bool  # False: the factory has given it values, and `state_dict` leaves it out


@dataclass(frozen=True)
class Filling:
    """A target and the tensors that hold its values: more than one where ties were saved twice."""

    target: Target
    sources: tuple[str, ...]


def targets(model: nn.Module) -> list[Target]:
    """All parameters and buffers of a model, each once."""
    names: dict[int, list[str]] = defaultdict(list)
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    found: dict[int, tuple[torch.Tensor, bool, bool]] = {}
    for prefix, module in model.named_modules(
        remove_duplicate=False
    ):  # as `state_dict` repeats shared modules
        held = [(name, tensor, True) for name, tensor in module._parameters.items()]
        held += [(name, tensor, False) for name, tensor in module._buffers.items()]
        for name, tensor, is_parameter in held:
            if tensor is None:
                continue
            kept = is_parameter or name not in module._non_persistent_buffers_set
            before = found.get(id(tensor))
            found[id(tensor)] = (tensor, is_parameter, kept or (before is not None and before[2]))
            names[id(tensor)].append(f"{prefix}.{name}".lstrip("."))
            if (module, name) not in owners[id(tensor)]:
                owners[id(tensor)].append((module, name))
    return [
        Target(tensor, tuple(names[key]), tuple(owners[key]), is_parameter, kept or tensor.is_meta)
        for key, (tensor, is_parameter, kept) in found.items()
    ]


def fit(
    wanted: Sequence[Target], stored: Mapping[str, StoredTensor], *, where: str, ignored: Sequence[str] = ()
) -> list[Filling]:
    """The filling of every target that the checkpoint has values for.

    `ignored`: patterns (`*` matches anything) of stored tensors that the model doesn't need. A stored tensor
    with the name of a buffer that `state_dict` leaves out is ignored as well: older exports contain them.
    Raises PlacementError that names the first few tensors that are missing, not part of the model or of
    another shape.
    """
    fillings, missing, misshaped = [], [], []
    for target in wanted:
        sources = tuple(name for name in target.names if name in stored)
        if not target.needed:
            continue
        if not sources:
            missing.append(target.names[0])
        else:
            fillings.append(Filling(target, sources))
        misshaped += [
            f"{name} {list(stored[name].shape)} instead of {list(target.tensor.shape)}"
            for name in sources
            if stored[name].shape != tuple(target.tensor.shape)
        ]
    known = {name for target in wanted for name in target.names}
    unknown = [
        name
        for name in stored
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    complaints = (
        _listed("missing", missing),
        _listed("not part of this model", unknown),
        _listed("of another shape", misshaped),
        _listed("of a type that can't become the model's", _inconvertible(fillings, stored)),
    )
    if any(complaints):
        raise PlacementError(
            f"{where} doesn't fit the model: {'; '.join(filter(None, complaints))}",
            "load the checkpoint of this very model; name tensors that it doesn't need with ignored=[...]",
        )
    return fillings


def _inconvertible(fillings: Sequence[Filling], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Floating-point values don't become whole numbers or the reverse: that would be another model."""
    return [
        f"{name} {stored[name].dtype} instead of {str(filling.target.tensor.dtype).removeprefix('torch.')}"
        for filling in fillings
        for name in filling.sources
        if not _becomes(torch_dtype(stored[name]), filling.target.tensor.dtype)
    ]


def torch_dtype(stored: StoredTensor) -> torch.dtype | None:
    """The dtype of a stored tensor; None where this version of torch doesn't know it."""
    found: torch.dtype | None = getattr(torch, DTYPES[stored.dtype], None)
    return found


def _becomes(stored: torch.dtype | None, wanted: torch.dtype) -> bool:
    """Whether torch converts the one to the other, and what is lost is precision alone.

    Floating-point numbers of 4 bits come in pairs, and those of 8 bits don't become each other.
    """
    if stored is wanted:
        return True
    if stored is None or stored.is_complex or wanted.is_complex:
        return False
    if stored.is_floating_point or wanted.is_floating_point:
        both = stored.is_floating_point and wanted.is_floating_point
        return both and wanted.itemsize > 1 and DTYPE_BITS[str(stored).removeprefix("torch.")] >= 8
    if torch.bool in (stored, wanted):
        return stored is torch.bool
    has, takes = torch.iinfo(stored), torch.iinfo(wanted)
    return bool(takes.min <= has.min and has.max <= takes.max)


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"
