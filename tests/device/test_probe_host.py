"""Torch's workbench and the model's four ways without a GPU: the same code, everything in host memory."""

import pytest

pytest.importorskip("torch")

from probes.core.errors import OutOfMemory
from probes.hardware.torch_build import describe
from probes.measure.device import TorchWorkbench
from probes.measure.stacks import linear_shape, plan_stack
from probes.measure.transfer import HOST_PATHS, MIB, QUICK_SIZES, run
from probes.measure.workbench import WRITTEN, Pattern
from probes.records.rows import Measurement
from probes.records.schema import Settings

PATTERN = Pattern(0xABCDEF)


@pytest.fixture
def bench() -> TorchWorkbench:
    return TorchWorkbench(has_gpu=False)


@pytest.mark.parametrize("action", ["copy", "kernel_copy", "write"])
def test_content_arrives(bench: TorchWorkbench, action: str) -> None:
    with bench.memory("pageable", 8 * MIB) as to, bench.memory("pageable", 8 * MIB) as of:
        there, here = to.span(MIB, 2 * MIB), of.span(MIB, 2 * MIB)
        bench.fill(there, Pattern(1, 3))
        bench.fill(here, PATTERN)
        bench.operation(action, there, None if action == "write" else here)()
        expected = {"copy": PATTERN, "kernel_copy": PATTERN.plus(1), "write": WRITTEN}[action]
        assert bench.matches(there, expected)
        assert bench.total(here) == PATTERN.total(MIB // 8, 2 * MIB // 8)


def test_one_wrong_word_is_seen(bench: TorchWorkbench) -> None:
    with bench.memory("pageable", 8 * MIB) as memory:
        whole = memory.span(0, 8 * MIB)
        bench.fill(whole, PATTERN)
        assert bench.matches(whole, PATTERN)
        bench.fill(memory.span(5 * MIB, 8), Pattern(1, 0))
        assert not bench.matches(whole, PATTERN)


def test_more_than_there_is_is_refused(bench: TorchWorkbench) -> None:
    with pytest.raises(OutOfMemory, match="refused"), bench.memory("pageable", 1 << 60):
        pass


def test_every_host_path_is_measured_and_verified(bench: TorchWorkbench) -> None:
    if describe().gpus:
        pytest.skip("the quick run on this machine measures the GPU's paths")
    found = list(run(bench, Settings(quick=True, seed=3, vram_cap_bytes=None), 2**30))
    assert {(m.name, m.payload_bytes) for m in found if isinstance(m, Measurement)} == {
        (path.name, size) for path in HOST_PATHS for size in QUICK_SIZES if size <= 128 * MIB
    }


def test_all_ways_through_the_model_give_one_output(bench: TorchWorkbench) -> None:
    layer = 256 * 256 * 2
    plan = plan_stack(linear_shape(256), weight_bytes=16 * layer, budget_bytes=12 * layer, room_bytes=2**30)
    with bench.stack(plan, 1) as stack:
        assert stack.difference("resident", 4) == 0.0
        stack.spill()
        for scenario in ("zero_copy_weights", "zero_copy_all", "streamed"):
            assert stack.difference(scenario, 4) == 0.0
