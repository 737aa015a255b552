"""The child's side of a worker process, for every kind of job; `supervisor` is the parent's side.

A worker has the arguments FD and PARENT. It imports what takes seconds, reads one job (a line of JSON on
stdin) and writes its messages to the descriptor FD as lines of JSON, each at once: a crash loses none
before it. The parent answers each with an empty line on stdin. The last message is Done or Failed.
Libraries may print what they like on stdout and stderr.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import NoReturn, TypeVar

from probes.core.codec import decode, encode, load
from probes.core.errors import DeviceUnusable
from probes.core.output import flush
from probes.records.schema import Done, Failed

Send = Callable[[object], bool]  # writes a message; False when nobody reads any more
JobT = TypeVar("JobT")

MOST_WORDS = 300  # characters of an error
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def work(
    argv: list[str],
    shape: type[JobT],
    messages: Callable[[JobT, Send], Iterator[object]],
    *,
    preload: Callable[[], None],
) -> int:
    """Do the job on stdin; returns 0 when a last message was written, of any kind.

    `messages` does the job and yields what is sent; it may also send by itself. `preload` imports what the
    job needs, before there is one.
    """
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

        def send(message: object) -> bool:
            """Wait until it is on disk: no case is lost but the one under way, and nothing is written while
            something is measured. An end of file is a dead parent.
            """
            out.write(json.dumps({"message": encode(message)}, allow_nan=False) + "\n")
            out.flush()
            return isinstance(message, Done | Failed) or bool(sys.stdin.readline())

        for message in messages(job, send):
            if not send(message):
                return 1
    return 0


def exit_now(code: int) -> NoReturn:
    """End this process at once: all is sent, and torch's own end takes a second or more, in each process."""
    flush()
    os._exit(code)


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies: else it would hold the GPU, with no reader."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


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
