"""The worker's side: with the arguments FD and PARENT it reads one job, a line of stdin, and does it.

Records go to the descriptor FD as JSON lines, each written at once: a crash loses none before it. The answer
to each is an empty line on stdin.
Libraries may say what they like on stdout and stderr.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NoReturn, TextIO, TypeVar

from probes.core.codec import decode, encode, load
from probes.core.errors import DeviceUnusable, ProbeError
from probes.core.output import flush
from probes.hardware import numa
from probes.hardware.snapshot import pci_id_of_first_gpu
from probes.measure.background_load import Bystanders, judge
from probes.measure.catalog import PROBES, Context
from probes.records.facts import Check, Machine, TorchFacts
from probes.records.rows import Measurement, Pass, Reads, Record, Small
from probes.records.schema import Done, Failed, Settings

MOST_WORDS = 300  # characters of its error


def require_torch(way_out: str) -> None:
    """Import torch. Raises DeviceUnusable where that fails."""
    if why := why_without():
        raise DeviceUnusable(f"torch can't be imported: {why}", way_out)


@cache
def why_without() -> str:
    """Why torch can't be imported; empty once it is. A second try would fail for what the first one left."""
    try:
        torch = importlib.import_module("torch")
        _ = torch.Tensor, torch.nn  # an empty folder of that name can be imported, too
    except (ImportError, OSError) as error:  # OSError: a library that torch links against is missing
        return str(error)[:MOST_WORDS]
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:MOST_WORDS]
    return ""


J = TypeVar("J")

DESCRIBE = "describe"  # not a probe: reports TorchFacts
CHECK = "check"  # nor this: tries claims about the card
UNASKED = Settings(quick=True, seed=0, vram_cap_bytes=None)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Turn:
    """The worker pauses, and lets the other side of a run in turns measure until it is answered."""

    tag: ClassVar[str] = "turn"


Aside = TorchFacts | Check | Small | Turn  # no records of a report
Told = Record | Aside
Message = Told | Done | Failed


@dataclass(frozen=True)
class Job:
    """What a worker is to do: a probe's name, or DESCRIBE or CHECK, which need nothing else."""

    probe: str
    settings: Settings = UNASKED
    machine: Machine | None = None
    done: tuple[str, ...] = ()  # the probe's cases that need not be measured again
    beside: int = 0  # the process of the other side, where two measure in turns


@dataclass(frozen=True)
class Line:
    """One line of the pipe."""

    message: Message


Tell = Callable[[object], bool]  # sends a message; False when nobody reads any more


def messages(job: Job, tell: Tell) -> Iterator[Message]:
    """Do the job, sending what it finds; the last message is Done or Failed. Imports torch."""
    try:
        require_torch("run the probes in an image that holds torch")
        if job.probe == CHECK:
            yield from _torchfacts().checks()
        elif job.machine is None:
            yield _torchfacts().describe()
        else:
            yield from _probe(job, job.machine, tell)
        yield Done()
    except ProbeError as error:
        yield Failed(error.message, error.hint, int(error.exit_code), wedged=False)


def _torchfacts() -> ModuleType:
    from probes.hardware import torch_build

    return torch_build


def _probe(job: Job, machine: Machine, tell: Tell) -> Iterator[Record | Small]:
    from probes.measure import device

    context = Context(job.settings, machine, Path("/"), frozenset(job.done))
    probe = next(probe for probe in PROBES if probe.name == job.probe)
    held = job.settings.numa == "gpu"
    if held:
        numa.hold_to_gpu(machine)
    hand_over = partial(_hand_over, tell) if job.beside else None
    bench = device.TorchWorkbench(has_gpu=not context.torch.obstacle, hand_over=hand_over)
    pinned, pageable = bench.numa_nodes()
    yield numa.places(machine, pinned=pinned, pageable=pageable, held=held)
    pci_id = pci_id_of_first_gpu(context.torch, machine.cards, context.root)
    yield from watched(probe.run(bench, context), Bystanders(bench, context.root, pci_id, beside=job.beside))


def _hand_over(tell: Tell) -> None:
    """A pause in which the other side measures. Ends this process when nobody reads it any more."""
    if not tell(Turn()):
        sys.exit(1)


def watched(records: Iterator[Record | Small], watch: Bystanders) -> Iterator[Record | Small]:
    """The records, each timing with what else went on while it was taken."""
    before = watch.look()
    for record in records:
        if isinstance(record, Measurement | Reads | Pass):
            after = watch.look()
            yield replace(record, noise=judge(before, after))
            before = after
        else:
            yield record


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies: else it would hold the GPU, with no reader."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


def _preload() -> None:
    """Import torch before there is a job; an error is reported when there is one."""
    if not why_without():
        importlib.import_module("probes.measure.device")


def write(out: TextIO, message: object) -> None:
    """Writes one line, which is delivered when this returns."""
    out.write(json.dumps({"message": encode(message)}, allow_nan=False) + "\n")
    out.flush()


def work(
    argv: list[str],
    shape: type[J],
    messages: Callable[[J, Tell], Iterator[object]],
    *,
    preload: Callable[[], None],
) -> int:
    """Do the job on stdin; returns 0 when a last message was written, of any kind."""
    descriptor, parent = int(argv[0]), int(argv[1])
    die_with(parent)
    preload()
    gc.collect()
    gc.freeze()  # a collection takes 0.1 s where it looks at all that the imports have left
    line = sys.stdin.readline()
    if not line:  # there was no job
        return 0
    job = decode(shape, load(line), "job")
    with open(descriptor, "w", encoding="utf-8") as out:

        def tell(message: object) -> bool:
            """Wait until it is on disk: no case is lost but the one under way, and nothing is written while
            something is measured. An end of file is a dead parent.
            """
            write(out, message)
            return isinstance(message, Done | Failed) or bool(sys.stdin.readline())

        for message in messages(job, tell):
            if not tell(message):
                return 1
    return 0


def end(code: int) -> NoReturn:
    """End this process at once: all is sent, and torch's own end takes a second or more, in each process."""
    flush()
    os._exit(code)


if __name__ == "__main__":
    end(work(sys.argv[1:], Job, messages, preload=_preload))
