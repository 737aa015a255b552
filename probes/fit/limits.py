"""Limits on what a process may allocate, and what it has taken: Linux's own, and torch's on a GPU.

RLIMIT_DATA counts private memory that the process could write to, touched or not: the heap and anonymous
maps, in whole pages (getrlimit(2), Linux 4.7 and later). The kernel refuses what goes beyond, so nothing else
on the host is at risk. It doesn't count files that are mapped, so the libraries are free.
"""

import ctypes
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from probes.core.unknown import Unknown
from probes.fit.report import Verdict
from probes.hardware.host import oom_kills_in, process_bytes
from probes.hardware.sysfs import is_there

_PROCESS: Final = Path("/proc/self")
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


def limit_data(budget: int) -> Callable[[], None]:
    """Allow this process so many bytes more than it has. Returns what lifts that limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _status_bytes("VmData") + budget  # what RLIMIT_DATA counts
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    return partial(resource.setrlimit, resource.RLIMIT_DATA, (hard, hard))


def forget_peak() -> int:
    """Begin a new peak of resident memory; returns what is resident now, without pages of files."""
    with suppress(OSError):  # without it the peak is that since the start
        (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS") - _status_bytes("RssFile")


def peak_bytes() -> int:
    """The peak of resident memory, without pages of files: libraries' code stays once it was read."""
    return _status_bytes("VmHWM") - _status_bytes("RssFile")


def _status_bytes(key: str) -> int:
    n_bytes = process_bytes(Path("/"), key)
    return 0 if isinstance(n_bytes, Unknown) else n_bytes


def prefer_to_kill_this() -> None:
    """Where a cgroup's limit kills, let it be this process and not the one that reports."""
    with suppress(OSError):
        (_PROCESS / "oom_score_adj").write_text("1000", encoding="ascii")


def verdict_of(kind: str, message: str) -> Verdict:
    """The verdict of a step that raised, by the exception's class name and message."""
    if kind == "OutOfMemoryError" or ("out of memory" in message and ("CUDA" in message or "HIP" in message)):
        return "gpu_out_of_memory"
    if kind == "MemoryError":
        return "memory_error"
    return "allocation_refused" if _REFUSED.search(message) else "crashed"


# ---- a cgroup for each trial ---------------------------------------------------------------------------

NAME: Final = "weir-fit"
_OURS: Final = re.compile(rf"{NAME}-(\d+)-\d+")


@dataclass(frozen=True)
class Files:
    """Where a version of the memory controller keeps a limit, that of swap, and its count of kills."""

    limit: str
    swap: str
    kills: str
    without_swap: str | None  # what to write into `swap`; None: the same as the limit


V2: Final = Files("memory.max", "memory.swap.max", "memory.events", "0")
V1: Final = Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", None)


@dataclass(frozen=True)
class Parent:
    """The group below which trials' groups are made."""

    path: Path
    files: Files


@dataclass(frozen=True)
class Group:
    """One trial's group."""

    path: Path
    files: Files

    def join(self) -> None:
        """Move this process into it. Raises OSError."""
        (self.path / "cgroup.procs").write_text("0", encoding="ascii")

    def kills(self) -> int:
        """How many of its processes were killed for its limit."""
        return oom_kills_in(self.path / self.files.kills) or 0


def parent(root: Path = Path("/")) -> Parent | Unknown:
    """Where groups with a limit can be made, tried out by making one."""
    below = _v2(root) or _v1(root)
    if below is None:
        return Unknown("no memory cgroup is visible")
    _sweep(below.path)
    try:
        with group(below, 1 << 30, 0):
            return below
    except OSError as error:
        return Unknown(f"no memory cgroup can be made here: {error.strerror or error}")


@contextmanager
def group(below: Parent, budget: int, number: int) -> Iterator[Group]:
    """A group with this limit in bytes, and no swap, for this block. Raises OSError."""
    path, files = below.path / f"{NAME}-{os.getpid()}-{number}", below.files
    path.mkdir()
    try:
        (path / files.limit).write_text(str(budget), encoding="ascii")
        with suppress(OSError):  # the kernel counts no swap
            (path / files.swap).write_text(files.without_swap or str(budget), encoding="ascii")
        yield Group(path, files)
    finally:
        with suppress(OSError):
            path.rmdir()


def _v2(root: Path) -> Parent | None:
    """This process's group of version 2, or the nearest above it that hands the memory controller down.

    It doesn't leave a group that has a limit: what is made above it would escape that.
    """
    top, own = root / "sys/fs/cgroup", _own(root, "")
    if own is None or not is_there(top / "cgroup.controllers"):
        return None
    at = top / own
    while True:
        if "memory" in _words(at / "cgroup.subtree_control"):
            return Parent(at, V2)
        if at == top or _words(at / V2.limit) not in (["max"], []):
            return None
        at = at.parent


def _v1(root: Path) -> Parent | None:
    top, own = root / "sys/fs/cgroup/memory", _own(root, "memory")
    if own is None or not is_there(top / V1.limit):
        return None
    at = top / own
    return Parent(at if at.is_dir() else top, V1)  # a container sees its own group at the mount's top


def _own(root: Path, controller: str) -> str | None:
    """The path of this process's group in a hierarchy, without the slash in front."""
    with suppress(OSError):
        # a group's name is a file's: any bytes but a line break and a slash
        for line in os.fsdecode((root / "proc/self/cgroup").read_bytes()).split("\n"):
            _, names, path = (*line.split(":", 2), "", "")[:3]
            if controller in names.split(",") and ".." not in path.split("/"):
                return path.lstrip("/")
    return None


def _words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").split()
    return []


def _sweep(directory: Path) -> None:
    """Remove groups of searches that were killed."""
    with suppress(OSError):
        for path in directory.glob(f"{NAME}-*"):
            match = _OURS.fullmatch(path.name)
            if match and not Path("/proc", match[1]).exists():
                with suppress(OSError):
                    path.rmdir()
