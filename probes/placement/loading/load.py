"""`load`: a model from its checkpoint to the tiers of a plan, without ever being whole in memory."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import nn

from probes.errors import PlacementError
from probes.placement.loading.checkpoint import opened
from probes.placement.loading.fromfile import CheckpointValues
from probes.placement.loading.readahead import Buffer, FileWire, ReadAhead
from probes.placement.loading.skeleton import Factory, build
from probes.placement.models.modules import Entry
from probes.placement.models.reading import named_path
from probes.placement.packing.disk.cache import Cache, Kept, usual_folder
from probes.placement.packing.disk.content import Content
from probes.placement.packing.staging import Buffers, host_buffer
from probes.placement.packing.tensors import Values
from probes.placement.runtime.blocks.blockstore import Stored, memory_order
from probes.placement.runtime.blocks.lanes import Lanes
from probes.placement.runtime.blocks.wires import Wire
from probes.placement.runtime.overcards import Devices, lanes_of_cards, settle_cards
from probes.placement.runtime.place import settle
from probes.placement.runtime.preparing import lanes_of, require_plan
from probes.placement.runtime.storage.valuesource import own_values
from probes.placement.values import LOADING_BYTES, CardsPlan, Plan
from probes.shared.units import binary_bytes

REORDERED = 1 << 17  # numbers that are read at once to be brought into another order
STAGED = 3  # buffers of blocks that are read ahead: one is copied, one is full, one is read


def load(
    factory: Factory,
    checkpoint: Path | str,
    plan: Plan | CardsPlan,
    *,
    device: Devices = None,
    pinned: bool = True,
    ignored: Sequence[str] = (),
    cache: Path | str | bool = True,
) -> nn.Module:
    """Build a model with `factory` and bring the checkpoint's weights to their tiers, one tensor at a time.

    `factory` takes no arguments and returns the model; its parameters are never initialised. `checkpoint` is
    a safetensors file, a folder of them, or an index. `ignored` has patterns of stored tensors that the model
    doesn't need. `device` and `pinned` are as for `place`. What was packed is kept in the folder `cache`
    (True: the usual one, below $WEIR_STATE or ~/.cache; False: nowhere), and a second load reads it there.
    The model is in evaluation mode; `model.placement` is its `Handle`.

    Raises UsageError for what isn't a path, CheckpointUnreadable for a file that is malformed or changes
    meanwhile, PlacementError where checkpoint, model and plan don't fit each other, the plan's host memory
    has no room for what loading takes there, or memory is refused. Nothing is kept then.
    """
    place, folder = named_path(checkpoint, "checkpoint"), _cache_folder(cache)
    require_plan(plan)
    cards = plan.cards if isinstance(plan, CardsPlan) else (plan,)
    for card in cards:
        _require_room(card)
    every = lanes_of_cards(len(cards), device) if isinstance(plan, CardsPlan) else [lanes_of(device)]
    model = build(factory)
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        files = stack.enter_context(opened(place))
        values = CheckpointValues(model, files, ignored=ignored)
        values.fill_buffers()
        kept = Cache(folder, buffers=values.buffers) if folder else None
        sources = [
            FromCheckpoint(values, card, lanes, pinned=pinned, cache=kept)
            for card, lanes in zip(cards, every, strict=True)
        ]
        for source in sources:
            stack.callback(source.end)
        # the handle gives values of the tier `disk` back, so it closes the files
        if isinstance(plan, CardsPlan):
            over = settle_cards(model, plan, sources, every, pinned=pinned)
            model.__dict__["placement"], over.at_end = over, stack.pop_all()
        else:
            model.__dict__["placement"] = settle(model, plan, sources[0], every[0], pinned=pinned)
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


def _cache_folder(asked: Path | str | bool) -> Path | None:
    """None: nothing is kept. Raises UsageError for what isn't a path."""
    if isinstance(asked, bool):
        return usual_folder(os.environ) if asked else None
    return named_path(asked, "cache")


