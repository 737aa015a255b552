"""Runs a model placed by its plan on this machine, and the same model by other ways: `weir probe place`.

The baselines (everything in VRAM, accelerate's device_map) have the same weights and inputs. Compared are the
wall time of a pass in the steady state, and the bits of the output.
"""

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from probes.core.errors import LibraryMissing, PlacementError, Unsupported, UsageError
from probes.core.output import progress
from probes.core.units import binary_bytes, duration
from probes.core.unknown import Unknown
from probes.hardware.host import available_bytes, floor_bytes, spendable_bytes
from probes.hardware.torch_build import refusals
from probes.measure.architectures import Built, build, shape
from probes.measure.stacks import DTYPE_BYTES, CheckpointFolder, StackPlan
from probes.placement.loading import build_skeleton, load
from probes.placement.models.transformers_config import (
    config_object,
    config_refusals,
    import_transformers,
    instantiated,
    model_class,
)
from probes.placement.planner.api import plan, resolve_machine
from probes.placement.planner.compute_dtype import Compute
from probes.placement.planner.machine import Constants, nearest_profile, profile, without_gpu
from probes.placement.runtime.handle import Handle
from probes.placement.runtime.place import place
from probes.placement.types import LOADING_BYTES, Objective, Plan

WIDTH: Final = 8192  # of the linear layers of the model `mlp`
LAYERS: Final = 40  # of it
PLACED_RATE: Final = 0.35e9  # bytes a second, packed or converted by 2 cores: 0.5 GB took 1.5 s
NO_LIMIT: Final = "there is no GPU here: --vram limits nothing, all blocks compute in host memory"
MARGIN: Final = 0.12  # of the cap, left to accelerate for activations and the layer on its way
SAMPLES: Final = 5
LEAST_S: Final = 0.2  # of a sample, so that a clock's step and the last wait don't count
LONG_S: Final = 2.0  # of a pass, from which one before is enough to warm up
MOST_S: Final = 30.0  # of all samples of such a pass
NOTABLE_S: Final = 5.0  # of waiting that is announced
DRAWN: Final = 1 << 22  # numbers, to see how quickly they are drawn
ACROSS: Final = 2048  # width of the matrix, to see how quickly products are computed

Baseline = Literal["accelerate", "resident"]


@dataclass(frozen=True)
class BenchmarkOptions:
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
    refine: bool = False  # plan again with what a pass takes, and keep the better plan


@dataclass(frozen=True)
class BenchmarkRow:
    """One way of running the model."""

    how: str
    wall_s: float | Unknown  # of a pass
    same_bits: bool | Unknown  # as ours
    peak_bytes: int | Unknown  # of VRAM, by torch's allocator


@dataclass(frozen=True)
class BenchmarkReport:
    """The ways that were run, ours first, and the placed model's own report."""

    ways: tuple[BenchmarkRow, ...]
    report: str


def run(options: BenchmarkOptions, compare: tuple[Baseline, ...]) -> BenchmarkReport:
    """Plan and place the model, time it, then each baseline with the same weights and inputs.

    A checkpoint's weights go from its files to their tiers; only for baselines, all are in host memory.
    Raises PlanImpossible and PlacementError where the model can't be placed, CheckpointUnreadable for its
    files, UsageError for an unknown machine, Unsupported and LibraryMissing where something can't be run.
    """
    built = _build(options)
    host = bytes_for_weights(options.host) if options.checkpoint else None
    with _memory_for(options):
        inputs = _inputs(built, options)
    chosen = options.given or _planned(options, built, inputs, host)
    if options.given and host is not None:
        require_plan_fits(chosen, host)
    if compare and host is not None:
        require_whole_fits(sum(weight.nbytes for weight in built.module.parameters()), host)
    kept = options.checkpoint is not None and not compare  # a checkpoint may be larger than host memory
    ours, output, report = _run_placed(options, built, chosen, inputs, kept=kept)
    baselines = [_run_baseline(name, built, chosen, inputs, output=output) for name in compare]
    return BenchmarkReport((ours, *baselines), report)


def _planned(options: BenchmarkOptions, built: Built, inputs: torch.Tensor, host: int | None) -> Plan:
    tokens = options.tokens if inputs.dim() > 1 and (built.vocabulary or inputs.dim() > 2) else 1
    return plan(
        built.module,
        vram=options.vram,
        host=host,
        machine=options.machine or _nearest(),
        batch=options.batch,
        tokens=tokens,
        objective=options.objective,
        compute=options.compute,
        inputs=None if built.vocabulary else inputs,
    )


