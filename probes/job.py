"""The worker's side: `python -m probes.job FD PARENT` reads one job from stdin and does it.

Records go to the descriptor FD as JSON lines, each written at once: a crash loses none before it.
Libraries may say what they like on stdout and stderr.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from probes.catalog import PROBES, Context
from probes.codec import decode, encode
from probes.errors import DeviceUnusable, ProbeError
from probes.report import Done, Failed, Machine, Record, Settings, TorchFacts

DESCRIBE = "describe"  # not a probe: tells TorchFacts
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Told = Record | TorchFacts
Message = Told | Done | Failed


@dataclass(frozen=True)
class Job:
    """What a worker is to do: a probe's name, or DESCRIBE, for which there is no machine yet."""

    probe: str
    settings: Settings
    machine: Machine | None


@dataclass(frozen=True)
class Line:
    """One line of the pipe."""

    message: Message


def messages(job: Job) -> Iterator[Message]:
    """Do the job, telling what it finds; the last message is Done or Failed. Imports torch."""
    try:
        if job.machine is None:
            yield _describe()
        else:
            yield from _probe(job, job.machine)
        yield Done()
    except ProbeError as error:
        yield Failed(error.message, error.hint, int(error.exit_code), wedged=False)


def _describe() -> TorchFacts:
    try:
        from probes import device
    except (ImportError, OSError) as error:  # OSError: a library that torch links against is missing
        raise DeviceUnusable(
            f"torch can't be imported: {error}", "run the probes in an image that holds torch"
        ) from error
    return device.describe()


def _probe(job: Job, machine: Machine) -> Iterator[Record]:
    from probes import device

    context = Context(job.settings, machine, Path("/"))
    probe = next(probe for probe in PROBES if probe.name == job.probe)
    bench = device.TorchWorkbench(has_gpu=not context.torch.obstacle)
    yield from probe.run(bench, context)


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies: nobody would read it, and it holds the GPU."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


def write(out: TextIO, message: Message) -> None:
    """One line, out of our hands when this returns."""
    out.write(json.dumps(encode(Line(message)), allow_nan=False) + "\n")
    out.flush()


def main(argv: list[str]) -> int:
    """Do the job on stdin; returns 0 when a last message was written, whatever it says."""
    descriptor, parent = int(argv[0]), int(argv[1])
    die_with(parent)
    job = decode(Job, json.load(sys.stdin), "job")
    with open(descriptor, "w", encoding="utf-8") as out:
        for message in messages(job):
            write(out, message)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
