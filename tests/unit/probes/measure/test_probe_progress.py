import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_samples import CPU_TORCH, CUDA_TORCH, SETTINGS, done, machine

from probes.cli import run
from probes.measure import breakeven, catalog, scenarios, schedule, transfer
from probes.measure.schedule import BEGINNING, PlannedCase, progress, sentence
from probes.records.rounds import QUICK_ROUNDS
from probes.records.rows import Gap
from probes.records.schema import Settings

FULL = Settings(quick=False, seed=1, vram_cap_bytes=None)
costs = st.lists(st.floats(0.1, 10), min_size=2, max_size=30)


def plan_of(cost_s: list[float]) -> list[PlannedCase]:
    return [PlannedCase("transfer", str(i), cost) for i, cost in enumerate(cost_s)]


@given(costs, st.floats(0.2, 5), st.data())
def test_a_steady_pace_is_carried_on(cost_s: list[float], pace: float, data: st.DataObject) -> None:
    """Once half is done, what is left is foretold to within a half, on a machine of any speed."""
    plan = plan_of(cost_s)
    upto = data.draw(st.integers(1, len(plan)))
    over = sum(cost_s[:upto])
    at = progress(plan, {("transfer", 0, str(i)) for i in range(upto)}, (), elapsed_s=pace * over)
    assert (at.done, at.total) == (upto, len(plan))
    left = pace * (sum(cost_s) - over)
    if over >= sum(cost_s) / 2:
        assert at.left_s == pytest.approx(left, rel=0.5, abs=1e-6)
    assert (at.left_s == pytest.approx(0, abs=1e-6)) == (upto == len(plan))


def test_before_anything_is_done_the_plan_is_reported() -> None:
    assert progress(plan_of([1.0, 2.0]), (), (), elapsed_s=0).left_s == pytest.approx(3.0)


def test_a_machine_of_half_the_speed_takes_twice_as_long() -> None:
    at = progress(plan_of([10.0] * 10), {("transfer", 0, str(i)) for i in range(5)}, (), elapsed_s=100)
    assert at.left_s == pytest.approx(100, rel=0.05)


def test_a_probe_that_ended_early_is_no_longer_waited_for() -> None:
    plan = [
        PlannedCase("transfer", "a", 5.0),
        PlannedCase("spill", BEGINNING, 1.0),
        PlannedCase("spill", "spill", 9.0),
    ]
    at = progress(plan, {("transfer", 0, "a")}, {("spill", 0)}, elapsed_s=5)
    assert at.left_s == 0
    assert (at.done, at.total) == (2, 2)  # a start is no case


@pytest.mark.parametrize(
    ("left_s", "words"),
    [(0.2, "5 s"), (33, "35 s"), (97, "95 s"), (121, "3 min"), (540, "9 min")],
)
def test_the_time_left_is_reported_as_roughly_as_it_is_known(left_s: float, words: str) -> None:
    plan = plan_of([left_s])
    text = sentence(progress(plan, (), (), elapsed_s=0), so_far_s=123)
    assert text == f"2 min 03 s so far, 0 of 1 cases done, about {words} left"


def test_a_plan_names_exactly_the_cases_that_are_measured() -> None:
    """By the names under which the journal has them."""
    here = machine(torch=CUDA_TORCH)
    plan = schedule.plan((), SETTINGS, here, has_transformers=False)
    names = {name for name, _ in transfer.planned(SETTINGS, has_gpu=True)}
    assert Gap("h2d_pinned", 4096, "").case in names
    assert len(names) == len(transfer.GPU_PATHS) * len(transfer.QUICK_SIZES)
    for turn in range(QUICK_ROUNDS):
        cases = [one.case for one in plan if one.probe == "breakeven" and one.round == turn]
        assert len(cases) == 1 + len(breakeven.QUICK_SIZES) * len(breakeven.QUICK_READS) * 2
    assert {one.round for one in plan if one.probe == "spill"} == {0}
    assert [one.case for one in plan if one.probe == "scenarios"][1] == "mlp float16 resident 1"
    assert 20 < sum(one.cost_s for one in plan) < 60


def test_models_that_this_image_lacks_and_probes_that_dont_apply_are_not_planned() -> None:
    without = scenarios.planned(FULL, has_transformers=False)
    assert {name.split()[0] for name, _ in without} == {"mlp", "transformer"}
    plan = schedule.plan((), FULL, machine(torch=CPU_TORCH), has_transformers=True)
    assert {one.probe for one in plan} == {"transfer"}
    here = machine(torch=CUDA_TORCH)
    assert 200 < sum(p.cost_s for p in schedule.plan((), FULL, here, has_transformers=True)) < 600


def test_a_run_prints_now_and_then_how_long_it_still_takes(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    printer = run.ProgressPrinter(now=lambda: clock[0])
    printer.planned(tuple(PlannedCase("transfer", f"x {i}", 2.0) for i in range(10)))
    printer.started(catalog.select(("transfer",))[0], 0)
    for i in range(9):
        clock[0] += 2.0
        printer.record(Gap("x", i, "a test"))
    printer.ended(done("transfer"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--")]
    assert lines == [
        "-- 0 s so far, 0 of 10 cases done, about 20 s left",
        "-- 6 s so far, 3 of 10 cases done, about 15 s left",
        "-- 12 s so far, 6 of 10 cases done, about 10 s left",
        "-- 18 s so far, 9 of 10 cases done, about 5 s left",
    ]