def _nearest() -> Constants:
    """The profile of the card that is here, or that most like it; without a GPU, everything on the CPU."""
    if not torch.cuda.is_available():
        return without_gpu(len(os.sched_getaffinity(0)))
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    target = getattr(facts, "gcnArchName", "") or f"sm_{facts.major}{facts.minor}"
    return profile(nearest_profile(facts.name, target))


def _run_placed(
    options: BenchmarkOptions, built: Built, plan: Plan, inputs: torch.Tensor, *, kept: bool
) -> tuple[BenchmarkRow, torch.Tensor, str]:
    """The placed model's time, its output and its report. It stays placed where it is `kept`."""
    with capped(plan.vram_budget):
        _announce_placing(plan)
        handle = _place(built.module, plan, options)
        try:
            with _memory_for(options):
                _announce_pass(built, plan, inputs)
                ours, output = _measure("placed", built, inputs)
                if isinstance(ours.wall_s, float) and ours.wall_s < LONG_S:
                    handle.measure(_pass(built, inputs), passes=1)  # says what a pass waits for
            report = str(handle.report())
        finally:
            if not kept:
                handle.remove()
    return ours, output, report if torch.cuda.is_available() else f"{NO_LIMIT}\n{report}"


def _place(module: nn.Module, plan: Plan, options: BenchmarkOptions) -> Handle:
    refine = options.refine and resolve_machine(options.machine or _nearest())
    if options.checkpoint is None:
        return place(module, plan, refine=refine)
    skipped = ignored_tensors(module, options.checkpoint)
    handle: Handle = load(
        lambda: module, options.checkpoint.path, plan, ignored=skipped, refine=refine
    ).placement
    return handle


def _memory_for(options: BenchmarkOptions) -> AbstractContextManager[None]:
    what = f"inputs and activations of batch {options.batch}, {options.tokens} tokens each,"
    return refusals(what, "try a smaller --batch, or fewer --tokens")


def _inputs(built: Built, options: BenchmarkOptions) -> torch.Tensor:
    draw = torch.Generator().manual_seed(options.seed)
    if built.vocabulary:
        return torch.randint(0, built.vocabulary, (options.batch, options.tokens), generator=draw)
    size = (
        (options.batch, built.width)
        if options.model == "mlp"
        else (options.batch, options.tokens, built.width)
    )
    return torch.randn(size, generator=draw).to(getattr(torch, options.dtype))


def _measure(how: str, built: Built, inputs: torch.Tensor) -> tuple[BenchmarkRow, torch.Tensor]:
    run_pass = _pass(built, inputs)
    output = run_pass().cpu()
    seconds = wall_s(run_pass)
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else Unknown("there is no GPU")
    return BenchmarkRow(how, seconds, True, peak), output


