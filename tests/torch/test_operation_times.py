"""A trace whose operations are measured: each distinct one alone, on the device that a pass will run on."""

import pytest
import torch
from torch import nn

from probes.core.errors import UsageError
from probes.placement import plan
from probes.placement import trace as tracing
from probes.placement.models.modules import describe_module
from probes.placement.models.tracing import traced_module
from probes.placement.operation_times import OperationTime
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
