"""How long a training step of a whole model takes on a machine, by all of its operations.

The step is run on tensors without numbers (`traced_step`), and what it calls is counted as a pass of
inference is: by class of operation and the machine's rates (docs/decisions/0094), or as each distinct call
was measured on this GPU (0111). The GPU and the host's launches are simulated operation by operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from probes.core.errors import PlacementError
from probes.placement.models.description import BlockDescription
from probes.placement.models.operations import Operation
from probes.placement.planner.costs import BESIDE_CALLS, GpuTime, beside_measured
from probes.placement.planner.machine import Constants
from probes.placement.planner.rules import Pass
from probes.placement.trace import Tracer, as_it_was, fill, no_packed_sequences

PHASES: Final = ("forward", "backward", "optimizer")
Begins = Callable[[str], None]


@dataclass(frozen=True)
class StepOperations:
    """What one step calls, by phase, and how many modules its forward calls."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    optimizer: tuple[Operation, ...]
    modules_called: int

    @property
    def all(self) -> tuple[Operation, ...]:
        """In the order of their calls."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one training step. Phases are the GPU's own time."""

    step_s: float
    low_s: float  # of the interval that should hold 90 % of measurements
    high_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    host_s: float  # to launch all of it
    operations: int
    flops: int

    @property
    def waits_for_host(self) -> bool:
        """Whether launching takes longer than computing."""
        return self.host_s > self.forward_s + self.backward_s + self.optimizer_s


def traced_step(
    module: nn.Module,
    step: Callable[[Begins], object],
    device: str,
    *,
    measure: torch.device | None = None,
) -> StepOperations:
    """The operations of a module's training step on tensors without numbers. The module is as before.

    `step` makes its own optimizer, does two steps, and calls what it is given with a phase's name (one of
    PHASES) when that begins; the second step counts, when the optimizer has its states. `measure`: the GPU on
    which each distinct call is run and timed afterwards. Raises PlacementError for what can't be traced.
    """
    borders: list[tuple[str, int]] = []
    calls = [0]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), as_it_was(module), no_packed_sequences():
            fill(module, device)
            tracer = Tracer(module, keeps_calls=measure is not None)

            def begins(phase: str) -> None:
                borders.append((phase, len(tracer.operations)))
                calls.append(sum(tracer.calls.values()))

            tracer.follow(module)
            with torch.random.fork_rng(devices=[]), tracer:
                step(begins)
    except PlacementError:
        raise
    except Exception as error:  # torch's and the module's own, of any kind
        text = str(error).strip().partition("\n")[0][:200]
        raise PlacementError(f"a training step can't be traced: {type(error).__name__}: {text}") from error
    if measure is not None:
        tracer.measure(measure)
    first = [phase for phase, _ in borders].index("optimizer") + 1  # the second step
    ends = [*(place for _, place in borders[first + 1 :]), len(tracer.operations)]
    parts: dict[str, tuple[Operation, ...]] = dict.fromkeys(PHASES, ())
    for (phase, begin), end in zip(borders[first:], ends, strict=True):
        parts[phase] += tuple(tracer.operations[begin:end])
    return StepOperations(**parts, modules_called=calls[-1] - calls[first + 1])


def step_time(work: StepOperations, machine: Constants, *, accumulate: int = 1) -> StepTime:
    """What a step of `accumulate` passes takes on a machine with a GPU, in a loop that waits for nothing.

    The host launches one operation after the other, with Python's time for modules in the forward pass; the
    GPU begins each when it is launched and the one before it is done.
    """
    whole = BlockDescription("the step", (), work=work.all, mixed=True)
    gpu = GpuTime(whole, machine, Pass(1, 1, 0, "exact"))
    seconds = {operation: gpu.of(operation) for operation in set(work.all)}
    around_s = BESIDE_CALLS * work.modules_called * machine.operation_s / max(len(work.forward), 1)
    both = [(_host_s(o, machine) + around_s, seconds[o]) for o in work.forward]
    both += [(_host_s(o, machine), seconds[o]) for o in work.backward]
    last = [(_host_s(o, machine), seconds[o]) for o in work.optimizer]
    one_s, two_s = _repeated_s(both + last), _repeated_s(2 * both + last)
    step_s = one_s + (accumulate - 1) * (two_s - one_s)  # each further pass takes as long as the second
    passes = work.forward + work.backward
    return StepTime(
        step_s,
        step_s * (1 - machine.spread),
        step_s * (1 + machine.spread),
        forward_s=accumulate * sum(seconds[o] for o in work.forward),
        backward_s=accumulate * sum(seconds[o] for o in work.backward),
        optimizer_s=sum(seconds[o] for o in work.optimizer),
        host_s=accumulate * sum(host for host, _ in both) + sum(host for host, _ in last),
        operations=accumulate * _launched(passes) + _launched(work.optimizer),
        flops=accumulate * sum(o.flops for o in passes) + sum(o.flops for o in work.optimizer),
    )


def _repeated_s(operations: Sequence[tuple[float, float]]) -> float:
    """Seconds of operations (of the host to launch each, and of the GPU) that follow themselves."""
    host_s = gpu_s = 0.0
    ended = []
    for _ in range(2):  # the second time begins while the first is still computed
        for launch_s, took_s in operations:
            host_s += launch_s
            gpu_s = max(gpu_s, host_s) + took_s
        ended.append(gpu_s)
    return ended[1] - ended[0]


def _launched(operations: Sequence[Operation]) -> int:
    return sum(o.kind != "view" for o in operations)


def _host_s(operation: Operation, machine: Constants) -> float:
    return (operation.host_s or 0.0) + beside_measured(operation, machine) * machine.operation_s
