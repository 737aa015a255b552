"""A small model and its samples, as a user has them, with faults that a test plants by WEIR_PLANT.

WEIR_PLANT is JSON: what is planted, on which rank, from which step on (the first is 1), and for how long.
"""

import json
import os
import random
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

PLANT = json.loads(os.environ.get("WEIR_PLANT", "{}"))
RANK = int(os.environ.get("RANK", "0"))
WIDTH, CLASSES = 32, 4
BROKEN = 50  # the number of a sample


def planted(kind, step=None):
    """Whether this is planted on this rank, in this step."""
    here = PLANT.get("kind") == kind and PLANT.get("rank", RANK) == RANK
    return here and (step is None or step >= PLANT.get("step", 1))


class Own:
    """Seconds that a step takes without what is planted: the most that a rank computes, and the exchange.

    Of the exchange the least of all ranks counts, since others wait. What is planted lasts so many times as
    long: it is the step's largest part however busy the machine is, and the same on all ranks that have it.
    """

    LEAST_S = 0.01
    BATCH = 4

    def __init__(self):
        self.most = 0.0
        self._now = self._planted = 0.0  # since gradients left the last time
        self._exchange = 0.0
        self._since = None
        self.taken = 0  # samples, in this process

    def begins(self):
        """It computes from now on."""
        self._since = time.perf_counter()

    def ends(self):
        """It asks for samples, or its gradients leave."""
        if self._since is not None:
            self._now += time.perf_counter() - self._since
            self._since = None

    def exchange(self, gradients):
        """Exchange gradients, and before them what ranks computed since the last time."""
        self.ends()
        both = torch.tensor([self._now - self._planted, -self._exchange])
        self._now = self._planted = 0.0
        distributed.all_reduce(both, distributed.ReduceOp.MAX)
        self.most = float(both[0] - both[1])
        left = time.perf_counter()
        distributed.all_reduce(gradients.div_(distributed.get_world_size()))
        self._exchange = time.perf_counter() - left
        if planted("link"):
            self.plant()
        self.begins()

    def plant(self, share=1.0):
        """Sleep for this share of what is planted in a step."""
        begun = time.perf_counter()
        time.sleep(share * PLANT["times"] * max(self.most, self.LEAST_S))
        self._planted += time.perf_counter() - begun if self._since is not None else 0.0


OWN = Own()


class Model(torch.nn.Module):
    """Two layers with dropout, whose numbers a resumed run has to draw again."""

    def __init__(self):
        super().__init__()
        width = PLANT.get("width", WIDTH)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, width),
            torch.nn.Dropout(0.3),
            torch.nn.ReLU(),
            torch.nn.Linear(width, CLASSES),
        )
        self.step = 0

    def forward(self, x):
        self.step += 1
        OWN.begins()
        if planted("kill", self.step):
            os.kill(os.getpid(), signal.SIGKILL)
        if planted("stop", self.step):
            os.kill(os.getpid(), signal.SIGSTOP)
        if planted("hang", self.step):
            time.sleep(3600)
        time.sleep(PLANT.get("pace", 0.0))
        if PLANT.get("kind") == "usr1" and PLANT["rank"] == RANK and self.step == PLANT["step"]:
            os.kill(os.getpid(), signal.SIGUSR1)
        if planted("memory", self.step):
            torch.empty(1 << 50)
        if planted("full", self.step):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        if planted("straggler"):
            OWN.plant()
        if planted("ahead") and self.step == PLANT["step"]:
            while Path(PLANT["taken"]).stat().st_size <= Samples().count:
                time.sleep(0.01)
        if planted("loader_killed") and self.step == 1:
            Path(PLANT["begun"]).touch()
            _wait_for(lambda: _has_ended(Path(PLANT["pid"])))
        if planted("mute", self.step):
            raise Mute
        if planted("wrong", self.step):
            raise KeyError("no such column")
        return self.layers(x) * (float("nan") if planted("nan", self.step) else 1.0)


def _wait_for(state):
    until = time.monotonic() + 60
    while not state():
        assert time.monotonic() < until
        time.sleep(0.01)


def _has_ended(pid):
    """Whether the child whose number this file has was ended, all its threads, and its parent was told."""
    number = pid.read_text() if pid.exists() else ""
    return number and os.waitid(os.P_PID, int(number), os.WEXITED | os.WNOWAIT | os.WNOHANG)


class Mute(Exception):
    """One that has no text."""

    def __str__(self):
        raise TypeError("no text")


class Streamed(IterableDataset):
    """Samples without numbers."""

    def __len__(self):
        return 96

    def __iter__(self):
        return iter(Samples())


class Samples(Dataset):
    """Inputs and labels by their numbers."""

    def __init__(self, count=96):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        OWN.ends()
        if planted("loader"):
            OWN.plant(1 / OWN.BATCH)
        if planted("ahead"):
            with Path(PLANT["taken"]).open("a") as taken:
                taken.write(".")
        if planted("sample") and number == BROKEN:
            raise ValueError("sample 50 is\nbroken")
        if planted("shm"):
            Path(PLANT["pid"]).write_text(str(os.getpid()))
            if PLANT["how"] == "waits":
                time.sleep(3600)
            raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")
        if planted("loader_killed"):
            OWN.taken += 1
            if OWN.taken == 6:  # of the second batch, which is made while the first one is computed
                _wait_for(Path(PLANT["begun"]).exists)
                Path(PLANT["pid"]).write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
        if PLANT.get("draws"):  # as augmentations do
            return torch.full((WIDTH,), random.random() + numpy.random.rand()), number % CLASSES
        generator = torch.Generator().manual_seed(number)
        return torch.randn(WIDTH, generator=generator), number % CLASSES


def model():
    """What --model names."""
    if planted("forks"):
        child = os.fork()
        if not child:
            raise KeyError("in a child")
        os.waitpid(child, 0)
    if planted("loader_killed"):
        list(DataLoader(range(2), num_workers=1))  # after one of the user's own
    if planted("moves"):
        os.chdir("/")
    if planted("shm"):
        os.statvfs = lambda _: SimpleNamespace(f_bavail=3, f_frsize=1024)
    if PLANT.get("kind") in ("loader", "straggler", "link"):
        _watched_link()
    return Model()


def samples():
    """What --data names."""
    return Samples()


def streamed():
    """Samples that come one after another."""
    return Streamed()


def uneven():
    """Fewer on rank 1."""
    return Samples(96 - RANK)


def _watched_link():
    """Have OWN exchange gradients when all are made, so that nothing of it is hidden behind computing."""
    plain = DistributedDataParallel.__init__

    def exchange(_, bucket):
        exchanged = torch.futures.Future()

        def now():
            OWN.exchange(bucket.buffer())
            exchanged.set_result(bucket.buffer())

        torch.autograd.Variable._execution_engine.queue_callback(now)  # DDP's wait for it comes after it
        return exchanged

    def watched(self, *args, **how):
        plain(self, *args, **how)
        self.register_comm_hook(None, exchange)

    DistributedDataParallel.__init__ = watched
