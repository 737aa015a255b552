"""A model whose layers can be placed in VRAM or host memory, and four ways to run it.

Layers keep their code: hooks move weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from probes.placement.architectures import Built, build
from probes.placement.split import STREAM_BUFFERS, StackPlan
from probes.records.schema import Scenario, Split, Unknown

Operation = Callable[[], object]
ZeroCopy = Callable[[torch.Tensor], torch.Tensor]
LEAD_MARGIN = 2.0  # the wait before a pass outlasts handing it over by this factor
ALIGNMENT = 256  # of each parameter in a layer's flat buffer, as the caching allocator's own


@dataclass(frozen=True)
class _Layer:
    """One layer's weights in one piece of host memory, and where in it each parameter is."""

    module: nn.Module
    flat: torch.Tensor  # bytes, pinned

    def views(self, flat: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its place in a flat buffer of this layer's size."""
        placed, offset = [], 0
        for parameter in self.module.parameters():
            size = parameter.numel() * parameter.element_size()
            piece = flat[offset : offset + size].view(parameter.dtype).view(parameter.shape)
            placed.append((parameter, piece))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        return placed


def _flat_bytes(module: nn.Module) -> int:
    sizes = (p.numel() * p.element_size() for p in module.parameters())
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def _put(placed: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, piece in placed:
        parameter.data = piece


class LayerStack:
    """The workbench's `Stack`. Without `zero_copy` everything is in host memory (to try the code there)."""

    def __init__(
        self, plan: StackPlan, seed: int, *, zero_copy: ZeroCopy | None, wait: Callable[[float], None]
    ) -> None:
        self.plan = plan
        self._zero_copy = zero_copy
        self._wait = wait
        self._device = "cuda" if zero_copy else "cpu"
        self._built: Built | None = build(plan, self._device, seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._spilled: dict[int, _Layer] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._reference: dict[int, torch.Tensor] = {}
        self._stream: _Streamer | None = None

    def spill(self) -> None:
        """Move the plan's spilled weights out of VRAM into pinned host memory."""
        for index in self.plan.spilled:
            module = self._model.layers[index]
            flat = torch.empty(_flat_bytes(module), dtype=torch.uint8, pin_memory=self._zero_copy is not None)
            layer = self._spilled[index] = _Layer(module, flat)
            for parameter, piece in layer.views(flat):
                piece.copy_(parameter.data)
            _put(layer.views(self._as_seen(flat)))
        if self._zero_copy:
            torch.cuda.empty_cache()
            self._stream = _Streamer([self._spilled[index] for index in self.plan.spilled])

    @property
    def _model(self) -> Built:
        assert self._built  # it isn't used after `release`
        return self._built

    def _as_seen(self, host: torch.Tensor) -> torch.Tensor:
        return self._zero_copy(host) if self._zero_copy else host

    def release(self) -> None:
        """Release every tensor."""
        self._built = self._stream = None
        for store in (self._spilled, self._inputs, self._reference):
            store.clear()

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
        return partial(self._forward_streamed if scenario == "streamed" else self._forward, copied)

    def _input(self, rows: int) -> torch.Tensor:
        if rows not in self._inputs:
            made = self._random_input(rows)
            host = torch.empty(made.shape, dtype=made.dtype, pin_memory=self._zero_copy is not None)
            self._inputs[rows] = host.copy_(made)
        return self._inputs[rows]

    def _random_input(self, rows: int) -> torch.Tensor:
        shape, draw = self.plan.shape, self._generator
        if self._model.vocabulary:
            return torch.randint(0, self._model.vocabulary, (rows, shape.tokens), generator=draw)
        size = (rows, shape.width) if shape.tokens == 1 else (rows, shape.tokens, shape.width)
        return torch.randn(size, generator=draw).to(getattr(torch, shape.dtype))

    def input_bytes(self, rows: int) -> int:
        """Bytes of one input."""
        host = self._input(rows)
        return int(host.numel() * host.element_size())

    def _forward(self, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model.call(source())

    def _forward_streamed(self, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._stream is None:
            return self._forward(source)
        # the input first: after copies of weights it would delay layers that could already run
        taken = source()
        with self._stream:
            return self._forward(lambda: taken)

    def difference(self, scenario: Scenario, rows: int) -> float:
        """Run once; largest absolute difference from the resident output, over the largest output."""
        output = self.passes(scenario, rows)()
        assert isinstance(output, torch.Tensor)
        found = output.float().cpu()
        if scenario == "resident":
            self._reference[rows] = found
        reference = self._reference[rows]
        return float((found - reference).abs().max() / reference.abs().max())

    def split(self, scenario: Scenario, rows: int) -> Split | Unknown:
        """How one pass spends its time, by events in a separate pass.

        Unknown where the device runs the pass while it is still being handed over: its waits for the host
        would count as waits for copies, or as computing.
        """
        if not self._zero_copy:
            return Unknown("no device clock")
        run = self.passes(scenario, rows)
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        handing_s = time.perf_counter() - began
        return self._split(scenario, rows, lead_s=LEAD_MARGIN * handing_s)

    def _split(self, scenario: Scenario, rows: int, *, lead_s: float) -> Split | Unknown:
        host = self._input(rows)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        resident = host.to(self._device)
        left = self._as_seen(host) if scenario == "zero_copy_all" else resident

        def source() -> torch.Tensor:
            copies = scenario in ("zero_copy_weights", "streamed")
            taken = host.to(self._device, non_blocking=True) if copies else left
            marks[1].record()
            return taken

        run = self._forward_streamed if scenario == "streamed" else self._forward
        torch.cuda.synchronize()
        self._wait(lead_s)  # so the time excludes handing the pass over
        marks[0].record()
        run(source)
        ahead = not marks[0].query()
        marks[2].record()
        torch.cuda.synchronize()
        if not ahead:
            return Unknown("host-bound: the device ran the pass faster than it was handed over")
        input_s, rest_s = (a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
        copy_s, wait_s = self._stream.times_s() if scenario == "streamed" and self._stream else (0.0, 0.0)
        return Split(input_s + copy_s, wait_s, rest_s - wait_s)


Marks = list[tuple[torch.cuda.Event, torch.cuda.Event]]


class _Streamer:
    """Copies spilled layers, in order, into two buffers in turn on a separate stream; one pass at a time.

    A buffer is overwritten only after the compute stream has used it, and used only after its copy has
    ended; both waits are on the device, the host never waits.
    """

    def __init__(self, layers: list[_Layer]) -> None:
        self._layers = layers
        size = max(layer.flat.numel() for layer in layers)
        buffers = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(STREAM_BUFFERS)]
        self._slots = [buffers[i % STREAM_BUFFERS] for i in range(len(layers))]
        self._placed = [layer.views(slot) for layer, slot in zip(layers, self._slots, strict=True)]
        self._home = [[(p, p.data) for p in layer.module.parameters()] for layer in layers]
        self._copies = torch.cuda.Stream()
        self._arrived, self._used = ([torch.cuda.Event() for _ in buffers] for _ in range(2))
        self._copying, self._waiting = (self._marks() for _ in range(2))
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sent = self._taken = 0

    def _marks(self) -> Marks:
        def mark() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True)

        return [(mark(), mark()) for _ in self._layers]

    def __enter__(self) -> None:
        """Start a pass: its copies come after everything that the compute stream holds, a timer included."""
        self._copies.wait_stream(torch.cuda.current_stream())
        self._sent = self._taken = 0
        for _ in range(STREAM_BUFFERS):
            self._send()
        for layer in self._layers:
            self._hooks.append(layer.module.register_forward_pre_hook(self._take))
            self._hooks.append(layer.module.register_forward_hook(self._give_back))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for placed in self._home:
            _put(placed)

    def _send(self) -> None:
        index = self._sent
        if index == len(self._layers):
            return
        slot = index % STREAM_BUFFERS
        flat = self._layers[index].flat
        with torch.cuda.stream(self._copies):
            if index >= STREAM_BUFFERS:
                self._copies.wait_event(self._used[slot])
            began, ended = self._copying[index]
            began.record()
            self._slots[index][: flat.numel()].copy_(flat, non_blocking=True)
            ended.record()
            self._arrived[slot].record()
        self._sent += 1

    def _take(self, _module: nn.Module, _args: object) -> None:
        """Before a spilled layer runs: its weights are those in its buffer."""
        began, ended = self._waiting[self._taken]
        began.record()
        torch.cuda.current_stream().wait_event(self._arrived[self._taken % STREAM_BUFFERS])
        ended.record()
        _put(self._placed[self._taken])

    def _give_back(self, _module: nn.Module, _args: object, _output: object) -> None:
        """After it has run: its buffer is refilled."""
        self._used[self._taken % STREAM_BUFFERS].record()
        self._taken += 1
        self._send()

    def times_s(self) -> tuple[float, float]:
        """Seconds of copying and of waiting in the last pass, which has ended."""
        copy_s, wait_s = (
            sum(began.elapsed_time(ended) for began, ended in marks) / 1e3
            for marks in (self._copying, self._waiting)
        )
        return copy_s, wait_s
