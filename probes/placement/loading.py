"""`load`: brings a model from its checkpoint to the tiers of a plan, without ever having it whole in memory.

The factory's model gets parameters on meta (`build_skeleton`), its tensors are matched with the stored ones
(`match_tensors`), and `CheckpointWeights` gives the builder their values.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes
from probes.hardware.torch_build import first_line
from probes.placement.checkpoint import Checkpoint, open_checkpoint
from probes.placement.models.description import DTYPE_BITS
from probes.placement.models.headers import StoredTensor
from probes.placement.models.modules import Entry
from probes.placement.models.reading import named_path
from probes.placement.packing.cache import Cache, CachedTensor, Content, Origin, usual_folder
from probes.placement.packing.staging import HostBuffers, bytes_of, host_buffer
from probes.placement.packing.tensors import Values
from probes.placement.read_ahead import FileSource, ReadAhead, ReadBuffer
from probes.placement.runtime.buffers import StoredBlock, memory_order
from probes.placement.runtime.builder import require_plan
from probes.placement.runtime.multi_gpu import Devices, place_on_cards, streams_of_cards
from probes.placement.runtime.place import Refine, machine_to_refine_by, place_model
from probes.placement.runtime.streams import Streams, streams_of
from probes.placement.runtime.weight_sources import WeightSource, conversion_error, given_values
from probes.placement.tensor_reading import convert_into, torch_dtype
from probes.placement.types import DISK_BUFFERS, LOADING_BYTES, CardsPlan, Plan

Factory = Callable[[], nn.Module]
SHOWN = 4  # names of each kind in a message
REORDERED = 1 << 17  # numbers that are read at once to be brought into another order
COMPARED_BYTES = 16 << 20  # of two tensors, that are compared at once


def load(
    factory: Factory,
    checkpoint: Path | str,
    plan: Plan | CardsPlan,
    *,
    device: Devices = None,
    pinned: bool = True,
    ignored: Sequence[str] = (),
    cache: Path | str | bool = True,
    refine: Refine = False,
) -> nn.Module:
    """Build a model with `factory` and bring the checkpoint's weights to their tiers, one tensor at a time.

    `factory` takes no arguments and returns the model; its parameters are never initialised. `checkpoint` is
    a safetensors file, a folder of them, or an index. `ignored` has patterns of stored tensors that the model
    doesn't need. `device`, `pinned` and `refine` are as for `place`. What was packed is kept in the folder
    `cache` (True: the usual one, below $WEIR_STATE or ~/.cache; False: nowhere), and a second load reads it.
    The model is in evaluation mode; `model.placement` is its `Handle`.

    Raises UsageError for what isn't a path, CheckpointUnreadable for a file that is malformed or changes
    meanwhile, PlacementError where checkpoint, model and plan don't fit each other, the plan's host memory
    has no room for what loading takes there, or memory is refused. Nothing is kept then.
    """
    path, folder = named_path(checkpoint, "checkpoint"), _cache_folder(cache)
    require_plan(plan)
    machine = machine_to_refine_by(plan, refine)
    cards = plan.cards if isinstance(plan, CardsPlan) else (plan,)
    for card in cards:
        _require_room(card)
    several = isinstance(plan, CardsPlan)
    all_streams = streams_of_cards(len(cards), device) if several else [streams_of(device)]
    model = build_skeleton(factory)
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        files = stack.enter_context(open_checkpoint(path))
        values = CheckpointValues(model, files, ignored=ignored)
        values.fill_buffers()
        packed_cache = Cache(folder, buffers=values.buffers) if folder else None
        sources = [
            CheckpointWeights(values, card, streams, pinned=pinned, cache=packed_cache)
            for card, streams in zip(cards, all_streams, strict=True)
        ]
        for source in sources:
            stack.callback(source.end)
        # the handle gives values of the tier `disk` back, so it closes the files
        if isinstance(plan, CardsPlan):
            handle = place_on_cards(model, plan, sources, all_streams, pinned=pinned)
            model.__dict__["placement"], handle.at_end = handle, stack.pop_all()
        else:
            model.__dict__["placement"] = place_model(
                model, plan, sources[0], all_streams[0], pinned=pinned, refine=machine
            )
            sources[0].files = stack.pop_all()
    values.buffers.release()
    return model


def _require_room(plan: Plan) -> None:
    """Raise PlacementError for a plan of a model in memory that has no room for what loading takes besides.

    A plan without budgets, made by hand, is followed as it is.
    """
    kept = plan.host.pinned + plan.host.pageable
    if (plan.vram_budget or plan.host_budget) and kept + LOADING_BYTES > plan.host_budget:
        raise PlacementError(
            f"the plan keeps {binary_bytes(kept)} in {binary_bytes(plan.host_budget)} of host memory, and "
            f"loading takes {binary_bytes(LOADING_BYTES)} besides",
            "plan the checkpoint, or the model on meta, with this host memory",
        )


def _cache_folder(cache: Path | str | bool) -> Path | None:
    """None: nothing is kept. Raises UsageError for what isn't a path."""
    if isinstance(cache, bool):
        return usual_folder(os.environ) if cache else None
    return named_path(cache, "cache")


