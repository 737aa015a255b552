"""A memory cgroup for each trial, where this machine lets us make one: the limit that a container has.

The kernel counts the pages that a trial is the first to write to, and kills it when it needs more than the
limit. The group's own count of kills says that it was for memory (cgroups(7), memory_cgroups of the kernel's
admin guide, version 2 and version 1).
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from probes.shared.kfd import is_there
from probes.shared.unknown import Unknown

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
        with suppress(OSError):
            text = (self.path / self.files.kills).read_text(encoding="ascii")
            found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
            return int(found[1]) if found else 0
        return 0


def parent(root: Path = Path("/")) -> Parent | Unknown:
    """Where groups with a limit can be made, tried out by making one."""
    found = _v2(root) or _v1(root)
    if found is None:
        return Unknown("no memory cgroup is visible")
    _sweep(found.path)
    try:
        with group(found, 1 << 30, 0):
            return found
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
            found = _OURS.fullmatch(path.name)
            if found and not Path("/proc", found[1]).exists():
                with suppress(OSError):
                    path.rmdir()
