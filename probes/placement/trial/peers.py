"""Runs a model placed by its plan on this machine, and by others who do the same: `weir probe place`.

The same weights, inputs and cap for all. Wall time of a pass in the steady state leads.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import nn

from probes.errors import Unsupported
from probes.machine.torchfacts import refusals
from probes.placement.architectures import Built, build, shape
from probes.placement.loading.load import load
from probes.placement.models.checkpointfolder import CheckpointFolder
from probes.placement.planner.asking import plan
from probes.placement.planner.computing import Compute
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.profiles import matching, profile
from probes.placement.planner.reported import without_gpu
from probes.placement.runtime.handle import Handle
from probes.placement.runtime.place import place
from probes.placement.split import DTYPE_BYTES, StackPlan
from probes.placement.trial import checkpointed, hostroom
from probes.placement.trial.compared import accelerated, resident
from probes.placement.trial.ondevice import LONG_S, announce, capped, drawing_s, free, products_s, wall_s
from probes.placement.values import Objective, Plan
from probes.shared.units import binary_bytes
from probes.shared.unknown import Unknown

WIDTH: Final = 8192  # of the linear layers of the model `mlp`
LAYERS: Final = 40  # of it
PLACED_RATE: Final = 0.35e9  # bytes a second, packed or converted by 2 cores: 0.5 GB took 1.5 s

NO_LIMIT: Final = "there is no GPU here: --vram limits nothing, all blocks compute in host memory"

Peer = Literal["accelerate", "resident"]


@dataclass(frozen=True)
class Asked:
    """What to run, a checkpoint or a model with random weights, and the plan's inputs."""

    model: str
    dtype: str
    vram: int  # bytes that torch's allocator may take
    machine: str | None  # a profile's name or a report's file; None: the nearest card's profile
    batch: int
    tokens: int
    objective: Objective
    seed: int
    checkpoint: CheckpointFolder | None = None  # None: `model` is a name, with random weights
    compute: Compute = "auto"  # of bfloat16 weights on a GPU without units for them
    host: int | None = None  # bytes of host memory for a checkpoint; None: what is available above a floor
    given: Plan | None = None  # a checkpoint's plan that was made before


@dataclass(frozen=True)
class Ran:
    """One way of running the model."""

    how: str
    wall_s: float | Unknown  # of a pass
    same_bits: bool | Unknown  # as ours
    peak_bytes: int | Unknown  # of VRAM, by torch's allocator


@dataclass(frozen=True)
class Found:
    """The ways that were run, ours first, and the placed model's own report."""

    ways: tuple[Ran, ...]
    report: str


def run(asked: Asked, compare: tuple[Peer, ...]) -> Found:
    """Plan and place the model, time it, then each peer with the same weights and inputs.

    A checkpoint's weights go from its files to their tiers; only for peers, they meet in host memory.
    Raises PlanImpossible and PlacementError where the model can't be placed, CheckpointUnreadable for its
    files, UsageError for an unknown machine, Unsupported and LibraryMissing where something can't be run.
    """
    built = _built(asked)
    host = hostroom.bytes_for_weights(asked.host) if asked.checkpoint else None
    with _memory_for(asked):
        inputs = _inputs(built, asked)
    made = asked.given or _planned(asked, built, inputs, host)
    if asked.given and host is not None:
        hostroom.require_plan(made, host)
    if compare and host is not None:
        hostroom.require_whole(sum(weight.nbytes for weight in built.module.parameters()), host)
    kept = asked.checkpoint is not None and not compare  # a checkpoint may be larger than host memory
    ours, output, report = _ours(asked, built, made, inputs, kept=kept)
    peers = [_of_peer(peer, built, made, inputs, output=output) for peer in compare]
    return Found((ours, *peers), report)


def _planned(asked: Asked, built: Built, inputs: torch.Tensor, host: int | None) -> Plan:
    tokens = asked.tokens if inputs.dim() > 1 and (built.vocabulary or inputs.dim() > 2) else 1
    return plan(
        built.module,
        vram=asked.vram,
        host=host,
        machine=asked.machine or _nearest(),
        batch=asked.batch,
        tokens=tokens,
        objective=asked.objective,
        compute=asked.compute,
        weights=asked.checkpoint.path if asked.checkpoint else None,
    )


def _ours(
    asked: Asked, built: Built, made: Plan, inputs: torch.Tensor, *, kept: bool
) -> tuple[Ran, torch.Tensor, str]:
    """The placed model's time, its output and its report. It stays placed where it is `kept`."""
    with capped(made.vram_budget):
        _announce_placing(made)
        handle = _placed(built.module, made, asked.checkpoint)
        try:
            with _memory_for(asked):
                _announce_pass(built, made, inputs)
                ours, output = _measured("placed", built, inputs)
                if isinstance(ours.wall_s, float) and ours.wall_s < LONG_S:
                    handle.measure(_pass(built, inputs), passes=1)  # says what a pass waits for
            report = str(handle.report())
        finally:
            if not kept:
                handle.remove()
    return ours, output, report if torch.cuda.is_available() else f"{NO_LIMIT}\n{report}"


