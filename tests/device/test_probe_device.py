"""Torch's workbench against plain torch, on a real GPU."""

import statistics
import time
from pathlib import Path

import pytest
from device_bars import Bar

torch = pytest.importorskip("torch")

from probes.core.errors import OutOfMemory, ProbeError, Unsupported  # noqa: E402
from probes.core.unknown import Unknown  # noqa: E402
from probes.hardware import host  # noqa: E402
from probes.hardware.torch_build import describe  # noqa: E402
from probes.measure import (  # noqa: E402
    architectures,
    scenarios,
    spill,
)
from probes.measure.device import TorchWorkbench  # noqa: E402
from probes.measure.sampling import QUICK, Effort, sample  # noqa: E402
from probes.measure.stacks import linear_shape, plan_stack  # noqa: E402
from probes.measure.transfer import Grid  # noqa: E402
from probes.measure.workbench import WRITTEN, Pattern  # noqa: E402
from probes.placement.runtime.host_memory import zero_copy  # noqa: E402
from probes.records.rows import Pass, Split  # noqa: E402
from probes.records.schema import Settings  # noqa: E402
from probes.reports import run_findings  # noqa: E402

pytestmark = pytest.mark.usefixtures("gpu")
MIB = 2**20
SIZE = 1024 * MIB
ROUNDS = 5
OPERATIONS = 10  # between two events: the start event fires before the host has handed over the first
PATTERN = Pattern(0xABCDEF)


@pytest.fixture(scope="module")
def bench() -> TorchWorkbench:
    return TorchWorkbench(has_gpu=torch.cuda.is_available())


