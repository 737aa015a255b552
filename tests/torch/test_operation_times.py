"""A trace whose operations are measured: each distinct one alone, on the device that a pass will run on."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from probes.core.errors import UsageError
from probes.placement import plan
from probes.placement import trace as tracing
from probes.placement.models.modules import describe_module
from probes.placement.models.tracing import traced_module, with_trace
from probes.placement.operation_times import OperationTime
from probes.placement.pass_time import host_time
from probes.placement.trace import trace_pass
from probes.placement.types import Workload

CPU = torch.device("cpu")
MIB = 2**20


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 8), nn.Flatten(0, 1)
    ).eval()


def inputs() -> torch.Tensor:
    return torch.zeros(2, 8, dtype=torch.int64)


def alike(time: OperationTime):
    """Measures nothing: every call takes this."""
    return lambda calls, device: dict.fromkeys(calls, time)


def test_each_operation_that_computes_has_its_time_and_views_have_none():
    trace = trace_pass(layers(), (inputs(),), measure=CPU)
    times = {operation.name: operation.device_s for operation in trace.operations}
    assert times.pop("view", None) is None
    assert all(seconds and seconds > 0 for seconds in times.values()), times
    assert trace.measured == "cpu"


def test_like_operations_are_run_once_and_random_numbers_come_again(monkeypatch):
    ran = []

    def seen(calls, device):
        ran.extend(dict.fromkeys(calls))
        return alike(OperationTime(1e-3, 1e-6, 0))(calls, device)

    monkeypatch.setattr(tracing, "measured", seen)
    trace = trace_pass(layers(), (inputs(),), measure=CPU)
    named = [call.function.overloadpacket.__name__ for call in ran]
    assert named.count("linear") == 2  # three alike, and one that is narrower
    assert sum(operation.device_s or 0 for operation in trace.operations) == pytest.approx(5e-3)
    monkeypatch.undo()
    model = layers()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    trace_pass(model, (inputs(),), measure=CPU)
    assert torch.equal(torch.rand(1), expected)


def test_the_bytes_that_an_operation_takes_meanwhile_are_in_the_peak(monkeypatch):
    """A library's workspace that a budget forgets costs a slower algorithm, with other bits."""
    usual = trace_pass(layers(), (inputs(),)).peak.alive
    monkeypatch.setattr(tracing, "measured", alike(OperationTime(1e-6, 1e-6, 7 * MIB)))
    measured = trace_pass(layers(), (inputs(),), measure=CPU).peak.alive
    assert 7 * MIB < measured <= 7 * MIB + usual


def test_what_cannot_run_alone_is_counted_by_its_kind():
    class Selected(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.index_add(x, 0, torch.tensor([0]), x[:1])

    trace = trace_pass(Selected(), (torch.ones(4, 4),), measure=CPU)
    assert any(operation.name == "index_add" for operation in trace.operations)


def test_a_plan_counts_with_what_was_measured(monkeypatch):
    model, described = layers(), describe_module(layers())
    predicted = []
    for seconds in (1e-5, 1e-2):
        monkeypatch.setattr(tracing, "measured", alike(OperationTime(seconds, seconds, 0)))
        traced = traced_module(model, described, Workload(), inputs(), measure=CPU)
        made = plan(traced, vram=256 * MIB, machine="h100", captured=True)
        predicted.append(made.time.middle_s)
        assert made.rests_on == "measured"
        assert 4.99 * seconds <= made.time.middle_s <= 5 * seconds + 1e-4
    assert predicted[1] > 100 * predicted[0]


def test_measuring_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UsageError, match="torch finds no GPU"):
        plan(layers(), vram=64 * MIB, machine="h100", inputs=inputs(), measure=True)


class Recurrent(nn.Module):
    """Its loop keeps its weights once more, in a list."""

    def __init__(self, device=None):
        super().__init__()
        self.register_buffer("scale", torch.ones(1, device=device))
        self.loop = nn.LSTM(16, 16, device=device)
        self.head = nn.Linear(16, 16, device=device)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(self.loop(x)[0]) * self.scale


def test_a_whole_pass_is_timed_with_borrowed_weights_and_the_module_is_as_it_was():
    model = Recurrent().eval()
    before = {name: (id(held), held.clone()) for name, held in model.state_dict(keep_vars=True).items()}
    expected = model(torch.ones(3, 2, 16))
    assert (host_time(model, (torch.ones(3, 2, 16),), {}, CPU) or 0) > 0
    for name, held in model.state_dict(keep_vars=True).items():
        assert (id(held), True) == (before[name][0], torch.equal(held, before[name][1])), name
    assert torch.equal(model(torch.ones(3, 2, 16)), expected)


def test_a_whole_pass_needs_no_weights_and_one_that_fails_has_no_time():
    assert (host_time(Recurrent("meta").eval(), (torch.ones(3, 2, 16),), {}, CPU) or 0) > 0
    assert host_time(Recurrent().eval(), (torch.ones(3, 2, 17),), {}, CPU) is None


def test_a_plan_takes_pythons_time_from_the_pass_that_was_timed():
    """Twice the time between the operations: the pass is predicted to take as much more, no captured one."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).eval()
    trace = trace_pass(model, (torch.ones(1, 64),))
    operations = tuple(replace(each, device_s=1e-7, host_s=1e-6) for each in trace.operations)
    described = describe_module(model)
    paths = {str(number): str(number) for number in range(8)}

    def predicted(host_s, *, captured=False):
        timed = replace(trace, operations=operations, measured="cuda", host_s=host_s)
        traced = with_trace(described, [timed], paths, (), around=0)
        made = plan(traced, vram=MIB * 512, machine="H100", captured=captured)
        return made.time.middle_s

    launched_s = 1e-6 * len(operations)
    assert predicted(1e-3 + launched_s) == pytest.approx(1e-3 + launched_s, rel=0.05)
    assert predicted(2e-3 + launched_s) == pytest.approx(2e-3 + launched_s, rel=0.05)
    assert predicted(1e-3, captured=True) == predicted(2e-3, captured=True)