def _built(asked: Asked) -> Built:
    if asked.checkpoint:
        return checkpointed.built(asked.checkpoint, asked.dtype, asked.tokens)
    return _random(asked)


def _random(asked: Asked) -> Built:
    """The model on the host. Its weights are drawn on the GPU if they fit there: that is much quicker."""
    known = shape(asked.model, dtype=asked.dtype, width=WIDTH)
    whole = StackPlan(known, known.layers or LAYERS, ())
    host = hostroom.bytes_for_weights(asked.host)
    if host is not None and whole.weight_bytes > host:
        raise Unsupported(
            f"{asked.model} has {binary_bytes(whole.weight_bytes)} of weights, which are drawn in host "
            f"memory, and {binary_bytes(host)} are free here",
            "take a smaller model, or end other programs; for a prediction: plan MODEL",
        )
    roomy = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 2 * whole.weight_bytes
    if not roomy:
        numbers = whole.weight_bytes // DTYPE_BYTES[asked.dtype]
        what = f"drawing {binary_bytes(whole.weight_bytes)} of random weights on the CPU"
        announce(what, drawing_s(numbers, getattr(torch, asked.dtype)))
    built = build(whole, "cuda" if roomy else "cpu", asked.seed)
    built.module.requires_grad_(False).to("cpu")
    free()
    return built


def _memory_for(asked: Asked) -> AbstractContextManager[None]:
    what = f"inputs and activations of batch {asked.batch}, {asked.tokens} tokens each,"
    return refusals(what, "try a smaller --batch, or fewer --tokens")


def _announce_placing(made: Plan) -> None:
    """Where the CPU packs and converts, that takes a while."""
    if not torch.cuda.is_available():
        weights = sum(block.weight_bytes for block in made.blocks)
        announce(f"placing {binary_bytes(weights)} of weights", weights / PLACED_RATE)


def _announce_pass(built: Built, made: Plan, inputs: torch.Tensor) -> None:
    """Where the CPU computes, a pass of a large model takes as long as its products."""
    if torch.cuda.is_available():
        return
    numbers = sum(parameter.numel() for parameter in built.module.parameters())
    rows = inputs.numel() if built.vocabulary else inputs.numel() // max(inputs.shape[-1], 1)
    dtype = getattr(torch, made.compute_dtype if made.compute_dtype in DTYPE_BYTES else "float32")
    announce("a pass on the CPU, the first of at least 2", products_s(numbers, rows, dtype))


def _placed(module: nn.Module, made: Plan, checkpoint: CheckpointFolder | None) -> Handle:
    if checkpoint is None:
        return place(module, made)
    skipped = checkpointed.ignored(module, checkpoint)
    handle: Handle = load(lambda: module, checkpoint.path, made, ignored=skipped).placement
    return handle


def _inputs(built: Built, asked: Asked) -> torch.Tensor:
    draw = torch.Generator().manual_seed(asked.seed)
    if built.vocabulary:
        return torch.randint(0, built.vocabulary, (asked.batch, asked.tokens), generator=draw)
    size = (asked.batch, built.width) if asked.model == "mlp" else (asked.batch, asked.tokens, built.width)
    return torch.randn(size, generator=draw).to(getattr(torch, asked.dtype))


def _nearest() -> Constants:
    """The profile of the card that is here, or that most like it; without a GPU, everything on the CPU."""
    if not torch.cuda.is_available():
        return without_gpu(len(os.sched_getaffinity(0)))
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    target = getattr(facts, "gcnArchName", "") or f"sm_{facts.major}{facts.minor}"
    return profile(matching(facts.name, target))


def _of_peer(peer: Peer, built: Built, made: Plan, inputs: torch.Tensor, *, output: torch.Tensor) -> Ran:
    context: AbstractContextManager[object]
    cap: AbstractContextManager[object]
    if peer == "resident":
        how, context, cap = "all resident, not capped", resident(built.module), nullcontext()
    else:
        how = "accelerate's device_map"
        context, cap = accelerated(built.module, made), capped(made.vram_budget)
    try:
        with cap, context:
            ran, theirs = _measured(how, built, inputs)
    except torch.cuda.OutOfMemoryError as error:
        why = Unknown(f"out of memory: {str(error).splitlines()[0][:120]}")
        return Ran(how, why, why, why)
    finally:
        built.module.to("cpu")
        free()
    return Ran(how, ran.wall_s, torch.equal(output, theirs), ran.peak_bytes)


def _measured(how: str, built: Built, inputs: torch.Tensor) -> tuple[Ran, torch.Tensor]:
    one = _pass(built, inputs)
    output = one().cpu()
    seconds = wall_s(one)
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else Unknown("there is no GPU")
    return Ran(how, seconds, True, peak), output


def _pass(built: Built, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    given = inputs.to("cuda" if torch.cuda.is_available() else "cpu")

    def one() -> torch.Tensor:
        with torch.inference_mode():
            return built.call(given)

    return one