def plain_event_loop(operation, repeats: int = 2) -> float:
    """Seconds per operation as anyone would measure them with events."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(OPERATIONS):
            operation()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / OPERATIONS)
    return statistics.median(times[1:])


def test_the_gpu_is_described(bench: TorchWorkbench) -> None:
    facts = describe()
    assert not facts.obstacle
    assert facts.gpus[0].vram_total_bytes >= facts.gpus[0].vram_free_bytes > 0
    assert facts.gpus[0].target.startswith(("sm_", "gfx"))


@pytest.mark.parametrize(
    ("action", "target", "source"),
    [
        ("copy", "vram", "pageable"),
        ("copy", "vram", "pinned"),
        ("copy", "pageable", "vram"),
        ("copy", "pinned", "vram"),
        ("copy", "vram", "vram"),
        ("kernel_copy", "zero_copy", "vram"),
        ("kernel_copy", "vram", "zero_copy"),
        ("write", "vram", None),
        ("write", "zero_copy", None),
    ],
)
def test_content_arrives(bench: TorchWorkbench, action: str, target: str, source: str | None) -> None:
    with bench.memory(target, 8 * MIB) as to, bench.memory(source or "vram", 8 * MIB) as of:
        there, here = to.span(MIB, 2 * MIB), of.span(MIB, 2 * MIB)
        bench.fill(there, Pattern(1, 3))
        bench.fill(here, PATTERN)
        assert not bench.matches(there, PATTERN)
        bench.operation(action, there, here if source else None)()
        expected = {"copy": PATTERN, "kernel_copy": PATTERN.plus(1), "write": WRITTEN}[action]
        assert bench.matches(there, expected)


@pytest.mark.parametrize("kind", ["vram", "zero_copy"])
def test_a_read_sums_what_is_there(bench: TorchWorkbench, kind: str) -> None:
    with bench.memory(kind, 8 * MIB) as memory:
        span = memory.span(MIB, 2 * MIB)
        bench.fill(span, PATTERN)
        assert bench.total(span) == PATTERN.total(MIB // 8, 2 * MIB // 8)


def test_zero_copy_aliases_and_keeps_its_owner_alive() -> None:
    pinned = torch.arange(1000, dtype=torch.int64).pin_memory()
    view = zero_copy(pinned)
    assert view.data_ptr() == pinned.data_ptr()
    assert view.is_cuda
    view.add_(1)
    torch.cuda.synchronize()
    assert pinned[10] == 11
    del pinned
    assert int(view.sum()) == sum(range(1, 1001))


def test_zero_copy_of_pageable_memory_is_refused() -> None:
    with pytest.raises(ProbeError, match="pinned"):
        zero_copy(torch.ones(8))


@pytest.mark.parametrize(
    ("name", "action", "target", "source"),
    [
        ("pinned H2D", "copy", "vram", "pinned"),
        ("pinned D2H", "copy", "pinned", "vram"),
        ("zero-copy read", "read", None, "zero_copy"),
        ("VRAM read", "read", None, "vram"),
    ],
)
def test_our_clock_agrees_with_a_plain_loop_of_events(
    bar: Bar, bench: TorchWorkbench, name: str, action: str, target: str | None, source: str
) -> None:
    with bench.memory(target or "vram", SIZE) as to, bench.memory(source, SIZE) as of:
        bench.fill(to.span(0, SIZE), Pattern(1, 3))
        bench.fill(of.span(0, SIZE), PATTERN)
        operation = bench.operation(action, to.span(0, SIZE if target else 8), of.span(0, SIZE))
        # by turns: the link of a machine that others use too drifts by more than what is to be shown
        pairs = [(clocked(bench, operation), plain_event_loop(operation)) for _ in range(ROUNDS)]
    off = statistics.median(mine / plain - 1 for mine, plain in pairs)
    gb_per_s = round(SIZE / statistics.median(mine for mine, _ in pairs) / 1e9, 1)
    bar(f"{name}: distance from a plain event loop", abs(off), limit=0.03, unit="1", gb_per_s=gb_per_s)


def clocked(bench: TorchWorkbench, operation) -> float:
    """Seconds per operation by our device clock."""
    found = sample(bench, [operation], effort=QUICK, queued=True)
    assert isinstance(found.device_s, tuple)
    assert not found.host_bound
    return statistics.median(found.device_s)


def test_the_wait_is_as_long_as_it_should_be(bar: Bar, bench: TorchWorkbench) -> None:
    """The clock that counts the wait was calibrated on this card."""
    for seconds in (1e-3, 10e-3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        events[0].record()
        bench.wait(seconds)
        events[1].record()
        events[1].synchronize()
        off = events[0].elapsed_time(events[1]) / 1e3 / seconds - 1
        bar(f"a wait of {seconds * 1e3:g} ms, off by", abs(off), limit=0.1, unit="1", ticks=bench.ticks_per_s)


def test_a_row_that_the_host_holds_up_is_marked_and_another_is_not(bench: TorchWorkbench) -> None:
    """An operation that takes the host longer than the device, whatever the wait in front of it."""
    with bench.memory("vram", 64 * MIB) as memory, bench.memory("vram", 8) as sums:
        read = bench.operation("read", sums.span(0, 8), memory.span(0, 64 * MIB))
        assert not sample(bench, [read], effort=QUICK, queued=True).host_bound

        def slow() -> None:
            read()
            time.sleep(0.3)  # longer than any wait that is put in front

        found = sample(bench, [slow], effort=Effort(5, 3, 0.1), queued=True)
        assert found.host_bound


def test_all_places_are_compared_one_wrong_word_is_seen(bench: TorchWorkbench) -> None:
    grid = Grid(64 * MIB, 4096)
    for kind in ("vram", "pinned", "pageable"):
        with bench.memory(kind, 64 * MIB) as memory:
            bench.fill(memory.span(0, 64 * MIB), Pattern(1, 0))
            bench.fill(grid.all_of(memory, grid.count), PATTERN)
            assert bench.matches(grid.all_of(memory, grid.count), PATTERN)
            bench.fill(memory.span(grid.offsets[grid.count // 2] + 4088, 8), Pattern(1, 0))
            assert bench.matches(grid.all_of(memory, grid.count // 2), PATTERN)
            assert not bench.matches(grid.all_of(memory, grid.count), PATTERN)


def test_a_read_leaves_its_sum_in_each_place(bench: TorchWorkbench) -> None:
    grid = Grid(8 * MIB, 65536)
    with bench.memory("zero_copy", 8 * MIB) as memory, bench.memory("vram", 8 * grid.count) as sums:
        bench.fill(memory.span(0, 8 * MIB), PATTERN)
        for place, span in enumerate(grid.spans(memory)):
            bench.operation("read", sums.span(8 * place, 8), span)()
        assert bench.words(sums.span(0, 8 * grid.count)) == grid.sums(PATTERN, grid.count)


def test_the_classifier_labels_every_known_block(bar: Bar, bench: TorchWorkbench) -> None:
    half, size = 100, 64 * MIB
    run = spill._Run(
        bench,
        spill.Gauges(lambda: 2**40, lambda: Unknown("not watched"), lambda _: ()),
        spill.Plan(None, 0, 0, size),
        (stack := spill.ExitStack()),
    )
    with stack:
        for index in range(half):
            spill._add(run, "zero_copy", control=index < 2)
            spill._add(run, "vram", control=index < 2)
        word = stack.enter_context(bench.memory("vram", 8)).span(0, 8)
        placed = run_findings.label_blocks([spill._reread(bench, held, word) for held in run.held])
    judged = [p for p in placed if not p.block.control]  # the controls are what the others are held against
    wrong = [p for p in judged if p.by_timing != ("vram" if p.block.asked == "vram" else "host")]
    bar("known blocks labelled wrong", len(wrong), limit=0, unit="blocks", blocks=len(judged))


def test_a_cap_makes_the_card_small(bench: TorchWorkbench) -> None:
    try:
        bench.cap_vram(1024 * MIB)
        with bench.memory("vram", 512 * MIB), pytest.raises(OutOfMemory), bench.memory("vram", 768 * MIB):
            pass
    finally:
        bench.cap_vram(torch.cuda.get_device_properties(0).total_memory)


def test_streaming_never_overtakes_compute(bar: Bar, bench: TorchWorkbench) -> None:
    """Many passes in a row, layers small enough for copies to run far ahead if nothing held them."""
    width, layers = 1024, 24
    layer = width * width * 2
    plan = plan_stack(
        linear_shape(width), weight_bytes=layers * layer, budget_bytes=layers * layer // 2, room_bytes=2**34
    )
    with bench.stack(plan, 11) as stack:
        for rows in (1, 256):
            stack.difference("resident", rows)
        stack.spill()
        worst = 0.0
        for _ in range(50):
            for rows in (1, 256):
                stack.passes("streamed", rows)()  # queued behind one another, nothing waits in between
                worst = max(worst, stack.difference("streamed", rows))
    bar(
        "streamed outputs, largest difference in 100 passes",
        worst,
        limit=0.0,
        unit="1",
        spilled=len(plan.spilled),
    )


def test_forced_requests_all_end_in_records_and_keep_the_floor(bar: Bar, bench: TorchWorkbench) -> None:
    """VRAM under a cap; the host as if it had 2 GiB to spend, so that requests run into its floor."""
    root, cap, spend, count = Path("/"), 2 * 2**30, 2 * 2**30, 200
    start = host.available_bytes(root)
    assert isinstance(start, int)
    floor, least = start - spend, start
    offered: list[int] = []  # grows beyond `spend` where other programs free memory meanwhile

    def spendable() -> int:
        nonlocal least
        now = host.available_bytes(root)
        assert isinstance(now, int)
        least = min(least, now)
        offered.append(host.spendable_bytes(now, floor))
        return offered[-1]

    limits = spill.Limits(cap, spend, cap)
    try:
        bench.cap_vram(cap)
        found = []
        for request in spill.ask_around_limits(
            bench, limits, count=count, seed=5, host_spendable_bytes=spendable
        ):
            found.append((request, offered[-1]))
            spendable()
    finally:
        bench.cap_vram(torch.cuda.get_device_properties(0).total_memory)
    assert [r for r, _ in found if not r.granted and not r.message] == []
    vram = [r for r, _ in found if r.kind == "vram"]
    beyond = [r for r in vram if r.asked_bytes > cap]
    bar(
        "VRAM requests beyond the cap that were granted",
        sum(r.granted for r in beyond),
        limit=0,
        of=len(beyond),
    )
    within = [r for r in vram if r.asked_bytes < 0.98 * cap]  # torch keeps a little for itself
    refused = sum(not r.granted for r in within)
    bar("VRAM requests within the cap that were refused", refused, limit=0, of=len(within))
    granted = [(r, most) for r, most in found if r.kind != "vram" and r.granted]
    beyond_floor = [
        r for r, most in granted if spill.host_bytes(r.kind, r.asked_bytes, vram_free_bytes=0) > most
    ]
    assert beyond_floor == []
    assert host
    bar("MemAvailable over the floor", (least - floor) / 2**30, limit=0.0, unit="GiB", at_least=True)


@pytest.mark.parametrize("model", ["mlp", "transformer", "bert-base"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_way_through_a_real_architecture_gives_one_output(
    bar: Bar, bench: TorchWorkbench, monkeypatch: pytest.MonkeyPatch, model: str, dtype: str
) -> None:
    """The tolerance lies between what rounding does and what one layer of wrong weights does."""
    monkeypatch.setattr(scenarios, "QUICK_EFFORT", scenarios.sampling.Effort(3, 2, 0.01))
    asked = Settings(quick=True, seed=1, vram_cap_bytes=None, models=(model,), dtypes=(dtype,))
    try:
        passes = [r for r in scenarios.run(bench, asked, 8 * 2**30) if isinstance(r, Pass)]
    except Unsupported as lacking:
        pytest.skip(lacking.message)
    assert len(passes) == 2 * len(scenarios.SCENARIOS)
    tolerance = scenarios.TOLERANCES[dtype]
    rounding, wrong = rounding_and_fault(bench, asked, model=model, dtype=dtype)
    seen = max(p.difference for p in passes)  # above the tolerance, the scenario has ended with an error
    bar(f"{model} {dtype}: rounding", rounding / tolerance, limit=1, unit="of the tolerance", seen=seen)
    fault = wrong / tolerance
    bar(f"{model} {dtype}: a layer of wrong weights", fault, limit=1, unit="of the tolerance", at_least=True)
    streamed = next(p for p in passes if p.scenario == "streamed")
    assert isinstance(streamed.split, Split)
    assert streamed.split.copy_s > 0


def rounding_and_fault(
    bench: TorchWorkbench, asked: Settings, *, model: str, dtype: str
) -> tuple[float, float]:
    """Distance of the output from float64's, and from one with a spilled layer's weights at zero."""
    room = scenarios.Room(bench.vram_free_bytes(), 8 * 2**30)
    shape = bench.shape(model, dtype=dtype, width=scenarios.linear_width(asked, room))
    rows = scenarios.rows_of(shape)[1]
    plan = scenarios.plan(asked, room, shape)
    with bench.stack(plan, 1) as stack, torch.inference_mode():
        stack.difference("resident", rows)
        stack.spill()
        for parameter in stack._model.layers[plan.spilled[0]].parameters():
            parameter.zero_()
        wrong = stack.difference("zero_copy_weights", rows)
    with bench.stack(plan, 1) as stack, torch.inference_mode():
        mine = stack.passes("resident", rows)().double()
        given = stack._input(rows).cuda()
        stack._model.module.double()
        exact = stack._model.call(given if stack._model.vocabulary else given.double())
        rounding = float((mine - exact).abs().max() / exact.abs().max())
    return rounding, wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_zero_copy_shows_the_same_numbers_in_every_dtype(dtype: torch.dtype) -> None:
    host = torch.arange(4096).to(dtype).pin_memory()
    assert torch.equal(zero_copy(host).cpu(), host)


def test_published_models_have_their_published_size() -> None:
    """Parameters in millions, heads left out, as the models' cards give them."""
    pytest.importorskip("transformers")
    for model, millions in (("bert-base", 109), ("gpt2-xl", 1558), ("qwen2.5-1.5b", 1544)):
        shape = architectures.shape(model, dtype="float16", width=0)
        numbers = (shape.layers * shape.layer_bytes + shape.fixed_bytes) / 2
        assert numbers / 1e6 == pytest.approx(millions, rel=0.01), model
