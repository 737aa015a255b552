"""While a block computes on the CPU, nobody begins copies: those for the next blocks are begun before."""

import torch
from late_lanes import LateLanes
from random_models import plan_of
from torch import nn

from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.weight_sources import ModuleWeights, WeightSource
from probes.placement.types import PrefetchPool

torch.set_num_threads(1)
WIDTH = 64


class Logged(nn.Linear):
    """A layer that says when it computes."""

    log: list[str]

    def forward(self, x):
        self.log.append("cpu begins")
        found = super().forward(x)
        self.log.append("cpu ends")
        return found


class LoggedLanes(LateLanes):
    """Copies are done as late as the marks allow, so what is logged is only that they were begun."""

    def __init__(self, log):
        super().__init__(1)
        self.laziness = 1.0
        issue = self.copy.run

        def run(work):
            log.append("copy begins")
            issue(work)

        self.copy.run = run


class SlowWire(WeightSource):
    """From a file that is read only after some time."""

    read = False
    sent_before_ready = 0

    def ready(self):
        return self.read

    def send(self, target, lane):
        self.sent_before_ready += not self.read
        super().send(target, lane)


class FromDisk(ModuleWeights):
    """A module's own values, as if they came from a file."""

    def __init__(self):
        super().__init__()
        self.wires = []

    def weight_source(self, stored, _lanes):
        flat = torch.empty(stored.n_bytes, dtype=torch.uint8)
        for item in stored.items:
            item.raw(flat).copy_(item.entry.parameter.detach())
        self.wires.append(SlowWire(flat))
        return self.wires[-1]

    def fill(self, entry, target):
        if entry.parameter.numel():
            super().fill(entry, target)


def placed(tiers, log, source):
    torch.manual_seed(0)
    layers = [(Logged if tier == "cpu" else nn.Linear)(WIDTH, WIDTH) for tier in tiers]
    for layer in layers:
        layer.log = log
    model = nn.Sequential(*layers).eval().requires_grad_(False)
    x = torch.randn(2, WIDTH)
    want = model(x)
    lanes = LoggedLanes(log)
    named = {str(i): tier for i, tier in enumerate(tiers)}
    plan = plan_of(model, named, PrefetchPool(slots=2, ahead=2))
    handle = place_model(model, plan, source, lanes, work=PackedOperations(reads=lanes.reads))
    lanes.engine = handle._engine
    return model, x, want, handle


def test_copies_for_the_next_blocks_are_begun_before_the_cpu_computes():
    log = []
    model, x, want, handle = placed(["streamed", "cpu", "streamed", "streamed", "cpu"], log, ModuleWeights())
    with torch.inference_mode():
        for _ in range(3):
            log.clear()
            assert torch.equal(model(x), want)
            first, last = log.index("cpu begins"), len(log) - 1 - log[::-1].index("cpu begins")
            # two slots are full: of blocks 2 and 3, then of block 0 of the next pass, which came free with 2
            assert "copy begins" in log[:first]
            assert "copy begins" not in log[first : log.index("cpu ends")]
            assert log[last:] == ["cpu begins", "cpu ends"]
    handle.remove()


def test_what_was_read_from_disk_since_the_last_block_is_copied_before_the_cpu_computes():
    """A copy that can't be begun when a block ends was begun only by the next block, after the CPU's."""
    log, source = [], FromDisk()
    model, x, want, handle = placed(["streamed", "cpu", "disk", "streamed", "streamed"], log, source)
    (wire,) = source.wires
    model[1].register_forward_pre_hook(lambda *_: setattr(wire, "read", True))
    model[2].register_forward_pre_hook(lambda *_: setattr(wire, "read", False))
    with torch.inference_mode():
        for _ in range(3):
            log.clear()
            assert torch.equal(model(x), want)
            assert "copy begins" in log[: log.index("cpu begins")]
            assert wire.sent_before_ready == 0
    handle.remove()
