"""How long each block of a placed model takes in one pass: its copies, its unpacking, its calls."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from probes.placement.models.modules import Block
from probes.placement.planner.refinement import BlockTime
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.hooks import ForwardHook
from probes.placement.runtime.origins import ParameterOrigins
from probes.placement.runtime.streams import Stopwatches


@dataclass(eq=False)
class BlockTimes:
    """The calls of every block during one pass, and the steps that bring weights.

    Where everything is done in the calling thread, other blocks' steps within a call aren't counted with it.
    """

    engine: Engine
    watches: Stopwatches
    calls: dict[str, list[tuple[Any, Any, float, float]]] = field(default_factory=dict)

    def call(self, name: str, work: Callable[[], Any]) -> Any:
        """Time a call of a block."""
        streams = self.engine.streams
        begin, end = streams.stopwatch(), streams.stopwatch()
        streams.compute.record(begin)
        begun, before = time.perf_counter(), self._brought_s()
        output = work()
        host_s, brought_s = time.perf_counter() - begun, self._brought_s() - before
        streams.compute.record(end)
        self.calls.setdefault(name, []).append((begin, end, host_s, brought_s))
        return output

    @property
    def _in_thread(self) -> bool:
        return bool(self.engine.streams.device.type == "cpu")

    def _brought_s(self) -> float:
        return sum(map(self.watches.seconds, ("copy", "unpack"))) if self._in_thread else 0.0

    def seen(self) -> dict[str, BlockTime]:
        """By block, once all streams are done."""
        by_block = {what: self.watches.by_block(what) for what in ("copy", "unpack", "wait")}
        result = {}
        for name in self.calls.keys() | by_block["copy"].keys() | by_block["unpack"].keys():
            copied, unpacked, waited = (by_block[what].get(name, 0.0) for what in by_block)
            spans = sum(
                self.engine.streams.seconds(begin, end) - brought_s
                for begin, end, _, brought_s in self.calls.get(name, ())
            )
            if not self._in_thread:
                spans -= waited + unpacked
            host_s = 0.0 if self._in_thread else sum(host_s for *_, host_s, _ in self.calls.get(name, ()))
            result[name] = BlockTime(copied, unpacked, max(spans, 0.0), host_s)
        return result


class _TimedHook(ForwardHook):
    """The forward of a block's module, timed."""

    def __init__(self, forward: Callable[..., Any], times: BlockTimes, name: str) -> None:
        super().__init__(forward)
        self._times, self._name = times, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call."""
        return self._times.call(self._name, partial(self.forward, *args, **kwargs))


@contextmanager
def timed_blocks(engine: Engine, blocks: Sequence[Block]) -> Iterator[BlockTimes]:
    """Time the blocks' calls and the engine's steps meanwhile."""
    hooks = ParameterOrigins()
    with engine.watched() as watches:
        times = BlockTimes(engine, watches)
        try:
            for block in blocks:
                for module in block.modules:
                    hooks.add_hook(module, partial(_TimedHook, times=times, name=block.name))
            yield times
        finally:
            hooks.remove_hooks()
