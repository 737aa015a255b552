"""A BERT whose weights are placed by a plan: some stay in VRAM, others stream to it or are computed on the
host.

`probes.placement`, which every image holds beside the service, plans and places. `MEMORY_LIMITS` keeps
torch's allocator within the budgets of the profile.
"""

import gc
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from probes.placement import Plan, PlanImpossible, ProbeError, available_bytes, place, plan
from service.errors import DeviceMissing, SettingsError
from service.inference import bert
from service.inference.checkpoint import BertShape
from service.inference.classifier import Task
from service.inference.device import Device
from service.settings import MAX_POSITIONS, Placement


class MemoryLimits:
    """Limits torch's allocator to the sum of the placed models' budgets, on each card.

    Beyond it the allocator refuses, as if the card were smaller. Otherwise a pass that takes more than was
    predicted, or a leak, would take memory from other programs, or from the system's where a driver lends
    that. There is one for the process, because the allocator has one limit a card.
    """

    def __init__(self) -> None:
        self._budgets: defaultdict[str, list[int]] = defaultdict(list)
        self._lock = threading.RLock()  # a model's __del__ may run at any moment

    def add(self, device: str, n_bytes: int) -> None:
        """Add the budget of a model that is about to be placed."""
        with self._lock:
            self._budgets[device].append(n_bytes)
            self._apply(device)

    def remove(self, device: str, n_bytes: int) -> None:
        """Remove the budget of a model whose memory was released. Without any, nothing is limited."""
        with self._lock:
            self._budgets[device].remove(n_bytes)
            self._apply(device)

    def _apply(self, device: str) -> None:
        total = torch.cuda.get_device_properties(device).total_memory
        limit = sum(self._budgets[device]) or total
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)


MEMORY_LIMITS = MemoryLimits()


class _Part(nn.Module):  # type: ignore[misc]  # torch is not read here
    """A module that holds the weights with these prefixes."""

    def __init__(self, weights: bert.Weights, shape: BertShape, *prefixes: str) -> None:
        super().__init__()
        self._shape = shape
        self._keys = {name: name.replace(".", "__") for name in weights if name.startswith(prefixes)}
        for name, key in self._keys.items():
            self.register_parameter(key, nn.Parameter(weights[name], requires_grad=False))

    def weights(self) -> bert.Weights:
        """Return the weights by their names, where they are now."""
        return {name: getattr(self, key) for name, key in self._keys.items()}


class _Embeddings(_Part):
    def forward(self, ids: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states [rows, tokens, hidden] of ids."""
        return bert.embed(self.weights(), self._shape, ids, types)


class _Layer(_Part):
    def __init__(self, weights: bert.Weights, shape: BertShape, prefix: str) -> None:
        super().__init__(weights, shape, f"{prefix}.")
        self._prefix = prefix

    def forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states [rows, tokens, hidden]."""
        return bert.layer(self.weights(), self._shape, self._prefix, hidden, attended)


class _Head(_Part):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, labels]."""
        return bert.classified(self.weights(), hidden)


class PlaceableBert(nn.Module):  # type: ignore[misc]
    """BERT as modules that can be placed one by one; computes the same as `service.inference.bert`."""

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
        task: Task,
    ) -> torch.Tensor:
        """Return logits [rows, labels], or embeddings [rows, hidden]."""
        hidden = self.embeddings(ids, types)
        attended = mask[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, attended)
        outputs: torch.Tensor = bert.embedded(hidden, mask) if task == "embed" else self.head(hidden)
        return outputs


class PlacedBert:
    """A placed BERT. Its memory is released when the last reference to it is gone."""

    def __init__(self, model: PlaceableBert, pinned_bytes: int, released: Callable[[], object]) -> None:
        self.pinned_bytes = pinned_bytes
        self._model: PlaceableBert | None = model
        self._released = released

    def __call__(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        types: torch.Tensor | None,
        task: Task,
    ) -> torch.Tensor:
        """See `Outputs`."""
        assert self._model is not None
        outputs: torch.Tensor = self._model(ids, mask, types, task)
        return outputs

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._model = None
            gc.collect()  # modules and placement handle refer to each other
            self._released()


def place_bert(
    weights: bert.Weights, shape: BertShape, placement: Placement, device: Device, *, max_batch_tokens: int
) -> tuple[PlacedBert, Plan]:
    """Place the model on the device within the budget. Return it and the plan. `weights` are on the CPU.

    A budget that the profile names limits torch's allocator as well. Raises SettingsError for an unknown
    machine, DeviceMissing if the budget is too small.
    """
    model = PlaceableBert(weights, shape)
    with ExitStack() as on_failure:
        if placement.vram_budget is not None and device.torch_name != "cpu":
            MEMORY_LIMITS.add(device.torch_name, placement.vram_budget)
            on_failure.callback(_release_memory, device.torch_name, placement.vram_budget)
        chosen_plan, pinned_bytes = _place_within_budget(
            model, placement, device, max_batch_tokens=max_batch_tokens
        )
        return PlacedBert(model, pinned_bytes, on_failure.pop_all().close), chosen_plan


def _release_memory(device: str, n_bytes: int) -> None:
    torch.cuda.empty_cache()
    MEMORY_LIMITS.remove(device, n_bytes)


def _place_within_budget(
    model: PlaceableBert, placement: Placement, device: Device, *, max_batch_tokens: int
) -> tuple[Plan, int]:
    """Place the model. Return the plan, and the bytes of the host's memory that are pinned."""
    budget = placement.vram_budget if placement.vram_budget is not None else _free_vram(device)
    try:
        chosen_plan = plan(
            model,
            vram=budget,
            host=_host_memory(model),
            machine=placement.machine,
            batch=max(1, max_batch_tokens // MAX_POSITIONS),
            tokens=min(MAX_POSITIONS, max_batch_tokens),
        )
        handle = place(model, chosen_plan, device=device.torch_name)
    except PlanImpossible as error:
        raise DeviceMissing(
            error.message, "write a larger vram_budget into the profile, or give the container more memory"
        ) from error
    except ProbeError as error:
        raise SettingsError(f"placement: {error.message}", error.hint) from error
    return chosen_plan, handle.report().pinned_taken


def _host_memory(model: PlaceableBert) -> int | None:
    """Return the bytes of host memory for the weights: what they take now, and what this container has left.

    None if the kernel doesn't say.
    """
    left = available_bytes(Path("/"))
    held = sum(weight.nbytes for weight in model.parameters())
    return left + held if isinstance(left, int) else None


def _free_vram(device: Device) -> int:
    if device.torch_name == "cpu":
        raise SettingsError("placement: auto needs a vram_budget on the CPU", "write vram_budget: 2 GB")
    return int(torch.cuda.mem_get_info(device.torch_name)[0])


def describe_plan(plan: Plan) -> str:
    """Return what a plan does, in a few words."""
    tiers = Counter(block.tier for block in plan.blocks)
    counts = ", ".join(f"{count} {tier}" for tier, count in tiers.items())
    taken, driver = plan.vram.total - plan.vram.context, plan.vram.context
    return (
        f"blocks: {counts}; predicted {taken / 1e9:.2f} of {plan.vram_budget / 1e9:.2f} GB VRAM, "
        f"and {driver / 1e9:.2f} GB of the driver's"
    )
