"""What a training step keeps on the card, what it moves and what it makes again, for a budget.

A plan rests on a step on tensors without numbers (`traced`): the bytes that each block saves for its
backward pass, what is alive beside them at each moment, and the step's products. What is left of the budget
goes to optimizer states and to activations, whichever makes the step shorter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import nn

from probes.core.errors import PlanImpossible, UsageError
from probes.core.units import binary_bytes
from probes.placement.models.modules import Block, find_blocks
from probes.placement.packing.format import aligned, estimate
from probes.placement.training.tracing import Step, traced
from probes.placement.training.updates import is_elementwise, state_names
from probes.placement.training.weights import is_cast

Memory = Literal["vram", "host"]
Activations = Literal["kept", "recomputed", "moved"]  # moved: made again from inputs in host memory
When = Literal["backward", "step"]

SLOTS: Final = 3  # one is filled, one is updated and written back, one waits
MOST_NUMBERS: Final = 16 << 20  # of a group: 64 MiB of each state in float32
RING_SHARE: Final = 1 / 10  # of the budget, for the ring
LEAST_NUMBERS: Final = 1 << 18  # of a parameter whose states move, and of a frozen one that is packed
BACKLOG: Final = 3.0  # bytes of gradients for each number that the link can update in a forward pass
MOST_TRIED: Final = 12  # numbers of blocks that are recomputed, and of those whose inputs move
DECODE_BUFFERS: Final = 2  # blocks whose frozen weights are unpacked at once
WORKSPACE: Final = 2 * (33 << 20)  # of cuBLAS, for the threads of both passes, on Hopper
LINK: Final = 45e9  # bytes a second in each direction while both are busy; PCIe 5.0 x16
RATE: Final = 300e12  # operations a second in 16-bit floats, of an H100 in eager code
HOST: Final = 8e-6  # seconds of the host to hand over one operation of torch, beside an H200


@dataclass(frozen=True)
class BlockOfStep:
    """One block in a training step. Bytes are of the model's own dtypes."""

    name: str  # the module's qualified name
    trained_bytes: int
    states: Memory  # where optimizer states are between updates, and master weights if autocast casts them
    frozen_bytes: int
    frozen: Memory  # where weights that aren't trained are; in host memory they are packed without loss
    activations: Activations
    saved_bytes: int  # for the backward pass, if they are kept


@dataclass(frozen=True)
class StepVram:
    """Predicted bytes of VRAM at the peak, by what takes them."""

    weights: int
    states: int
    gradients: int  # that wait for their update
    slots: int  # the ring that states pass through
    decode: int  # frozen weights of the blocks at work, and packed ones on their way
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """All of them."""
        moving = self.gradients + self.slots + self.decode
        return self.weights + self.states + moving + self.activations + self.workspace


@dataclass(frozen=True)
class TrainingPlan:
    """Where the bytes of a training step are. `updates` says when weights are updated.

    In the backward pass: as soon as the gradients of a group are made, which takes the least memory;
    gradients are never all there, so nothing can be computed from all of them. At the step: gradients stay on
    the card until `optimizer.step()`, so that clipping by the global norm and a GradScaler work.
    """

    blocks: tuple[BlockOfStep, ...]
    autocast: str  # the dtype's name, or empty
    updates: When
    accumulate: int  # backward passes for each step
    piece_numbers: int
    slots: int
    vram_budget: int
    vram: StepVram
    host_bytes: int
    to_card_bytes: int  # in each step
    to_host_bytes: int
    predicted_s: float
    bound: Literal["link", "compute", "host"]


