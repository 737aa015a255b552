"""Plans refined by a measured pass: better where a block takes other times than planned, and never slower."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement import load, place, plan
from probes.placement.models.modules import describe_module
from probes.placement.models.tracing import traced_by_call
from probes.placement.planner.api import resolve_model
from probes.placement.planner.machine import profile
from probes.placement.runtime import block_times, engine, handle, streams
from probes.placement.types import Workload

torch.set_num_threads(1)
MIB = 1 << 20
WIDTH, LAYERS, BUDGET = 1024, 12, 116 * MIB
MACHINE = profile("h200")


@dataclass
class Clock:
    """Time passes as blocks are copied and computed, at the rates of the plan's machine; of some, more."""

    now: float = 0.0
    slow: tuple[str, ...] = ()  # blocks whose copies take five times as long
    every: float = 1.0  # factor of all copies that come once `slow` has been looked at
    passes: int = 0

    def perf_counter(self):
        return self.now

    def copied(self, name, n_bytes):
        factor = 5.0 if name in self.slow else self.every
        self.now += factor * (MACHINE.link_alpha_s + n_bytes / MACHINE.link_rate)


class Layer(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.linear, self.clock = nn.Linear(WIDTH, WIDTH), clock

    def forward(self, x):
        self.clock.now += 5e-6
        return torch.relu(self.linear(x))


def model_of(clock):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(clock) for _ in range(LAYERS))).eval().requires_grad_(False)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (handle, block_times, streams):
        monkeypatch.setattr(module, "time", made)
    own = engine.Engine._copy

    def copied(self, piece, staging_buffer):
        def send(target, stream):
            made.copied(piece.owner.name, target.numel())
            sent(target, stream)

        sent, piece.weight_source = (
            piece.weight_source.send,
            SimpleNamespace(send=send, whole=piece.weight_source.whole),
        )
        try:
            own(self, piece, staging_buffer)
        finally:
            piece.weight_source = sent.__self__

    monkeypatch.setattr(engine.Engine, "_copy", copied)
    return made


def tiers(placed):
    return {block.name: block.tier for block in placed.plan.blocks}


def pass_s(model, x, clock):
    model(x)
    begun = clock.now
    model(x)
    return clock.now - begun


def streaming_plan(model, **options):
    return plan(model, vram=BUDGET, machine="h200", batch=256, captured=True, **options)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
def test_blocks_whose_copies_take_five_times_as_long_as_planned_stay_in_vram_afterwards(clock, count):
    x, model = torch.randn(2, WIDTH), model_of(clock)
    want = model(x)
    made = streaming_plan(model)
    moving = [block.name for block in made.blocks if block.wire_bytes]
    assert len(moving) > count
    assert len(moving) < LAYERS
    clock.slow = tuple(moving[:count])
    first = place(model, made, device="cpu")
    first_s = pass_s(model, x, clock)
    first.remove()
    placed = place(model, made, device="cpu", refine=True)
    assert torch.equal(model(x), want)
    assert not set(clock.slow) & {block.name for block in placed.plan.blocks if block.wire_bytes}
    assert pass_s(model, x, clock) < 0.9 * first_s
    (said,) = placed.report().events
    assert said.startswith("refined: first")
    assert said.count("predicted") == said.count("measured") == 2
    assert said in str(placed.report())
    assert torch.equal(model(x), want)
    placed.remove()
    assert torch.equal(model(x), want)


@torch.no_grad()
def test_a_second_plan_that_is_no_quicker_is_not_kept(clock, monkeypatch):
    x, model = torch.randn(2, WIDTH), model_of(clock)
    want = model(x)
    made = streaming_plan(model)
    moving = [block.name for block in made.blocks if block.wire_bytes]
    clock.slow = (moving[0],)
    own = handle.refine_plan

    def then_slower(*args):
        clock.every = 9.0  # whatever streams now
        return own(*args)

    monkeypatch.setattr(handle, "refine_plan", then_slower)
    placed = place(model, made, device="cpu", refine=True)
    assert torch.equal(model(x), want)
    assert tiers(placed) == {block.name: block.tier for block in made.blocks}
    assert "the first is kept" in placed.report().events[0]
    assert placed.plan.rings == made.rings
    assert torch.equal(model(x), want)


