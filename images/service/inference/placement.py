"""A BERT whose weights are placed by a plan: some stay in VRAM, others stream to it or compute on the host.

Planning and placing are those of `probes.placement`, which every image holds beside the service.
"""

import gc
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from probes.core.errors import PlanImpossible, ProbeError
from probes.hardware.host import available_bytes
from probes.placement import Plan, place, plan
from service.errors import DeviceMissing, SettingsError
from service.inference import bert
from service.inference.architecture import BertShape
from service.inference.device import Device
from service.settings import Placement


class Allowances:
    """The bytes of each card that were given out. One for a process, whose allocator has one limit a card."""

    def __init__(self) -> None:
        self._given: defaultdict[str, list[int]] = defaultdict(list)
        self._lock = threading.RLock()  # a model may be found to be gone at any moment

    def give(self, place: str, n_bytes: int) -> None:
        """Let a model that is about to be placed take so many bytes more."""
        with self._lock:
            self._given[place].append(n_bytes)
            self._limit(place)

    def take_back(self, place: str, n_bytes: int) -> None:
        """Its memory has been released. Without any model, nothing is limited."""
        with self._lock:
            self._given[place].remove(n_bytes)
            self._limit(place)

    def _limit(self, place: str) -> None:
        total = torch.cuda.get_device_properties(place).total_memory
        given = sum(self._given[place]) or total
        torch.cuda.set_per_process_memory_fraction(min(given / total, 1.0), place)


ALLOWANCES = Allowances()


MAX_WIDTH = 512  # tokens of the longest row


class _Part(nn.Module):  # type: ignore[misc]  # torch is not read here
    """Weights that are used in one call."""

    def __init__(self, weights: bert.Weights, shape: BertShape, *prefixes: str) -> None:
        super().__init__()
        self._shape = shape
        self._keys = {name: name.replace(".", "__") for name in weights if name.startswith(prefixes)}
        for name, key in self._keys.items():
            self.register_parameter(key, nn.Parameter(weights[name], requires_grad=False))

    def weights(self) -> bert.Weights:
        """The weights by their names, where they are now."""
        return {name: getattr(self, key) for name, key in self._keys.items()}


class _Embeddings(_Part):
    def forward(self, ids: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [rows, tokens, hidden] of ids."""
        return bert.embed(self.weights(), self._shape, ids, types)


class _Layer(_Part):
    def __init__(self, weights: bert.Weights, shape: BertShape, prefix: str) -> None:
        super().__init__(weights, shape, f"{prefix}.")
        self._prefix = prefix

    def forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next hidden states."""
        return bert.layer(self.weights(), self._shape, self._prefix, hidden, attended)


class _Head(_Part):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, labels]."""
        return bert.classified(self.weights(), hidden)


class PlaceableBert(nn.Module):  # type: ignore[misc]
    """BERT as modules that can be placed one by one. Computes what `bert` computes."""

    def __init__(self, weights: bert.Weights, shape: BertShape) -> None:
        super().__init__()
        self.embeddings = _Embeddings(weights, shape, "bert.embeddings.")
        numbers = range(shape.num_hidden_layers)
        self.layers = nn.ModuleList(_Layer(weights, shape, f"bert.encoder.layer.{n}") for n in numbers)
        self.head = _Head(weights, shape, "bert.pooler.", "classifier.")

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        types: torch.Tensor | None,
        task: Literal["classify", "embed"],
    ) -> torch.Tensor:
        """Logits [rows, labels], or embeddings [rows, hidden]."""
        hidden = self.embeddings(ids, types)
        attended = mask[:, None, None, :]
        for each in self.layers:
            hidden = each(hidden, attended)
        found: torch.Tensor = bert.embedded(hidden, mask) if task == "embed" else self.head(hidden)
        return found


class PlacedBert:
    """A BERT that was placed. Its memory is released as soon as nobody has it any more."""

    def __init__(self, model: PlaceableBert, pinned_bytes: int, released: Callable[[], object]) -> None:
        self.pinned_bytes = pinned_bytes
        self._model: PlaceableBert | None = model
        self._released = released

    def __call__(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        types: torch.Tensor | None,
        task: Literal["classify", "embed"],
    ) -> torch.Tensor:
        """See `Outputs`."""
        assert self._model is not None
        found: torch.Tensor = self._model(ids, mask, types, task)
        return found

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._model = None
            gc.collect()  # its modules and what places them refer to each other
            self._released()


def placed(
    weights: bert.Weights, shape: BertShape, wanted: Placement, device: Device, *, max_batch_tokens: int
) -> tuple[PlacedBert, Plan]:
    """The model, placed on the device within the budget, and the plan. `weights` are on the CPU.

    A budget that the profile names limits torch's allocator, too. Raises SettingsError for a machine that
    isn't known, DeviceMissing where the budget is too small.
    """
    model = PlaceableBert(weights, shape)
    with ExitStack() as failed:
        if wanted.vram_budget is not None and device.torch_name != "cpu":
            ALLOWANCES.give(device.torch_name, wanted.vram_budget)
            failed.callback(_take_back, device.torch_name, wanted.vram_budget)
        made, pinned_bytes = _placed(model, wanted, device, max_batch_tokens=max_batch_tokens)
        return PlacedBert(model, pinned_bytes, failed.pop_all().close), made


def _take_back(place: str, n_bytes: int) -> None:
    torch.cuda.empty_cache()
    ALLOWANCES.take_back(place, n_bytes)


def _placed(
    model: PlaceableBert, wanted: Placement, device: Device, *, max_batch_tokens: int
) -> tuple[Plan, int]:
    """Place the model. The plan, and the bytes of the host's memory that are pinned."""
    budget = wanted.vram_budget if wanted.vram_budget is not None else _free(device)
    try:
        made = plan(
            model,
            vram=budget,
            host=_host_memory(model),
            machine=wanted.machine,
            batch=max(1, max_batch_tokens // MAX_WIDTH),
            tokens=min(MAX_WIDTH, max_batch_tokens),
        )
        handle = place(model, made, device=device.torch_name)
    except PlanImpossible as error:
        raise DeviceMissing(
            error.message, "write a larger vram_budget into the profile, or give the container more memory"
        ) from error
    except ProbeError as error:
        raise SettingsError(f"placement: {error.message}", error.hint) from error
    return made, handle.report().pinned_taken


def _host_memory(model: PlaceableBert) -> int | None:
    """Bytes that the weights may have of the host's memory: theirs, and what this container has left.

    None where the kernel doesn't say.
    """
    left = available_bytes(Path("/"))
    held = sum(weight.nbytes for weight in model.parameters())
    return left + held if isinstance(left, int) else None


def _free(device: Device) -> int:
    if device.torch_name == "cpu":
        raise SettingsError("placement: auto needs a vram_budget on the CPU", "write vram_budget: 2 GB")
    return int(torch.cuda.mem_get_info(device.torch_name)[0])


def described(made: Plan) -> str:
    """What a plan does, in a few words."""
    tiers = Counter(block.tier for block in made.blocks)
    counts = ", ".join(f"{count} {tier}" for tier, count in tiers.items())
    taken, driver = made.vram.total - made.vram.context, made.vram.context
    return (
        f"blocks: {counts}; predicted {taken / 1e9:.2f} of {made.vram_budget / 1e9:.2f} GB VRAM, "
        f"and {driver / 1e9:.2f} GB of the driver's"
    )