def plan_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    vram: int,
    loss: Callable[[nn.Module], torch.Tensor],
    *,
    autocast: torch.dtype | None = None,
    updates: When = "backward",
    accumulate: int = 1,
    device: torch.device | str | None = None,
    link: float = LINK,
    rate: float = RATE,
    host: float = HOST,
) -> TrainingPlan:
    """Plan the training of a model within `vram` bytes of torch's allocator.

    `loss` calls the model with a batch and returns the loss; it runs on tensors without numbers, under
    autocast to `autocast` where that is given. `link`: bytes a second each way while both are busy; `rate`:
    products a second; `host`: seconds to hand over one operation. Raises PlanImpossible, which names
    the least budget, and PlacementError for models and optimizers that can't be trained so.
    """
    if accumulate < 1:
        raise UsageError(f"accumulate is {accumulate}; it counts backward passes", "give 1 or more")
    if updates not in get_args(When):
        raise UsageError(f"updates is {updates!r}", f"give one of {', '.join(get_args(When))}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = state_names(optimizer, torch.device("cpu") if where.type == "cpu" else where)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    blocks = find_blocks(model)
    step = traced(model, loss, blocks, autocast=autocast, device=where)
    given = _Given(
        vram, autocast, updates, accumulate, len(names), link, rate, host, divides=is_elementwise(optimizer)
    )
    search = _Search(blocks, known, step, given)
    best: TrainingPlan | None = None
    least = 0
    for recomputed, moved in search.recomputations():
        plan, taken = search.fill(recomputed, moved)
        least = min(least or taken, taken)
        if plan and (best is None or plan.predicted_s < best.predicted_s * (1 - 1e-9)):
            best = plan
    if best is None:
        raise PlanImpossible(
            f"training takes at least {binary_bytes(least)} of VRAM, {binary_bytes(vram)} are given",
            f"give vram={-(-least // (1 << 20))} << 20, or a smaller batch",
        )
    return best


@dataclass(frozen=True)
class _Bytes:
    """What one block's parameters take."""

    streamed_vram: int  # on the card while states are in host memory
    resident_vram: int
    states_vram: int  # of that, states
    crossing: int  # each way
    host: int
    trained: int
    frozen: int
    frozen_packed: int
    slot: int


@dataclass(frozen=True)
class _Given:
    """What a plan is asked for."""

    vram: int
    autocast: torch.dtype | None
    updates: When
    accumulate: int
    states: int  # of the optimizer, as large as a parameter
    link: float
    rate: float
    host: float
    divides: bool

    @property
    def piece(self) -> int:
        """Numbers of a group, so that the ring takes its share: their states, weights and gradients."""
        fits = int(self.vram * RING_SHARE) // (SLOTS * 4 * (self.states + 2))
        return min(max(fits, LEAST_NUMBERS), MOST_NUMBERS)


class _Search:
    """Bytes and times of plans for one model."""

    def __init__(self, blocks: Sequence[Block], known: set[int], step: Step, given: _Given) -> None:
        self._blocks, self._step, self._given = blocks, step, given
        self._bytes = {block.name: _bytes_of(block, known, given) for block in blocks}
        self._layers = [name for name in step.order if step.saved[name] > step.output[name]]
        forward_s = max(step.products / given.rate, step.calls * given.host) / 3
        # gradients in 2 bytes a number
        self._backlog = int(BACKLOG * given.link * forward_s / (4 * (1 + given.states)))

    def recomputations(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Which blocks may be recomputed, the first ones; and which of these from moved inputs."""
        layers = self._layers
        step = max(1, len(layers) // MOST_TRIED)
        counts = sorted({*range(0, len(layers), step), len(layers)})
        return [(tuple(layers[:n]), tuple(layers[:m])) for n in counts for m in counts if m <= n]

    def fill(self, recomputed: tuple[str, ...], inputs: tuple[str, ...]) -> tuple[TrainingPlan | None, int]:
        """The plan with these blocks recomputed, some from moved inputs, and the bytes it takes at least."""
        given, vram = self._given, self._given.vram
        sizes = self._bytes
        again = set(recomputed)
        activations = self._step.peak(again, inputs)
        # What can be in host memory is there at first; then what the budget has room for comes to the card
        chosen: dict[str, Memory] = dict.fromkeys(sizes, "host")
        frozen: dict[str, Memory] = {
            b.name: "host" if sizes[b.name].frozen_packed and b.called and b.name in again else "vram"
            for b in self._blocks
        }

        backlog = 0

        def taken() -> StepVram:
            return self._vram(chosen, frozen, activations, backlog)

        least = taken().total
        if least > vram:
            return None, least
        backlog = min(self._backlog, vram - least)
        first = [b.name for b in self._blocks if not b.called or b.name not in self._layers]
        for name in [*first, *self._layers]:
            for places in (chosen, frozen):
                before = places[name]
                places[name] = "vram"
                if taken().total > vram:
                    places[name] = before
        use = taken()
        crossing = sum(sizes[n].crossing for n, memory in chosen.items() if memory == "host")
        packed = sum(2 * sizes[n].frozen_packed for n, memory in frozen.items() if memory == "host")
        compute = (self._step.products + self._step.products_again(again)) / given.rate
        host = (self._step.calls + self._step.calls_again(again)) * given.host
        crossing += sum(self._step.input(name) for name in inputs)
        moved = (crossing + packed) / given.link
        alone = 2 * sum(self._step.input(name) for name in inputs) / given.link  # the host waits for them
        return (
            TrainingPlan(
                blocks=tuple(self._block(b, chosen, frozen, again, inputs) for b in self._blocks),
                autocast=str(given.autocast or "").removeprefix("torch."),
                updates=given.updates,
                accumulate=given.accumulate,
                piece_numbers=given.piece,
                slots=SLOTS,
                vram_budget=vram,
                vram=use,
                host_bytes=sum(self._step.input(name) for name in inputs)
                + sum(sizes[n].host for n, memory in chosen.items() if memory == "host")
                + sum(sizes[n].frozen_packed for n, memory in frozen.items() if memory == "host"),
                to_card_bytes=crossing + packed,
                to_host_bytes=crossing,
                predicted_s=max(compute, host, moved) + 0.1 * min(max(compute, host), moved) + alone,
                bound="link" if moved > max(compute, host) else "compute" if compute > host else "host",
            ),
            least,
        )

    def _vram(
        self,
        chosen: Mapping[str, Memory],
        frozen: Mapping[str, Memory],
        activations: int,
        backlog: int,
    ) -> StepVram:
        sizes = self._bytes
        streamed = [sizes[n] for n, memory in chosen.items() if memory == "host"]
        resident = [sizes[n] for n, memory in chosen.items() if memory == "vram"]
        casts = sum(self._step.casts.get(n, 0) for n, memory in chosen.items() if memory == "vram")
        there = sum(sizes[n].frozen for n, memory in frozen.items() if memory == "vram")
        moving = [sizes[n] for n, memory in frozen.items() if memory == "host"]
        states = sum(s.states_vram for s in resident)
        trained = sum(s.trained for s in sizes.values())
        if self._given.updates == "step" or self._given.accumulate > 1:
            gradients = trained
        else:  # those of blocks at work, and what the link can update while a forward pass runs
            most = sum(s.trained for s in streamed) // 2
            gradients = 2 * max((s.trained for s in sizes.values()), default=0) + min(most, backlog)
            gradients = min(trained, gradients)
        return StepVram(
            weights=sum(s.streamed_vram for s in streamed)
            + sum(s.resident_vram - s.states_vram for s in resident)
            + there
            + self._step.buffers,
            states=states,
            gradients=gradients,
            slots=(SLOTS + 1)
            * max((s.slot for s in streamed), default=0),  # one for states that are being made
            decode=DECODE_BUFFERS * max((s.frozen + s.frozen_packed for s in moving), default=0),
            activations=activations + casts,
            workspace=WORKSPACE if self._step.on_gpu else 0,
        )

    def _block(
        self,
        block: Block,
        chosen: Mapping[str, Memory],
        frozen: Mapping[str, Memory],
        again: set[str],
        inputs: Sequence[str],
    ) -> BlockOfStep:
        size = self._bytes[block.name]
        return BlockOfStep(
            block.name,
            size.trained,
            chosen[block.name] if size.trained else "vram",
            size.frozen,
            frozen[block.name] if size.frozen else "vram",
            "moved" if block.name in inputs else "recomputed" if block.name in again else "kept",
            self._step.saved.get(block.name, 0),
        )


def _bytes_of(block: Block, known: set[int], given: _Given) -> _Bytes:
    states, divides, piece = given.states, given.divides, given.piece
    cast = given.autocast is not None
    states_vram = 0
    streamed = resident = crossing = host = trained = frozen = packed = slot = numbers = 0
    for entry in block.entries:
        n_bytes = aligned(entry.n_bytes)
        if id(entry.parameter) not in known or not entry.parameter.requires_grad:
            frozen += n_bytes
            packed += _packed(entry.parameter)
            continue
        narrow = cast and casts(block, entry.parameter)
        trained += n_bytes
        states_vram += states * n_bytes
        if not moves(entry.parameter):
            streamed += (1 + states) * n_bytes
            resident += (1 + states) * n_bytes
            continue
        streamed += n_bytes // 2 if narrow else n_bytes
        resident += (1 + states) * n_bytes
        vectors = states + (1 if narrow else 0)
        crossing += vectors * n_bytes
        host += vectors * n_bytes
        part = min(entry.parameter.numel(), piece) if divides else entry.parameter.numel()
        slot = max(slot, (vectors + (1 if narrow else 0)) * aligned(part * entry.parameter.element_size()))
        numbers += entry.parameter.numel()
    if divides and numbers:  # a group may be filled by several parameters, each aligned
        full = min(numbers, piece) * 4 * (states + (2 if cast else 0))
        slot = max(slot, full + len(block.entries) * 256 * (states + 2))
    return _Bytes(streamed, resident, states_vram, crossing, host, trained, frozen, packed, slot)


def moves(parameter: nn.Parameter) -> bool:
    """Whether a parameter is large enough that moving its states is worth a copy of their own."""
    return bool(parameter.numel() >= LEAST_NUMBERS and parameter.is_contiguous())


def packs(parameter: torch.Tensor) -> bool:
    """Whether a frozen parameter is large enough that packing it pays."""
    return bool(parameter.numel() >= LEAST_NUMBERS)


def casts(block: Block, parameter: nn.Parameter) -> bool:
    """Whether autocast casts a parameter in all its uses, as far as the classes of its modules can say."""
    owners = [owner for entry in block.entries if entry.parameter is parameter for owner in entry.owners]
    return parameter.dtype is torch.float32 and bool(owners) and all(is_cast(o, key) for o, key in owners)


def _packed(parameter: nn.Parameter) -> int:
    if not packs(parameter):
        return aligned(parameter.nbytes)
    return aligned(estimate(str(parameter.dtype).removeprefix("torch."), parameter.numel(), dense=True))
