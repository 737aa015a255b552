"""The probe `scenarios`: one forward pass when the weights don't all fit, done in six ways.

resident: weights and inputs in VRAM, the reference. The others leave some weights in pinned host memory.
zero_copy_weights: kernels read those over the link, inputs are copied.
zero_copy_all: the inputs are left there too.
streamed: those are copied through two VRAM buffers while earlier layers compute; inputs are copied.
packed: weights are packed without loss, in VRAM as far as they fit and streamed packed; a layer is unpacked
when it computes.
placed: each layer where the planner puts it, with the same VRAM.
"""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from probes.core.errors import ContentMismatch, DeviceUnusable, PlacementError
from probes.measure import sampling
from probes.measure.stacks import BUDGET, Shape, StackPlan, linear_shape, plan_stack
from probes.measure.workbench import Stack, Workbench
from probes.records.rows import Gap, Pass, Record, Scenario, case_name
from probes.records.schema import Settings

GIB = 2**30
QUICK_CASE_S, FULL_CASE_S = 0.4, 1.6
QUICK_EFFORT = sampling.Effort(samples=50, at_least=4, budget_s=0.1, spread_s=0.1)
FULL_EFFORT = sampling.Effort(samples=50, at_least=6, budget_s=0.4, spread_s=sampling.HOST_SPREAD_S)
QUICK_WEIGHTS, FULL_WEIGHTS = GIB // 4, 4 * GIB  # the host moves and packs all of them for each way
QUICK_WIDTH, FULL_WIDTH = 2048, 8192
QUICK_MODELS = ("mlp",)
FULL_MODELS = ("mlp", "transformer", "bert-base", "gpt2-xl", "qwen2.5-1.5b")
DTYPES = ("float16",)  # which every GPU here computes in, gfx803 included
ROWS = (1, 256)
TOKEN_ROWS = (1, 16)  # inputs of many tokens each
# Ways in one tuple are measured one after the other: the model is placed once for both.
PLACEMENTS: tuple[tuple[Scenario, ...], ...] = (
    ("zero_copy_weights", "zero_copy_all"),
    ("streamed",),
    ("packed",),
    ("placed",),
)
SPLIT: tuple[Scenario, ...] = tuple(way for ways in PLACEMENTS for way in ways)
SCENARIOS: tuple[Scenario, ...] = ("resident", *SPLIT)
ROOM = 0.6  # of free VRAM for the all-resident reference; the rest is for buffers and libraries
# Sums of thousands of products in another order differ by about a percent at most in float16, which has 11
# bits; bfloat16 has 8 and rounds the activations after every layer.
TOLERANCES = {"float32": 0.001, "float16": 0.02, "bfloat16": 0.1}


@dataclass(frozen=True)
class Room:
    """The memory that models may take, in bytes."""

    vram_free_bytes: int
    host_spendable_bytes: int

    @property
    def reference_bytes(self) -> int:
        """For the weights of an all-resident model, which also have to fit the host when they are spilled."""
        return min(int(self.vram_free_bytes * ROOM), self.host_spendable_bytes)


def linear_width(settings: Settings, room: Room) -> int:
    """The width of the plain linear model: few, large layers, yet enough of them to split. Pure."""
    wanted = min(_linear_bytes(settings), room.reference_bytes)
    if wanted >= FULL_WEIGHTS:
        return FULL_WIDTH
    if wanted >= 2 * QUICK_WEIGHTS:
        return 2 * QUICK_WIDTH
    return QUICK_WIDTH if wanted >= QUICK_WEIGHTS // 2 else QUICK_WIDTH // 2


def _linear_bytes(settings: Settings) -> int:
    if settings.vram_cap_bytes is not None:
        return int(settings.vram_cap_bytes / BUDGET)
    return QUICK_WEIGHTS if settings.quick else FULL_WEIGHTS


def plan(settings: Settings, room: Room, shape: Shape | None = None) -> StackPlan:
    """The split of a model (of the linear one by default) under the budget: --vram, else 3/4 of the weights.

    Pure. Raises DeviceUnusable when it doesn't fit.
    """
    shape = shape or linear_shape(linear_width(settings, room))
    weights = _linear_bytes(settings)
    if shape.layers is not None:
        weights = shape.layers * shape.layer_bytes + shape.fixed_bytes
    cap = settings.vram_cap_bytes
    return plan_stack(
        shape,
        weight_bytes=weights,
        budget_bytes=int(weights * BUDGET) if cap is None else cap,
        room_bytes=room.reference_bytes,
    )


