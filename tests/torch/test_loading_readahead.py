"""Blocks read ahead from files: right bytes in any order, and no buffer overwritten before its copy."""

import random
import threading
import time
from functools import partial

import pytest
import torch

from probes.core.errors import CheckpointUnreadable
from probes.placement.read_ahead import FileSource, ReadAhead, ReadBuffer
from probes.placement.runtime.streams import Streams

SIZE = 64


class LateMark:
    """Reached when the copy before it has been made."""

    def __init__(self):
        self.event = threading.Event()

    def reached(self):
        return self.event.is_set()

    def block(self):
        assert self.event.wait(60), "the buffer was never copied"


class LateLane:
    """Copies are made when another thread gets to them, as by a device."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.items = []
        self.arrived = threading.Condition()
        self.ended = False
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def run(self, work):
        self._add(work)

    def record(self, mark):
        mark.event.clear()
        self._add(mark.event.set)

    def wait(self, mark):
        raise AssertionError("nothing to wait for")

    def _add(self, item):
        with self.arrived:
            self.items.append(item)
            self.arrived.notify()

    def _work(self):
        while True:
            with self.arrived:
                while not self.items and not self.ended:
                    self.arrived.wait()
                if not self.items:
                    return
                item = self.items.pop(0)
            threading.Event().wait(self.random.choice([0, 0, 0.0005]))
            item()

    def finish(self):
        with self.arrived:
            self.ended = True
            self.arrived.notify()
        self.thread.join()


def blocks(ahead, count, reads):
    def fill(number, target):
        reads.append(number)
        target.fill_(number)

    return [FileSource(ahead, SIZE - number % 3, partial(fill, number)) for number in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_every_block_arrives_whole_whatever_was_announced(seed):
    draw = random.Random(seed)
    lane, reads = LateLane(seed), []
    ahead = ReadAhead(
        [ReadBuffer(torch.zeros(SIZE, dtype=torch.uint8), LateMark()) for _ in range(draw.randint(1, 3))]
    )
    wires = blocks(ahead, 6, reads)
    sent = []
    for _ in range(60):
        for number in draw.choices(range(6), k=draw.randint(0, 4)):
            wires[number].announce()
        called = draw.randrange(6)
        target = torch.zeros(SIZE, dtype=torch.uint8)
        wires[called].send(target, lane)
        sent.append((called, target))
    lane.finish()
    ahead.close()
    for called, target in sent:
        n_bytes = wires[called].n_bytes
        assert target[:n_bytes].eq(called).all()
        assert not target[n_bytes:].any()


def test_an_announced_block_is_read_once_and_before_its_call():
    lanes, reads = Streams(), []
    ahead = ReadAhead([ReadBuffer(torch.zeros(SIZE, dtype=torch.uint8), lanes.event()) for _ in range(2)])
    wires = blocks(ahead, 3, reads)
    wires[2].announce()
    wires[2].announce()
    ends = time.monotonic() + 60
    while not wires[2].ready():
        assert time.monotonic() < ends
        time.sleep(0.001)
    wires[2].send(torch.zeros(SIZE, dtype=torch.uint8), lanes.copy)
    assert (reads, ahead.late) == ([2], 0)
    ahead.close()


def test_a_block_that_cannot_be_read_is_an_error_of_its_call_and_the_buffer_is_usable_again():
    lanes = Streams()
    ahead = ReadAhead([ReadBuffer(torch.zeros(SIZE, dtype=torch.uint8), lanes.event())])

    def fail(_target):
        raise CheckpointUnreadable("model.safetensors can't be read: Input/output error")

    broken, good = FileSource(ahead, SIZE, fail), blocks(ahead, 5, [])[4]
    broken.announce()
    target = torch.zeros(SIZE, dtype=torch.uint8)
    with pytest.raises(CheckpointUnreadable, match="Input/output error"):
        broken.send(target, lanes.copy)
    good.send(target, lanes.copy)
    assert target[: good.n_bytes].eq(4).all()
    ahead.close()
