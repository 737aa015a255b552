"""The host's own gauges: processors, memory, disks, and what a command's processes hold."""

import os
from pathlib import Path

from probes.machine import hostload
from probes.machine.sysfs import read_text
from probes.records.samples import Look, gathered
from probes.shared.kfd import is_there, listed
from probes.shared.unknown import Unknown
from probes.watch.readers.cardreader import Rate
from probes.watch.readers.keptfile import MOST_BYTES, KeptFile

CHILDREN_EVERY_S = 1.0
THREADS_EVERY = 10  # searches: a child belongs to the thread that started it, seldom another than the first
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MachineReader:
    """The machine that this process runs on."""

    def __init__(self, root: Path, *, cpus: int) -> None:
        self._cpus = cpus
        self._stat = KeptFile(root / "proc/stat", most_bytes=256)  # its first line has all that is needed
        self._memory = KeptFile(root / "proc/meminfo")
        self._disks = KeptFile(root / "proc/diskstats", most_bytes=MOST_BYTES)
        version2 = root / "sys/fs/cgroup/memory.current"
        version1 = root / "sys/fs/cgroup/memory/memory.usage_in_bytes"
        self._group = KeptFile(version1 if is_there(version1) else version2)
        self._busy, self._read, self._written = Rate(), Rate(), Rate()
        self.command: CommandTree | None = None

    def look(self, at_s: float) -> Look:
        """Every gauge at this moment."""
        stat, memory = self._stat.text(), self._memory.text()
        busy = stat if isinstance(stat, Unknown) else hostload.busy_cpu_s(stat)
        load = self._busy.of(busy, at_s)
        disks = self._disks.text()
        moved = disks if isinstance(disks, Unknown) else hostload.disk_bytes(disks)
        found: dict[str, float | Unknown] = {
            "cpu_percent": load if isinstance(load, Unknown) else min(100 * load / self._cpus, 100.0),
            "ram_bytes": _used(memory, "MemTotal", "MemAvailable"),
            "cgroup_bytes": self._group.number(),
            "swap_bytes": _used(memory, "SwapTotal", "SwapFree"),
            "disk_read_bytes_per_s": self._read.of(moved if isinstance(moved, Unknown) else moved[0], at_s),
            "disk_write_bytes_per_s": self._written.of(
                moved if isinstance(moved, Unknown) else moved[1], at_s
            ),
            "command_bytes": self.command.resident_bytes(at_s) if self.command else Unknown("no command"),
        }
        return gathered(found)


def _used(meminfo: str | Unknown, total: str, free: str) -> int | Unknown:
    if isinstance(meminfo, Unknown):
        return meminfo
    all_of_it, left = hostload.memory_bytes(meminfo, total), hostload.memory_bytes(meminfo, free)
    if isinstance(all_of_it, Unknown):
        return all_of_it
    return left if isinstance(left, Unknown) else all_of_it - left


class CommandTree:
    """A command's process and its descendants. A process that leaves its parents isn't found again."""

    def __init__(self, root: Path, pid: int) -> None:
        self._root, self._pid = root, pid
        self._files: dict[int, KeptFile] = {}
        self._searched_s, self._searches = -CHILDREN_EVERY_S, 0

    def resident_bytes(self, at_s: float) -> int | Unknown:
        """Their resident sets together."""
        if at_s - self._searched_s >= CHILDREN_EVERY_S:
            self._searched_s = at_s
            self._search()
        sizes = [_resident(file.text()) for file in self._files.values()]
        known = [size for size in sizes if size is not None]
        return sum(known) * _PAGE if known else Unknown("the command has ended")

    def _search(self) -> None:
        alive: set[int] = set()
        every_thread = self._searches % THREADS_EVERY == 0
        self._searches += 1
        waiting = [self._pid]
        while waiting:
            pid = waiting.pop()
            if pid in alive:
                continue
            alive.add(pid)
            tasks = self._root / "proc" / str(pid) / "task"
            for thread in listed(tasks) if every_thread else [tasks / str(pid)]:
                found = read_text(thread / "children")
                waiting += [int(word) for word in found.split()] if isinstance(found, str) else []
        for pid in self._files.keys() - alive:
            if every_thread or isinstance(self._files[pid].read(), Unknown):
                self._files.pop(pid).close()
        for pid in alive - self._files.keys():
            self._files[pid] = KeptFile(self._root / "proc" / str(pid) / "statm")


def _resident(statm: str | Unknown) -> int | None:
    """The second figure of statm, in pages."""
    words = [] if isinstance(statm, Unknown) else statm.split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else None
