"""Lanes that put work off for as long as the marks allow, or do it as soon as they allow."""

import random

import torch


class Stale(AssertionError):
    """A tensor changed while the compute lane was still to read it."""


class LateMark:
    """Recorded at a place of a lane. A wait means the place at that moment."""

    def __init__(self):
        self.place = None

    def reached(self):
        return self.place is None or self.place[0].done > self.place[1]

    def block(self):
        if self.place is not None:
            self.place[0].drain_to(self.place[1])


class LateLane:
    def __init__(self, lanes):
        self.streams, self.items, self.done, self.runs = lanes, [], 0, 0

    def _add(self, kind, what):
        self.items.append((kind, what))
        self.streams.stir()

    def run(self, work):
        self.runs += 1
        if not self.streams.muted:
            self._add("run", work)

    def record(self, mark):
        if not self.streams.muted:
            mark.place = (self, len(self.items))
            self._add("record", None)

    def wait(self, mark):
        if mark.place is not None and not self.streams.muted:
            self._add("wait", mark.place)

    def follow(self):
        """There is one stream for the caller."""

    def step(self):
        """Do one item, if that is possible."""
        if self.done >= len(self.items):
            return False
        kind, what = self.items[self.done]
        if kind == "wait" and what[0].done <= what[1]:
            return False
        if kind == "run":
            what()
        self.items[self.done] = ("gone", None)
        self.done += 1
        return True

    def drain_to(self, index):
        while self.done <= index:
            if not self.step():
                lane, place = self.items[self.done][1]
                lane.drain_to(place)

    def drain(self):
        self.drain_to(len(self.items) - 1)


class Again:
    """A recorded pass. As with a graph, recording does nothing; a replay must hand over what was recorded."""

    def __init__(self, lanes, work):
        self.streams, self.work = lanes, work
        self.learned, self.before = lanes.learned(), lanes.engine.state()
        lanes.muted = True
        try:
            self.recorded, self.outputs = self._counted()
        finally:
            lanes.muted = False

    def _counted(self):
        lanes = (self.streams.copy, self.streams.unpack, self.streams.compute)
        begun = [lane.runs for lane in lanes]
        outputs = self.work()
        return [lane.runs - begin for lane, begin in zip(lanes, begun, strict=True)], outputs

    def _join(self, before, after):
        """What a graph does at its beginning and its end."""
        for lane in before:
            mark = LateMark()
            lane.record(mark)
            for other in after:
                other.wait(mark)

    def replay(self):
        now = self.streams.learned(self.learned)
        engine = self.streams.engine
        engine.order.before, engine.order.last = (
            self.before.order
        )  # a graph does the same wherever passes are
        engine._copies.resume(self.before.copies)
        self._join([self.streams.compute], [self.streams.copy, self.streams.unpack])
        for buffer in self.streams.engine.buffers:
            buffer.forget()  # a graph waits for nothing that was done before it was recorded
        self.streams.engine.recording = True  # a graph runs no Python: nothing in it is recorded
        runs, self.outputs = self._counted()
        self.streams.engine.recording = False
        self._join([self.streams.copy, self.streams.unpack], [self.streams.compute])
        self.streams.learned(now)
        assert runs == self.recorded, "the pass isn't the one that was recorded"
        self.streams.replayed += 1


class LateLanes:
    """The model computes on the host at once, so a call first does what it may rely on. Later, at a moment of
    the lanes' choice, its weights must be there still: that is when a device would read them."""

    def __init__(self, seed):
        self.device = torch.device("cpu")
        self.random = random.Random(seed)
        self.copy, self.unpack, self.compute = (LateLane(self) for _ in range(3))
        self.laziness = self.random.choice([0.1, 0.3, 0.6, 0.9, 1.0])
        self.checked = self.replayed = self.ended = self.passes_recorded = 0
        self.muted = False
        self.records = True

    def learned(self, tables=None):
        """What the engine knows of the order of blocks; with `tables`, it knows that. A graph doesn't ask."""
        order = self.engine.order
        before = dict(order._next), set(order._doubted)
        if tables is not None:
            order._next, order._doubted = dict(tables[0]), set(tables[1])
        return before

    def event(self):
        return LateMark()

    def refused_allocations(self):
        return 0

    def stir(self):
        while self.random.random() > self.laziness:
            if (
                not self.random.choice([self.copy, self.unpack, self.compute]).step()
                and self.random.random() < 0.3
            ):
                break

    def product(self, linear):
        """`linear` of few rows with packed weights. While a pass is recorded nothing is there to be read."""

        def computed(x, packed, bias):
            if x.shape[0] > 2:
                return None
            return x.new_zeros(*x.shape[:-1], packed.shape[0]) if self.muted else linear(x, packed, bias)

        return computed

    def reads(self, name, tensors):
        if self.muted:
            return
        self.compute.drain()
        snapshot = [tensor.clone() for tensor in tensors]

        def check():
            self.checked += 1
            for now, then in zip(tensors, snapshot, strict=True):
                if not torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (now, then))):
                    raise Stale(name)

        self.compute.items.append(("run", check))

    def use(self, memory):
        self.used = memory

    def finish(self):
        for lane in (self.copy, self.unpack, self.compute):
            lane.drain()

    def record(self, work, *, beside):
        return Again(self, work)

    def bundled(self, work, written):
        return work

    def end_stream(self):
        self.ended += 1

    def forget(self):
        pass

    def stopwatch(self):
        return LateMark()

    def seconds(self, begin, end):
        assert begin.reached()
        assert end.reached()
        return 1e-3