@torch.no_grad()
def test_a_plan_that_holds_is_kept_with_the_time_that_was_measured(clock):
    model, x = model_of(clock), torch.randn(2, WIDTH)
    want = model(x)
    placed = place(model, plan(model, vram=300 * MIB, machine="h200"), device="cpu", refine="h200")
    assert torch.equal(model(x), want)
    assert "no block moves" in placed.report().events[0]
    assert placed.plan.time.middle_s == pytest.approx(LAYERS * 5e-6, rel=0.01)


class Counting(nn.Module):
    """Writes to its buffer, to what it is given and to an attribute of its own."""

    def __init__(self, clock):
        super().__init__()
        self.layers, self.seen = model_of(clock), 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, kept):
        self.seen += 1
        self.calls += 1
        kept.append(self.layers(x + self.calls))
        return kept[-1]


@torch.no_grad()
def test_a_refined_models_first_call_changes_what_one_call_changes(clock):
    x = torch.randn(2, WIDTH)
    whole, model, want, kept = Counting(clock), Counting(clock), [], []
    whole(x, want)
    made = streaming_plan(model)
    clock.slow = tuple(block.name for block in made.blocks if block.wire_bytes)[:1]
    placed = place(model, made, device="cpu", refine=True)
    model(x, kept)
    assert len(kept) == 1
    assert torch.equal(kept[0], want[0])
    assert (model.seen, int(model.calls)) == (1, 1)
    assert "refined" in placed.report().events[0]
    whole(x, want)
    model(x, kept)
    assert torch.equal(kept[1], want[1])


@torch.no_grad()
def test_a_loaded_model_is_refined_without_its_weights_coming_home(clock, tmp_path):
    from safetensors.torch import save_file

    model, x = model_of(clock), torch.randn(2, WIDTH)
    want = model(x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        made = streaming_plan(model_of(clock))
    clock.slow = tuple(block.name for block in made.blocks if block.wire_bytes)[:1]
    loaded = load(lambda: model_of(clock), tmp_path, made, device="cpu", cache=False, refine=True)
    assert torch.equal(loaded(x), want)
    assert "refined: first" in loaded.placement.report().events[0]
    assert clock.slow[0] not in {b.name for b in loaded.placement.plan.blocks if b.wire_bytes}
    loaded.placement.remove()
    assert torch.equal(loaded(x), want)


def test_what_cannot_be_refined_is_refused(clock):
    model = model_of(clock)
    made = streaming_plan(model)
    with pytest.raises(PlacementError, match="a plan for one card and with a budget"):
        place(model, replace(made, vram_budget=0), device="cpu", refine=True)
    with pytest.raises(PlacementError, match="can't be refined") as error:
        place(model, replace(made, machine="report.json of another host"), device="cpu", refine=True)
    assert "refine=" in error.value.hint


@torch.no_grad()
def test_a_plan_that_rests_on_a_trace_is_refined_by_the_same_trace(clock, monkeypatch):
    x, whole, model = torch.randn(2, WIDTH), Counting(clock), Counting(clock)
    own, described, want, kept = handle.refine_plan, [], [], []

    def noted(description, *more):
        described.append(description)
        return own(description, *more)

    monkeypatch.setattr(handle, "refine_plan", noted)
    whole(x, want)
    before = resolve_model(model, Workload(), (x, []))
    made = streaming_plan(model, inputs=(x, []))
    assert made.rests_on == "trace"
    place(model, made, device="cpu", refine=True)
    model(x, kept)
    assert described == [before]
    assert before.traced is not None
    assert (len(kept), model.seen, int(model.calls)) == (1, 1, 1)
    assert torch.equal(kept[0], want[0])


def test_inputs_that_a_trace_might_write_to_are_not_traced():
    class Cache:
        pass

    model = nn.Linear(4, 4)
    described = describe_module(model)
    assert traced_by_call(model, described, Workload(), (torch.ones(1, 4), Cache()), {}) is described
    assert traced_by_call(model, described, Workload(), (torch.ones(1, 4),), {}).traced is not None