def _pass(built: Built, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    given = inputs.to("cuda" if torch.cuda.is_available() else "cpu")

    def run_pass() -> torch.Tensor:
        with torch.inference_mode():
            return built.call(given)

    return run_pass


def _run_baseline(
    baseline: Baseline, built: Built, plan: Plan, inputs: torch.Tensor, *, output: torch.Tensor
) -> BenchmarkRow:
    context: AbstractContextManager[object]
    cap: AbstractContextManager[object]
    if baseline == "resident":
        how, context, cap = "all resident, not capped", all_resident(built.module), nullcontext()
    else:
        how = "accelerate's device_map"
        context, cap = accelerated(built.module, plan), capped(plan.vram_budget)
    try:
        with cap, context:
            row, theirs = _measure(how, built, inputs)
    except torch.cuda.OutOfMemoryError as error:
        why = Unknown(f"out of memory: {str(error).splitlines()[0][:120]}")
        return BenchmarkRow(how, why, why, why)
    finally:
        built.module.to("cpu")
        free()
    return BenchmarkRow(how, row.wall_s, torch.equal(output, theirs), row.peak_bytes)


@contextmanager
def all_resident(module: nn.Module) -> Iterator[None]:
    """Everything in VRAM, without a cap. Raises Unsupported without a GPU."""
    if not torch.cuda.is_available():
        raise Unsupported(
            "nothing can be resident in VRAM: there is no GPU", "run it without --compare resident"
        )
    torch.cuda.reset_peak_memory_stats()
    module.to("cuda")
    yield


@contextmanager
def accelerated(module: nn.Module, plan: Plan) -> Iterator[None]:
    """accelerate's device_map with its defaults: what fits in VRAM, the rest on the host.

    Raises LibraryMissing without accelerate, and Unsupported without a GPU.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.hooks import remove_hook_from_submodules
    except ImportError as error:
        raise LibraryMissing(f"--compare accelerate needs {error.name}", "pip install accelerate") from error
    if not torch.cuda.is_available():
        raise Unsupported("accelerate's device_map needs a GPU to compare with", "run it without --compare")
    whole = {
        type(module.get_submodule(block.name)).__name__
        for block in plan.blocks
        if _is_module(module, block.name)
    }
    room = {0: int(plan.vram_budget * (1 - MARGIN)), "cpu": plan.host_budget}
    devices = infer_auto_device_map(module, max_memory=room, no_split_module_classes=sorted(whole))
    dispatch_model(module, devices, main_device=0, force_hooks=True)
    try:
        yield
    finally:
        remove_hook_from_submodules(module)


def _is_module(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _build(options: BenchmarkOptions) -> Built:
    if options.checkpoint:
        return build_checkpoint_model(options.checkpoint, options.dtype, options.tokens)
    return _build_random(options)


def _build_random(options: BenchmarkOptions) -> Built:
    """The model on the host. Its weights are drawn on the GPU if they fit there: that is much quicker."""
    known = shape(options.model, dtype=options.dtype, width=WIDTH)
    whole = StackPlan(known, known.layers or LAYERS, ())
    host = bytes_for_weights(options.host)
    if host is not None and whole.weight_bytes > host:
        raise Unsupported(
            f"{options.model} has {binary_bytes(whole.weight_bytes)} of weights, which are drawn in host "
            f"memory, and {binary_bytes(host)} are free here",
            "take a smaller model, or end other programs; for a prediction: plan MODEL",
        )
    roomy = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 2 * whole.weight_bytes
    if not roomy:
        numbers = whole.weight_bytes // DTYPE_BYTES[options.dtype]
        what = f"drawing {binary_bytes(whole.weight_bytes)} of random weights on the CPU"
        announce(what, drawing_s(numbers, getattr(torch, options.dtype)))
    built = build(whole, "cuda" if roomy else "cpu", options.seed)
    built.module.requires_grad_(False).to("cpu")
    free()
    return built


def build_checkpoint_model(folder: CheckpointFolder, dtype: str, tokens: int) -> Built:
    """The model with its parameters on meta, to be called with token ids of shape (batch, tokens).

    Its class is the one that `architectures` in config.json names, or else the bare model of its type.
    Raises LibraryMissing without transformers, ModelUnknown for what it can't build, Unsupported for a model
    that doesn't take token ids alone, and UsageError where it has positions for fewer tokens.
    """
    import_transformers()
    with config_refusals():
        config = config_object(folder.config)
        named = folder.config.get("architectures") or [""]
        kind = model_class(config, str(named[0]))
    if kind is not None:
        _require_tokens(kind, config)
    with config_refusals():
        module = build_skeleton(lambda: instantiated(kind, config, getattr(torch, dtype)))
    _require_tokens(module, module.config)
    text = module.config.get_text_config()
    _require_positions(getattr(text, "max_position_embeddings", None), tokens)
    text.use_cache = module.config.use_cache = False
    return Built(module, (), int(text.hidden_size), int(text.vocab_size), _call(module))


def _require_tokens(model: Any, config: Any) -> None:
    """`model` is one or its class."""
    takes = str(model.main_input_name)
    if takes != "input_ids" or config.is_encoder_decoder:
        takes = "the tokens of an encoder and of a decoder" if config.is_encoder_decoder else takes
        raise Unsupported(
            f"this model takes {takes}: place gives token ids and nothing else",
            "place it in Python, with probes.placement.load",
        )


def _require_positions(most: object, tokens: int) -> None:
    if isinstance(most, int) and tokens > most:
        raise UsageError(f"{tokens} tokens, and this model has positions for {most}", f"--tokens {most}")


def _call(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(tokens: torch.Tensor) -> torch.Tensor:
        try:
            output: torch.Tensor = module(input_ids=tokens)[0]
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise PlacementError(
                f"a pass of the model fails: {type(error).__name__}: {str(error)[:200]}",
                "try fewer --tokens or --batch 1; other inputs can be given in Python: probes.placement.load",
            ) from error
        return output

    return call


def ignored_tensors(module: nn.Module, folder: CheckpointFolder) -> tuple[str, ...]:
    """The stored tensors that the model's class declares as not needed."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return tuple(name for name in folder.names if any(re.search(pattern, name) for pattern in patterns))


def bytes_for_weights(requested: int | None) -> int | None:
    """Bytes of host memory that weights may take: as requested, else what is available above a floor.

    None: unknown, so what the machine's profile says.
    """
    available = available_bytes(Path("/"))
    if requested is not None or isinstance(available, Unknown):
        return requested
    return spendable_bytes(available, floor_bytes(available))


def require_plan_fits(plan: Plan, host: int) -> None:
    """Raise PlacementError for a plan that was made for a machine with more host memory than `load` finds."""
    taken = plan.host.pinned + plan.host.pageable + LOADING_BYTES
    if taken > host:
        raise PlacementError(
            f"the plan takes {binary_bytes(taken)} of host memory, and {binary_bytes(host)} are free here",
            f"plan again with --host {host >> 20}MiB, or end other programs",
        )


def require_whole_fits(weight_bytes: int, host: int) -> None:
    """Raise Unsupported where the weights don't fit in host memory, where baselines start from."""
    if weight_bytes > host:
        raise Unsupported(
            f"--compare needs the whole model in host memory: {binary_bytes(weight_bytes)}, and it may take "
            f"{binary_bytes(host)}",
            "run it without --compare, or raise --host",
        )


@contextmanager
def capped(n_bytes: int) -> Iterator[None]:
    """torch's allocator refuses more than this; nothing happens without a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    free()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, n_bytes / total))
    torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def free() -> None:
    """Return what torch's allocator holds unused to the driver."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def wall_s(run_pass: Callable[[], object]) -> float:
    """Median seconds of a pass: several in a row, then a wait for the device, divided.

    `run_pass` has been called before. The longer it takes, the less often it is called: at least once.
    """
    first = _timed(run_pass, 1)
    if first < LONG_S:
        first = _timed(run_pass, 1)  # that was to warm up
    times = max(1, min(1000, int(LEAST_S / max(first, 1e-6))))
    samples = max(0, min(SAMPLES, int(MOST_S / (first * times))))
    if samples * times * first >= NOTABLE_S:
        progress(
            f"a pass takes {duration(first)}; {samples} more are timed, about {duration(samples * first)}"
        )
    samples_s = [_timed(run_pass, times) for _ in range(samples)]
    return statistics.median(samples_s or [first])


def _timed(run_pass: Callable[[], object], times: int) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _no_wait
    begun = time.perf_counter()
    for _ in range(times):
        run_pass()
    wait()
    return (time.perf_counter() - begun) / times


def _no_wait() -> None:
    return None


def announce(what: str, expected_s: float) -> None:
    """Say what is done now and about how long it takes, unless that is soon."""
    if expected_s >= NOTABLE_S:
        progress(f"{what}: about {duration(expected_s)}")


def _announce_placing(plan: Plan) -> None:
    """Where the CPU packs and converts, that takes a while."""
    if not torch.cuda.is_available():
        weights = sum(block.weight_bytes for block in plan.blocks)
        announce(f"placing {binary_bytes(weights)} of weights", weights / PLACED_RATE)


def _announce_pass(built: Built, plan: Plan, inputs: torch.Tensor) -> None:
    """Where the CPU computes, a pass of a large model takes as long as its products."""
    if torch.cuda.is_available():
        return
    numbers = sum(parameter.numel() for parameter in built.module.parameters())
    rows = inputs.numel() if built.vocabulary else inputs.numel() // max(inputs.shape[-1], 1)
    dtype = getattr(torch, plan.compute_dtype if plan.compute_dtype in DTYPE_BYTES else "float32")
    announce("a pass on the CPU, the first of at least 2", products_s(numbers, rows, dtype))


def drawing_s(numbers: int, dtype: torch.dtype) -> float:
    """How long the CPU takes to draw random weights: torch's layers draw theirs, then a library all."""
    sample = torch.empty(min(DRAWN, max(numbers, 1)), dtype=dtype)
    begun = time.perf_counter()
    sample.uniform_()
    sample.normal_()
    return (time.perf_counter() - begun) * (numbers / int(sample.numel()))


def products_s(numbers: int, rows: int, dtype: torch.dtype) -> float:
    """How long the CPU takes to multiply so many weights with so many rows, at the rate of one matrix."""
    weights, x = torch.ones(ACROSS, ACROSS, dtype=dtype), torch.ones(rows, ACROSS, dtype=dtype)
    torch.nn.functional.linear(x, weights)  # the library chooses its kernel
    begun = time.perf_counter()
    torch.nn.functional.linear(x, weights)
    return (time.perf_counter() - begun) * (numbers / ACROSS**2)
