"""The scenarios' model in torch: square linear layers with ReLU, and four ways to run them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import functional

from probes.model import STREAM_BUFFERS, StackPlan
from probes.report import Scenario
from probes.workbench import Operation

ZeroCopy = Callable[[torch.Tensor], torch.Tensor]


class LinearStack:
    """`probes.workbench.Stack`. Without `zero_copy` everything is in host memory (to try the code there)."""

    def __init__(self, plan: StackPlan, seed: int, *, zero_copy: ZeroCopy | None) -> None:
        self.plan = plan
        self._zero_copy = zero_copy
        self._device = "cuda" if zero_copy else "cpu"
        self._dtype = torch.float16 if zero_copy else torch.float32
        self._generator = torch.Generator(self._device).manual_seed(seed)
        # He's scale keeps the size of activations through ReLU, so that float16 neither overflows nor dies
        scale = (2.0 / plan.width) ** 0.5
        self._weights = [self._random(plan.width, scale) for _ in range(plan.layers)]
        self._host: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._reference: dict[int, torch.Tensor] = {}
        self._stream: _Streamer | None = None

    def _random(self, rows: int, scale: float) -> torch.Tensor:
        shape = (rows, self.plan.width)
        values = torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)
        return values.mul_(scale)

    def spill(self) -> None:
        """Move the plan's spilled weights out of VRAM into pinned host memory."""
        for index in self.plan.spilled:
            self._host[index] = self._to_host(self._weights[index])
            self._weights[index] = self._as_seen(self._host[index])
        if self._zero_copy:
            torch.cuda.empty_cache()
            self._stream = _Streamer(self._host, self.plan)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._zero_copy is not None)
        return host.copy_(tensor)

    def _as_seen(self, host: torch.Tensor) -> torch.Tensor:
        return self._zero_copy(host) if self._zero_copy else host

    def release(self) -> None:
        """Let go of every tensor."""
        self._weights.clear()
        for store in (self._host, self._inputs, self._reference):
            store.clear()
        self._stream = None

    def passes(self, scenario: Scenario, rows: int) -> Operation:
        """One forward pass, to be repeated. "resident" works before `spill`, the others after it."""
        host = self._input(rows)
        if scenario == "resident":
            resident = host.to(self._device)
            return partial(self._forward, lambda: resident)
        if scenario == "zero_copy_all":
            left = self._as_seen(host)
            return partial(self._forward, lambda: left)
        copied = partial(host.to, self._device, non_blocking=True)
        if scenario == "streamed" and self._stream:
            return partial(self._forward_streamed, copied, self._stream)
        return partial(self._forward, copied)

    def _input(self, rows: int) -> torch.Tensor:
        if rows not in self._inputs:
            self._inputs[rows] = self._to_host(self._random(rows, 1.0))
        return self._inputs[rows]

    def _forward(self, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            x = source()
            for weight in self._weights:
                x = functional.relu(functional.linear(x, weight))
        return x

    def _forward_streamed(self, source: Callable[[], torch.Tensor], stream: "_Streamer") -> torch.Tensor:
        with torch.inference_mode():
            stream.begin()
            x = source()
            for index, weight in enumerate(self._weights):
                if index in self._host:
                    with stream.next() as streamed:
                        x = functional.relu(functional.linear(x, streamed))
                else:
                    x = functional.relu(functional.linear(x, weight))
        return x

    def difference(self, scenario: Scenario, rows: int) -> float:
        """Run once; largest absolute difference from the resident output, over the largest output."""
        output = self.passes(scenario, rows)()
        assert isinstance(output, torch.Tensor)
        found = output.float().cpu()
        if scenario == "resident":
            self._reference[rows] = found
        reference = self._reference[rows]
        return float((found - reference).abs().max() / reference.abs().max())


class _Streamer:
    """Copies spilled layers, in order, into two buffers in turn on a stream of its own.

    A buffer is overwritten only after the compute stream has used it, and used only after its copy has
    ended; both waits are on the device, the host never waits.
    """

    def __init__(self, host: dict[int, torch.Tensor], plan: StackPlan) -> None:
        self._queue = [host[index] for index in plan.spilled]
        self._buffers = [torch.empty_like(self._queue[0], device="cuda") for _ in range(STREAM_BUFFERS)]
        self._copies = torch.cuda.Stream()
        self._arrived = [torch.cuda.Event() for _ in self._buffers]
        self._used = [torch.cuda.Event() for _ in self._buffers]
        self._sent = self._taken = 0

    def begin(self) -> None:
        """Start a pass: its copies come after everything that the compute stream holds, a timer included."""
        self._copies.wait_stream(torch.cuda.current_stream())
        self._sent = self._taken = 0
        for _ in self._buffers:
            self._send()

    def _send(self) -> None:
        if self._sent == len(self._queue):
            return
        slot = self._sent % len(self._buffers)
        with torch.cuda.stream(self._copies):
            if self._sent >= len(self._buffers):
                self._copies.wait_event(self._used[slot])
            self._buffers[slot].copy_(self._queue[self._sent], non_blocking=True)
            self._arrived[slot].record()
        self._sent += 1

    @contextmanager
    def next(self) -> Iterator[torch.Tensor]:
        """The next spilled layer's weights; at the end of the `with` their buffer is refilled."""
        slot = self._taken % len(self._buffers)
        self._taken += 1
        torch.cuda.current_stream().wait_event(self._arrived[slot])
        yield self._buffers[slot]
        self._used[slot].record()
        self._send()
