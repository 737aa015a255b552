"""Classes of operation are measured where there is no GPU, too, and are what the tracer calls so."""

from typing import get_args

import pytest
import torch

from probes.core.unknown import Unknown
from probes.measure import device, transfer
from probes.measure.class_work import class_work
from probes.placement.trace import trace_pass
from probes.records.rows import ClassWork
from probes.records.schema import Settings


@pytest.mark.parametrize("name", [name for name in get_args(ClassWork) if not name.startswith("products")])
def test_the_measured_operations_are_of_their_class_and_of_the_size_that_is_noted(name):
    with torch.inference_mode():
        work = class_work(name, torch.device("cpu"))
    kind = name.removeprefix("large ")
    # the tracer sees what a module calls with its own inputs, so the work's tensors are those
    arguments = work.operation.args[0]
    while not isinstance(arguments.args[0], torch.Tensor):
        arguments = arguments.args[0]
    trace = trace_pass(Of(arguments), tuple(arguments.args))
    (operation,) = [o for o in trace.operations if o.kind != "view"]
    assert operation.kind == kind
    assert operation.launches == work.launches
    assert operation.flops == work.flops
    if kind != "convolution":  # its weights are the work's own
        assert 0.9 < (operation.read + operation.written) / work.moved_bytes < 1.1


class Of(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.options = call.func, call.keywords

    def forward(self, *given):
        return self.call(*given, **self.options)


def test_a_run_without_a_gpu_measures_classes_and_plans_count_by_its_products(monkeypatch):
    monkeypatch.setattr(transfer, "CLASS_EFFORT", transfer.sampling.Effort(3, 1, 0.001))
    bench = device.TorchWorkbench(has_gpu=False)
    rows = tuple(transfer.classes(bench, Settings(False, 1, None)))
    assert {row.name for row in rows} >= {"plain", "large attention", "products float32"}
    assert all(isinstance(row.device_s, Unknown) and min(row.wall_s) > 0 for row in rows)
    assert not tuple(transfer.classes(bench, Settings(True, 1, None)))
