"""The probe `scenarios`: one forward pass when the weights don't all fit, done in four ways.

resident: weights and inputs in VRAM, the reference. The others leave some weights in pinned host memory.
zero_copy_weights: kernels read those over the link, inputs are copied.
zero_copy_all: the inputs are left there too.
streamed: those are copied through two VRAM buffers while earlier layers compute; inputs are copied.
"""

import random
from collections.abc import Iterator

from probes import sampling
from probes.errors import ContentMismatch
from probes.model import BUDGET, HALF_BYTES, StackPlan, plan_stack
from probes.report import Pass, Record, Scenario, Settings
from probes.workbench import Stack, Workbench

GIB = 2**30
QUICK_WEIGHTS, FULL_WEIGHTS = GIB, 4 * GIB
QUICK_WIDTH, FULL_WIDTH = 4096, 8192
ROWS = (1, 256)
SPLIT: tuple[Scenario, ...] = ("zero_copy_weights", "zero_copy_all", "streamed")
ROOM = 0.6  # of free VRAM for the all-resident reference; the rest is for buffers and libraries
# float16 has 11 bits: sums of thousands of products in another order differ by about a percent at most
TOLERANCE = 0.02


def plan(settings: Settings, *, vram_free_bytes: int, host_spendable_bytes: int) -> StackPlan:
    """The stack to run: larger than the budget by a third, cut to what VRAM and the host can hold. Pure.

    Raises DeviceUnusable when too little is left.
    """
    cap = settings.vram_cap_bytes
    weights = QUICK_WEIGHTS if settings.quick else FULL_WEIGHTS
    if cap is not None:
        weights = int(cap / BUDGET)
    room = min(int(vram_free_bytes * ROOM), host_spendable_bytes)
    # fewer, larger layers are what big models have; a small card still needs enough of them to split
    width = FULL_WIDTH if min(weights, room) >= FULL_WEIGHTS else QUICK_WIDTH
    if min(weights, room) < QUICK_WEIGHTS // 2:
        width = QUICK_WIDTH // 4
    return plan_stack(
        width=width,
        weight_bytes=weights,
        budget_bytes=int(weights * BUDGET) if cap is None else cap,
        room_bytes=room,
    )


def run(bench: Workbench, settings: Settings, host_spendable_bytes: int) -> Iterator[Record]:
    """Time all scenarios, the order of the split ones drawn from the seed.

    Raises ContentMismatch when an output differs from the reference's.
    """
    chosen = plan(
        settings, vram_free_bytes=bench.vram_free_bytes(), host_spendable_bytes=host_spendable_bytes
    )
    draw = random.Random(settings.seed)
    with bench.stack(chosen, settings.seed) as stack:
        for rows in ROWS:
            yield _time(bench, stack, chosen, scenario="resident", rows=rows, settings=settings)
        stack.spill()
        split = [(scenario, rows) for scenario in SPLIT for rows in ROWS]
        for scenario, rows in draw.sample(split, len(split)):
            yield _time(bench, stack, chosen, scenario=scenario, rows=rows, settings=settings)


def _time(
    bench: Workbench, stack: Stack, chosen: StackPlan, *, scenario: Scenario, rows: int, settings: Settings
) -> Pass:
    before = _compare(stack, scenario, rows=rows)
    samples = sampling.sample(
        bench,
        [stack.passes(scenario, rows)],
        effort=sampling.QUICK if settings.quick else sampling.FULL,
        queued=True,
    )
    after = _compare(stack, scenario, rows=rows)  # behind many passes in a row, where a race would show
    return Pass(
        scenario=scenario,
        rows=rows,
        layers=chosen.layers,
        weight_bytes=chosen.weight_bytes,
        spilled_bytes=0 if scenario == "resident" else chosen.spilled_bytes,
        input_bytes=rows * chosen.width * HALF_BYTES,
        dtype="float16",
        device_s=samples.device_s,
        wall_s=samples.wall_s,
        difference=max(before, after),
    )


def _compare(stack: Stack, scenario: Scenario, *, rows: int) -> float:
    difference = stack.difference(scenario, rows)
    if difference <= TOLERANCE:
        return difference
    raise ContentMismatch(
        f"scenario {scenario}, batch {rows}: outputs differ from the resident ones by {difference:.1%}",
        "the memory, the link or the driver is faulty; see the kernel's log (dmesg)",
    )
