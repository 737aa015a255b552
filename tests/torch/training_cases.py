"""A small model and its samples, as a user has them, with faults that a test plants by WEIR_PLANT.

WEIR_PLANT is JSON: what is planted, on which rank, from which step on (the first is 1), and for how long.
"""

import json
import os
import resource
import signal
import time

import torch
from torch import distributed
from torch.utils.data import Dataset

PLANT = json.loads(os.environ.get("WEIR_PLANT", "{}"))
RANK = int(os.environ.get("RANK", "0"))
WIDTH, CLASSES = 32, 4


def planted(kind, step=None):
    """Whether this is planted on this rank, in this step."""
    here = PLANT.get("kind") == kind and PLANT.get("rank", RANK) == RANK
    return here and (step is None or step >= PLANT.get("step", 1))


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
            time.sleep(PLANT["seconds"])
        if planted("wrong", self.step):
            raise KeyError("no such column")
        return self.layers(x) * (float("nan") if planted("nan", self.step) else 1.0)


class Samples(Dataset):
    """Inputs and labels by their numbers."""

    def __len__(self):
        return 96

    def __getitem__(self, number):
        if planted("loader"):
            time.sleep(PLANT["seconds"])
        generator = torch.Generator().manual_seed(number)
        return torch.randn(WIDTH, generator=generator), number % CLASSES


def model():
    """What --model names."""
    if planted("link"):
        _slow_link(PLANT["seconds"])
    return Model()


def samples():
    """What --data names."""
    return Samples()


def _slow_link(seconds):
    """Gradients take longer on their way: an exchange ends so much later, and nobody is busy meanwhile."""
    quick = distributed.all_reduce

    def slow(tensor, *args, **how):
        work = quick(tensor, *args, **how)
        if not how.get("async_op"):
            return work
        future = work.get_future()

        class Late:
            def get_future(self):
                def late(done):
                    time.sleep(seconds)
                    return done.value()

                return future.then(late)

        return Late()

    distributed.all_reduce = slow
