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
        self.lanes, self.items, self.done = lanes, [], 0

    def _add(self, kind, what):
        self.items.append((kind, what))
        self.lanes.stir()

    def run(self, work):
        self._add("run", work)

    def record(self, mark):
        mark.place = (self, len(self.items))
        self._add("record", None)

    def wait(self, mark):
        if mark.place is not None:
            self._add("wait", mark.place)

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


class LateLanes:
    """The model computes on the host at once, so a call first does what it may rely on. Later, at a moment of
    the lanes' choice, its weights must be there still: that is when a device would read them."""

    def __init__(self, seed):
        self.device = torch.device("cpu")
        self.random = random.Random(seed)
        self.copy, self.unpack, self.compute = (LateLane(self) for _ in range(3))
        self.laziness = self.random.choice([0.1, 0.3, 0.6, 0.9, 1.0])
        self.checked = 0

    def mark(self):
        return LateMark()

    def stir(self):
        while self.random.random() > self.laziness:
            if (
                not self.random.choice([self.copy, self.unpack, self.compute]).step()
                and self.random.random() < 0.3
            ):
                break

    def reads(self, name, tensors):
        self.compute.drain()
        snapshot = [tensor.clone() for tensor in tensors]

        def check():
            self.checked += 1
            for now, then in zip(tensors, snapshot, strict=True):
                if not torch.equal(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8)):
                    raise Stale(name)

        self.compute.items.append(("run", check))

    def finish(self):
        for lane in (self.copy, self.unpack, self.compute):
            lane.drain()
