"""Limits on what a process may allocate, and what it has taken: Linux's own, and torch's on a GPU.

RLIMIT_DATA counts private memory that the process could write to, touched or not: the heap and anonymous
maps, in whole pages (getrlimit(2), Linux 4.7 and later). The kernel refuses what goes beyond, so nothing else
on the host is at risk. It doesn't count files that are mapped, so the libraries are free.
"""

import ctypes
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from probes.fit.question import Verdict
from probes.shared.unknown import Unknown

# <malloc.h>: parameters of glibc's allocator
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
MAPPED_FROM: Final = 32 << 10  # bytes: larger blocks are maps of their own, and go back when freed
DATA_LIMIT: Final = (
    "The limit is RLIMIT_DATA: heap and anonymous maps in whole pages, touched or not, beyond those of the "
    "process before the model was built; one thread. Peaks are of resident memory without files, above the "
    "same beginning."
)
CGROUP_LIMIT: Final = (
    "The limit is a memory cgroup for each trial, as a container has it: pages that it is the first to "
    "write to, without swap; the kernel kills what needs more. One thread. Peaks are of resident memory "
    "without files, above those of the process before the model was built."
)
GPU_LIMIT: Final = (
    "The limit is torch's own (set_per_process_memory_fraction): what its allocator takes from the driver, "
    "in segments. Peaks are what it has handed out at once; the driver's context is in neither."
)
_REFUSED: Final = re.compile(
    r"can't allocate memory|bad_alloc|Cannot allocate memory|not enough memory"
    r"|could not create a (memory|primitive)",
    re.IGNORECASE,
)


def prepare() -> None:
    """Make this process's allocator give large blocks back, so that the peak is that of what is alive."""
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)  # glibc's; musl gives large blocks back anyway
    if mallopt is not None:
        for parameter, value in (
            (M_ARENA_MAX, 1),
            (M_MMAP_THRESHOLD, MAPPED_FROM),
            (M_TRIM_THRESHOLD, MAPPED_FROM),
        ):
            mallopt(parameter, value)


def limit_data(budget: int, proc: Path = Path("/proc/self")) -> Callable[[], None]:
    """Allow this process so many bytes more than it has. Returns what lifts that limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = data_bytes(proc) + budget
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    return partial(resource.setrlimit, resource.RLIMIT_DATA, (hard, hard))


def data_bytes(proc: Path = Path("/proc/self")) -> int:
    """Bytes that RLIMIT_DATA counts."""
    return _status(proc, "VmData")


def forget_peak(proc: Path = Path("/proc/self")) -> int:
    """Begin a new peak of resident memory; returns what is resident now, without pages of files."""
    with suppress(OSError):  # without it the peak is that since the start
        (proc / "clear_refs").write_text("5", encoding="ascii")
    return _status(proc, "VmRSS") - _status(proc, "RssFile")


def peak_bytes(proc: Path = Path("/proc/self")) -> int:
    """The peak of resident memory, without pages of files: libraries' code stays once it was read."""
    return _status(proc, "VmHWM") - _status(proc, "RssFile")


def _status(proc: Path, name: str) -> int:
    text = (proc / "status").read_text(encoding="utf-8")
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def prefer_to_kill_this(proc: Path = Path("/proc/self")) -> None:
    """Where a cgroup's limit kills, let it be this process and not the one that reports."""
    with suppress(OSError):
        (proc / "oom_score_adj").write_text("1000", encoding="ascii")


def kills(root: Path = Path("/")) -> int | Unknown:
    """How many processes of this cgroup were killed for its limit so far: cgroup v2, then v1."""
    group = root / "sys/fs/cgroup"
    for path in (group / "memory.events", group / "memory/memory.oom_control"):
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
            if found:
                return int(found[1])
    return Unknown("no memory cgroup is visible")


def verdict_of(kind: str, message: str) -> Verdict:
    """What an exception of a step means, by its class's name and its message."""
    if kind == "OutOfMemoryError" or ("out of memory" in message and ("CUDA" in message or "HIP" in message)):
        return "gpu_out_of_memory"
    if kind == "MemoryError":
        return "memory_error"
    return "allocation_refused" if _REFUSED.search(message) else "crashed"