def run(
    bench: Workbench, settings: Settings, host_spendable_bytes: int, *, done: Collection[str] = ()
) -> Iterator[Record]:
    """Time all scenarios of each model that aren't `done`, the split ones in an order drawn from the seed.

    Raises ContentMismatch when an output differs from the reference's. A model that can't be built is a
    gap; when none can, its error is raised.
    """
    models = _models_and_dtypes(settings)
    for model, dtype in models:
        room = Room(bench.vram_free_bytes(), host_spendable_bytes)
        try:
            shape = bench.shape(model, dtype=dtype, width=linear_width(settings, room))
            chosen = plan(settings, room, shape)
            yield from _model(bench, chosen, settings=settings, done=done)
        except DeviceUnusable as lacking:
            if len(models) == 1:
                raise
            yield Gap(f"{model} {dtype}", 0, lacking.message)


def planned(settings: Settings, *, has_transformers: bool) -> tuple[tuple[str, float], ...]:
    """Every case with its approximate seconds on an ordinary machine. Pure.

    The first cases of a model also pay for drawing its weights.
    """
    cost = QUICK_CASE_S if settings.quick else FULL_CASE_S
    plain = ("mlp", "transformer")
    return tuple(
        (case_name(model, dtype, scenario, rows), cost * (2 if scenario == "resident" else 1))
        for model, dtype in _models_and_dtypes(settings)
        if has_transformers or model in plain
        for rows in (ROWS if model == "mlp" else TOKEN_ROWS)
        for scenario in SCENARIOS
    )


def _models_and_dtypes(settings: Settings) -> list[tuple[str, str]]:
    models = settings.models or (QUICK_MODELS if settings.quick else FULL_MODELS)
    return [(model, dtype) for model in models for dtype in settings.dtypes or DTYPES]


def rows_of(shape: Shape) -> tuple[int, ...]:
    """The batch sizes that a model is tried with."""
    return ROWS if shape.tokens == 1 else TOKEN_ROWS


def _model(
    bench: Workbench, chosen: StackPlan, *, settings: Settings, done: Collection[str]
) -> Iterator[Record]:
    shape = chosen.shape
    rows = rows_of(shape)
    left = {
        (scenario, n)
        for scenario in SCENARIOS
        for n in rows
        if case_name(shape.model, shape.dtype, scenario, n) not in done
    }
    if not left:
        return
    draw = random.Random(settings.seed)
    with bench.stack(chosen, settings.seed) as stack:
        for n in rows:
            if ("resident", n) in left:
                yield _time(bench, stack, chosen, scenario="resident", rows=n, settings=settings)
            else:
                _compare(stack, chosen, "resident", rows=n)  # the reference for the others
        stack.spill()
        ways = [draw.sample(ways, len(ways)) for ways in draw.sample(PLACEMENTS, len(PLACEMENTS))]
        for scenario in chain.from_iterable(ways):
            for n in draw.sample(rows, len(rows)):
                if (scenario, n) in left:
                    yield _timed(bench, stack, chosen, scenario=scenario, rows=n, settings=settings)


def _timed(
    bench: Workbench, stack: Stack, chosen: StackPlan, *, scenario: Scenario, rows: int, settings: Settings
) -> Pass | Gap:
    """The pass, or why the model can't be placed in this way."""
    try:
        return _time(bench, stack, chosen, scenario=scenario, rows=rows, settings=settings)
    except PlacementError as refused:
        return Gap(f"{chosen.shape.model} {chosen.shape.dtype} {scenario}", rows, refused.message)


def _time(
    bench: Workbench, stack: Stack, chosen: StackPlan, *, scenario: Scenario, rows: int, settings: Settings
) -> Pass:
    before = _compare(stack, chosen, scenario, rows=rows)
    samples = sampling.sample(
        bench,
        [stack.passes(scenario, rows)],
        effort=QUICK_EFFORT if settings.quick else FULL_EFFORT,
        queued=True,
        leads="wall",
    )
    # behind many passes in a row, where a race would show
    after = _compare(stack, chosen, scenario, rows=rows)
    return Pass(
        scenario=scenario,
        rows=rows,
        layers=chosen.layers,
        weight_bytes=chosen.weight_bytes,
        spilled_bytes=stack.left_bytes(scenario, rows),
        input_bytes=stack.input_bytes(rows),
        dtype=chosen.shape.dtype,
        device_s=samples.device_s,
        wall_s=samples.wall_s,
        difference=max(before, after),
        model=chosen.shape.model,
        split=stack.split(scenario, rows),
        host_bound=samples.host_bound,
    )


def _compare(stack: Stack, chosen: StackPlan, scenario: Scenario, *, rows: int) -> float:
    difference = stack.difference(scenario, rows)
    if difference <= TOLERANCES[chosen.shape.dtype]:
        return difference
    raise ContentMismatch(
        f"{chosen.shape.model}, scenario {scenario}, batch {rows}: outputs differ from the resident ones by "
        f"{difference:.1%}",
        "the memory, the link or the driver is faulty; see the kernel's log (dmesg)",
    )