class FromCheckpoint:
    """The runtime's source of values: a checkpoint that is open."""

    again = True

    def __init__(
        self, values: CheckpointValues, plan: Plan, lanes: Lanes, *, pinned: bool, cache: Cache | None
    ) -> None:
        self._values = values
        self._converting = Buffers(1)  # for pieces, while others are in the buffers of `values`
        self._cache = cache
        self._lanes = lanes
        self._pinned = pinned and lanes.device.type == "cuda"
        self._largest = max((block.wire_bytes for block in plan.blocks if block.tier == "disk"), default=0)
        self.ahead: ReadAhead | None = None
        self.files = ExitStack()

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """Read into its place, by way of the model's own dtype."""
        self._values.bring(entry.parameter, target)

    def packed(self, entry: Entry, *, dense: bool) -> Kept | None:
        """Packed, or known from when it was packed before."""
        device = self._lanes.device
        on_device = partial(self._whole, entry, device) if device.type == "cuda" else None
        content = Content(partial(self._in_pieces, entry), on_device, dense)
        if not self._cache:
            return Kept.nowhere(content)
        return self._cache.packed(content, origin=self._values.origin(entry.parameter, memory_order(entry)))

    def _whole(self, entry: Entry, device: torch.device) -> Values:
        """The values in the order of memory."""
        order = memory_order(entry)
        found = torch.empty([entry.shape[d] for d in order], dtype=entry.given, device=device)
        self.fill(entry, found.permute([order.index(d) for d in range(len(order))]))
        return Values.of(found)

    def _in_pieces(self, entry: Entry) -> Values:
        """The same on the host, read as often as need be; as a whole where the order is quite another."""
        host, order = torch.device("cpu"), memory_order(entry)
        moved = next((d for d, at in enumerate(order) if d != at), None)
        if moved is not None and all(entry.shape):
            row = prod(entry.shape[moved:])
            return self._in_rows(entry, moved, row) if row <= REORDERED else self._whole(entry, host)

        def read(first: int, last: int, memory: torch.Tensor | None) -> torch.Tensor:
            if memory is None:
                memory = torch.empty((last - first) * entry.given.itemsize, dtype=torch.uint8, device="cpu")
            found = memory.view(entry.given)
            self._values.bring(entry.parameter, found, first=first, buffers=self._converting)
            return found

        return Values(entry.given, entry.shape, host, read)

    def _in_rows(self, entry: Entry, moved: int, row: int) -> Values:
        """The same of a tensor that is stored in another order, but only within rows of so many numbers.

        These are over its dimensions from `moved` on: of a convolution with `channels_last`, an output's.
        """
        order = memory_order(entry)
        shape, n = tuple(entry.shape[d] for d in order), prod(entry.shape)
        step = REORDERED // row * row

        def read(first: int, last: int, memory: torch.Tensor | None) -> torch.Tensor:
            found = (
                torch.empty(last - first, dtype=entry.given, device="cpu")
                if memory is None
                else memory.view(entry.given)
            )
            for begin in range(first // row * row, last, step):
                part = torch.empty(min(step, n - begin), dtype=entry.given, device="cpu")
                self._values.bring(entry.parameter, part, first=begin, buffers=self._converting)
                rows = part.view(-1, *entry.shape[moved:]).permute(0, *(d - moved + 1 for d in order[moved:]))
                low, high = max(first, begin), min(last, begin + part.numel())
                found[low - first : high - first] = rows.reshape(-1)[low - begin : high - begin]
            return found

        return Values(entry.given, shape, torch.device("cpu"), read)

    def way_back(self, entry: Entry, _view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """They are read again."""
        return partial(own_values, self, entry)

    def wire(self, stored: Stored, _lanes: Lanes) -> Wire:
        """What reads a block ahead in each pass."""
        if self.ahead is None:
            self.ahead = ReadAhead(self._staging(stored.n_bytes))
        self.ahead.widen(stored.n_bytes, partial(self._staging, stored.n_bytes))  # beyond the plan's figures
        return FileWire(self.ahead, stored.n_bytes, partial(self._fill, stored))

    def _staging(self, least: int) -> list[Buffer]:
        size = max(self._largest, least)
        return [Buffer(host_buffer(size, pinned=self._pinned), self._lanes.mark()) for _ in range(STAGED)]

    def _fill(self, stored: Stored, memory: torch.Tensor) -> None:
        for item in stored.items:
            self.fill(item.entry, item.given(memory) if item.form else item.raw(memory))

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def end(self) -> None:
        """End the thread that reads ahead."""
        if self.ahead is not None:
            self.ahead.close()