def build_skeleton(factory: Factory) -> nn.Module:
    """The factory's model in evaluation mode, its parameters on meta and without gradients.

    Raises PlacementError when the factory returns anything but a module, makes tensor subclasses, or reads
    values of parameters. Errors of its own are its own.
    """
    try:
        with _parameters_on_meta(), torch.inference_mode(False):
            model = factory()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise PlacementError(
            "the factory reads values of parameters, which have none before the checkpoint is loaded: "
            f"{first_line(error)}",
            "leave that out of the factory, or load the model yourself and give it to place()",
        ) from error
    if not isinstance(model, nn.Module):
        raise PlacementError(
            f"the factory returned {type(model).__name__}, not a torch.nn.Module",
            "pass a function without arguments that builds the model",
        )
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if (
                parameter is not None and parameter.device.type != "meta"
            ):  # put there past `register_parameter`
                module._parameters[name] = _bare(parameter)
    return model.requires_grad_(False).eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """In this thread, every parameter that is registered is exchanged for one on meta. Ties are kept."""
    thread = threading.get_ident()
    met: dict[int, nn.Parameter] = {}
    alive: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()

    def exchange(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.device.type == "meta":
            return None
        if alive.get(id(parameter)) is not parameter:
            alive[id(parameter)], met[id(parameter)] = parameter, _bare(parameter)
        return met[id(parameter)]

    hook = register_module_parameter_registration_hook(exchange)
    try:
        yield
    finally:
        hook.remove()


def _bare(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter without its values. Refuses tensor subclasses, which hold more than that."""
    if type(parameter.data) is not torch.Tensor:
        raise PlacementError(
            f"the factory makes parameters of type {type(parameter.data).__name__}",
            "build the model without quantisation or other tensor subclasses",
        )
    values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    bare = nn.Parameter(values, requires_grad=False)
    bare.__dict__.update(parameter.__dict__)
    return bare


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A parameter or a buffer of the model, under all of its names, the first one first."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]  # every module that holds it, and its name there
    is_parameter: bool
    needed: bool  # False: the factory has given it values, and `state_dict` leaves it out


@dataclass(frozen=True)
class TensorMatch:
    """A tensor of the model and the stored ones with its values: several where ties were saved twice."""

    target: ModelTensor
    sources: tuple[str, ...]


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """All parameters and buffers of a model, each once."""
    names: dict[int, list[str]] = defaultdict(list)
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    tensors: dict[int, tuple[torch.Tensor, bool, bool]] = {}
    for prefix, module in model.named_modules(
        remove_duplicate=False
    ):  # as `state_dict` repeats shared modules
        held = [(name, tensor, True) for name, tensor in module._parameters.items()]
        held += [(name, tensor, False) for name, tensor in module._buffers.items()]
        for name, tensor, is_parameter in held:
            if tensor is None:
                continue
            kept = is_parameter or name not in module._non_persistent_buffers_set
            before = tensors.get(id(tensor))
            tensors[id(tensor)] = (tensor, is_parameter, kept or (before is not None and before[2]))
            names[id(tensor)].append(f"{prefix}.{name}".lstrip("."))
            if (module, name) not in owners[id(tensor)]:
                owners[id(tensor)].append((module, name))
    return [
        ModelTensor(tensor, tuple(names[key]), tuple(owners[key]), is_parameter, kept or tensor.is_meta)
        for key, (tensor, is_parameter, kept) in tensors.items()
    ]


def match_tensors(
    wanted: Sequence[ModelTensor],
    stored: Mapping[str, StoredTensor],
    *,
    where: str,
    ignored: Sequence[str] = (),
) -> list[TensorMatch]:
    """Match every target with the stored tensors that have its values.

    `ignored`: patterns (`*` matches anything) of stored tensors that the model doesn't need. A stored tensor
    with the name of a buffer that `state_dict` leaves out is ignored as well: older exports contain them.
    Raises PlacementError that names the first few tensors that are missing, not part of the model or of
    another shape.
    """
    matches, missing, misshaped = [], [], []
    for target in wanted:
        sources = tuple(name for name in target.names if name in stored)
        if not target.needed:
            continue
        if not sources:
            missing.append(target.names[0])
        else:
            matches.append(TensorMatch(target, sources))
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
        _listed("of a type that can't become the model's", _inconvertible(matches, stored)),
    )
    if any(complaints):
        raise PlacementError(
            f"{where} doesn't fit the model: {'; '.join(filter(None, complaints))}",
            "load the checkpoint of this very model; name tensors that it doesn't need with ignored=[...]",
        )
    return matches


def _inconvertible(matches: Sequence[TensorMatch], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Floating-point values don't become whole numbers or the reverse: that would be another model."""
    return [
        f"{name} {stored[name].dtype} instead of {str(match.target.tensor.dtype).removeprefix('torch.')}"
        for match in matches
        for name in match.sources
        if not _becomes(torch_dtype(stored[name]), match.target.tensor.dtype)
    ]


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


class CheckpointValues:
    """Fills tensors, of any device, with the values that the checkpoint has for a model's parameters.

    A parameter is known by itself, not by a name: ties and shared modules have several names.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, *, ignored: Sequence[str] = ()) -> None:
        self._checkpoint = checkpoint
        self._targets = model_tensors(model)
        shaped = checkpoint.tensors
        matches = match_tensors(self._targets, shaped, where=str(checkpoint.path), ignored=ignored)
        self._matches = {id(match.target.tensor): match for match in matches}
        self.buffers = HostBuffers()
        for match in matches:
            self._refuse_unequal_ties(match)

    def bring(
        self,
        parameter: torch.Tensor,
        target: torch.Tensor,
        *,
        first: int = 0,
        buffers: HostBuffers | None = None,
    ) -> None:
        """Fill `target` with the values of a parameter of the model, from the `first` on.

        They are converted where its dtype is another. Raises CheckpointUnreadable, and PlacementError for a
        number that is too large for that dtype.
        """
        name = self._matches[id(parameter)].sources[0]
        stored = self.dtype(parameter)

        def read(memory: memoryview, start: int) -> None:
            self._checkpoint.read_into(name, memory, first * stored.itemsize + start)

        try:
            convert_into(read, stored, target, given=parameter.dtype, buffers=buffers or self.buffers)
        except OverflowError as error:
            raise conversion_error(name, error) from error

    def dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype that the parameter is stored in."""
        name = self._matches[id(parameter)].sources[0]
        dtype = torch_dtype(self._checkpoint.tensors[name])
        assert dtype is not None  # else it didn't fit the model
        return dtype

    def origin(self, parameter: torch.Tensor, order: tuple[int, ...]) -> Origin | None:
        """Where the parameter's bytes are in a file; None where they are of another dtype there.

        `order`: of its dimensions in memory, from the slowest to the quickest.
        """
        stored = self._checkpoint.tensors[self._matches[id(parameter)].sources[0]]
        if torch_dtype(stored) is not parameter.dtype:
            return None
        moved = order if order != tuple(range(len(order))) else ()
        path, start = self._checkpoint.file_of(stored.name), stored.offset
        dtype = str(parameter.dtype).removeprefix("torch.")
        return Origin(path, start, start + stored.n_bytes, dtype, stored.shape, moved)

    def fill_buffers(self) -> None:
        """Read the buffers that the checkpoint has. The others keep the values that the factory gave them."""
        for match in list(self._matches.values()):
            if not match.target.is_parameter:
                self._fill_buffer(match)

    def _fill_buffer(self, match: TensorMatch) -> None:
        known = match.target.tensor
        filled = torch.empty_like(known, device="cpu" if known.is_meta else known.device)
        self.bring(known, filled)
        for module, name in match.target.owners:
            module._buffers[name] = filled
        self._matches[id(filled)] = match

    def _refuse_unequal_ties(self, match: TensorMatch) -> None:
        """Two stored tensors for one parameter must be equal: the model would use one of them for both."""
        first, *others = match.sources
        for other in others:
            if not self._equal(first, other):
                raise PlacementError(
                    f"the model uses one tensor for {first} and {other}, and {self._checkpoint.path} has "
                    "different values for them",
                    "build the model without tied weights, or save the checkpoint again",
                )

    def _equal(self, one: str, other: str) -> bool:
        stored = [self._checkpoint.tensors[name] for name in (one, other)]
        if (stored[0].dtype, stored[0].n_bytes) != (stored[1].dtype, stored[1].n_bytes):
            return False
        left, right = (torch.empty(COMPARED_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
        for start in range(0, stored[0].n_bytes, COMPARED_BYTES):
            count = min(COMPARED_BYTES, stored[0].n_bytes - start)
            for name, buffer in ((one, left), (other, right)):
                self._checkpoint.read_into(name, bytes_of(buffer)[:count], start)
            if not torch.equal(left[:count], right[:count]):
                return False
        return True


class CheckpointWeights:
    """The weights of a model whose checkpoint is open."""

    rereadable = True

    def __init__(
        self, values: CheckpointValues, plan: Plan, streams: Streams, *, pinned: bool, cache: Cache | None
    ) -> None:
        self._values = values
        self._converting = HostBuffers(1)  # for pieces, while others are in the buffers of `values`
        self._cache = cache
        self._streams = streams
        self._pinned = pinned and streams.device.type == "cuda"
        self._largest = max((block.wire_bytes for block in plan.blocks if block.tier == "disk"), default=0)
        self.ahead: ReadAhead | None = None
        self.files = ExitStack()

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """Read into its place, by way of the model's own dtype."""
        self._values.bring(entry.parameter, target)

    def packed(self, entry: Entry, *, dense: bool) -> CachedTensor | None:
        """Packed, or known from when it was packed before."""
        device = self._streams.device
        on_device = partial(self._whole, entry, device) if device.type == "cuda" else None
        content = Content(partial(self._in_pieces, entry), on_device, dense)
        if not self._cache:
            return CachedTensor.nowhere(content)
        return self._cache.packed(content, origin=self._values.origin(entry.parameter, memory_order(entry)))

    def _whole(self, entry: Entry, device: torch.device) -> Values:
        """The values in the order of memory."""
        order = memory_order(entry)
        values = torch.empty([entry.shape[d] for d in order], dtype=entry.given, device=device)
        self.fill(entry, values.permute([order.index(d) for d in range(len(order))]))
        return Values.of(values)

    def _in_pieces(self, entry: Entry) -> Values:
        """The values on the host, read in pieces, as often as need be; whole where their order is unlike."""
        host, order = torch.device("cpu"), memory_order(entry)
        moved = next((d for d, at in enumerate(order) if d != at), None)
        if moved is not None and all(entry.shape):
            row = prod(entry.shape[moved:])
            return self._in_rows(entry, moved, row) if row <= REORDERED else self._whole(entry, host)

        def read(first: int, last: int, memory: torch.Tensor | None) -> torch.Tensor:
            if memory is None:
                memory = torch.empty((last - first) * entry.given.itemsize, dtype=torch.uint8, device="cpu")
            values = memory.view(entry.given)
            self._values.bring(entry.parameter, values, first=first, buffers=self._converting)
            return values

        return Values(entry.given, entry.shape, host, read)

    def _in_rows(self, entry: Entry, moved: int, row: int) -> Values:
        """The values of a tensor that is stored in another order, but only within rows of so many numbers.

        These are over its dimensions from `moved` on: of a convolution with `channels_last`, an output's.
        """
        order = memory_order(entry)
        shape, n = tuple(entry.shape[d] for d in order), prod(entry.shape)
        step = REORDERED // row * row

        def read(first: int, last: int, memory: torch.Tensor | None) -> torch.Tensor:
            values = (
                torch.empty(last - first, dtype=entry.given, device="cpu")
                if memory is None
                else memory.view(entry.given)
            )
            for begin in range(first // row * row, last, step):
                part = torch.empty(min(step, n - begin), dtype=entry.given, device="cpu")
                self._values.bring(entry.parameter, part, first=begin, buffers=self._converting)
                rows = part.view(-1, *entry.shape[moved:]).permute(0, *(d - moved + 1 for d in order[moved:]))
                low, high = max(first, begin), min(last, begin + part.numel())
                values[low - first : high - first] = rows.reshape(-1)[low - begin : high - begin]
            return values

        return Values(entry.given, shape, torch.device("cpu"), read)

    def restorer(self, entry: Entry, _view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that reads the values from the checkpoint again."""
        return partial(given_values, self, entry)

    def weight_source(self, stored: StoredBlock, _streams: Streams) -> WeightSource:
        """What reads a block ahead in each pass."""
        if self.ahead is None:
            self.ahead = ReadAhead(self._staging(stored.n_bytes))
        self.ahead.widen(stored.n_bytes, partial(self._staging, stored.n_bytes))  # beyond the plan's figures
        return FileSource(self.ahead, stored.n_bytes, partial(self._fill, stored))

    def _staging(self, least: int) -> list[ReadBuffer]:
        size = max(self._largest, least)
        return [
            ReadBuffer(host_buffer(size, pinned=self._pinned), self._streams.event())
            for _ in range(DISK_BUFFERS)
        ]

    def _fill(self, stored: StoredBlock, memory: torch.Tensor) -> None:
        for item in stored.items:
            self.fill(item.entry, item.given(memory) if item.form else item.raw(memory))

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def end(self) -> None:
        """End the thread that reads ahead."""
        if self.ahead is not None:
            self.ahead.close()
