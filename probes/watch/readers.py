"""The host's own gauges: processors, memory, disks, and what a command's processes hold."""

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Protocol

from probes.core.unknown import Unknown
from probes.hardware import host
from probes.hardware.sysfs import Client, is_there, listed, parse_fdinfo, read_text
from probes.records.watch import CardSample, Look, ProcessUse, WatchedCard, gathered


class CardReader(Protocol):
    """One card, read again and again. A card that vanishes has unknown values from then on."""

    @property
    def card(self) -> WatchedCard:
        """Which card it is."""

    def sample(self, at_s: float, *, closing: bool = False) -> CardSample:
        """The card at this moment, on a clock that never goes back. `closing`: the last one of a watch."""


class Rate:
    """How fast a counter grows, between one reading and the next."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def of(self, counter: float | Unknown, at_s: float) -> float | Unknown:
        """Per second since the last reading."""
        if isinstance(counter, Unknown):
            self._last = None
            return counter
        last, self._last = self._last, (counter, at_s)
        if last is None or at_s <= last[1]:
            return Unknown("a rate needs two readings, and this is the first")
        if counter < last[0]:
            return Unknown("the counter began again")
        return (counter - last[0]) / (at_s - last[1])


_NUMBER = re.compile(r"-?[0-9]{1,20}")  # what 64 bits hold
MOST_BYTES = 1 << 16  # of one file: /proc/stat of a large machine


class KeptFile:
    """A file that stays open. When it fails it is opened again at the next reading."""

    def __init__(self, path: Path, *, most_bytes: int = 4096) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._descriptor = -1

    def read(self) -> bytes | Unknown:
        """The content at this moment, or why it can't be read (the device is gone: ENODEV)."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            return os.pread(self._descriptor, self._most_bytes, 0)
        except OSError as error:
            self.close()
            missing = isinstance(error, FileNotFoundError)
            return Unknown(
                f"no {self._path.name} here" if missing else f"{self._path.name}: {error.strerror}"
            )

    def text(self) -> str | Unknown:
        """The content as text."""
        data = self.read()
        return data if isinstance(data, Unknown) else data.decode("utf-8", "replace").strip()

    def number(self) -> int | Unknown:
        """The number in a file of one decimal figure."""
        text = self.text()
        if isinstance(text, Unknown):
            return text
        if _NUMBER.fullmatch(text):
            return int(text)
        return Unknown(f"{self._path.name} says {text[:40]!r}")

    def scaled(self, factor: float) -> float | Unknown:
        """The number in the file times a factor, which turns it into another unit."""
        number = self.number()
        return number if isinstance(number, Unknown) else number * factor

    def close(self) -> None:
        """Close the file; the next reading opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
        busy = stat if isinstance(stat, Unknown) else host.busy_cpu_s(stat)
        load = self._busy.of(busy, at_s)
        disks = self._disks.text()
        moved = disks if isinstance(disks, Unknown) else host.disk_bytes(disks)
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
    all_of_it, left = host.memory_bytes(meminfo, total), host.memory_bytes(meminfo, free)
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
        """Return the sum of the processes' resident sets, in bytes."""
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


SEARCH_EVERY_S = 5.0
NODES = "/dev/dri/"
_UNSEEN = Unknown("no fdinfo of it has this figure")


class DrmClients:
    """The clients of all cards, read at most once for each moment."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: list[tuple[int, str, KeptFile]] = []
        self._searched_s = -SEARCH_EVERY_S
        self._read_s = -1.0
        self._uses: dict[str, tuple[ProcessUse, ...]] = {}

    def refresh(self, at_s: float) -> None:
        """Read the clients at this moment."""
        if at_s == self._read_s:
            return
        self._read_s = at_s
        if at_s - self._searched_s >= SEARCH_EVERY_S:
            self._searched_s = at_s
            self._search()
        found: dict[tuple[str, str], tuple[int, str, Client]] = {}
        for pid, name, file in self._files:
            text = file.text()
            client = None if isinstance(text, Unknown) else parse_fdinfo(text)
            if client:
                found.setdefault((client.pci_id, client.client_id), (pid, name, client))
        self._uses = _by_card(list(found.values()))

    def _search(self) -> None:
        for _, _, file in self._files:
            file.close()
        self._files = []
        for place in listed(self._root / "proc"):
            if not place.name.isdecimal():
                continue
            for descriptor in listed(place / "fd"):
                try:
                    target = str(descriptor.readlink())
                except OSError:
                    continue
                if target.startswith(NODES):
                    name = read_text(place / "comm")
                    file = KeptFile(place / "fdinfo" / descriptor.name)
                    self._files.append((int(place.name), name if isinstance(name, str) else "", file))

    def of(self, pci_id: str) -> tuple[ProcessUse, ...]:
        """The processes seen on one card."""
        return self._uses.get(pci_id, ())


def _by_card(clients: list[tuple[int, str, Client]]) -> dict[str, tuple[ProcessUse, ...]]:
    by_process: dict[tuple[str, int, str], list[Client]] = defaultdict(list)
    for pid, name, client in clients:
        by_process[client.pci_id, pid, name].append(client)
    found: dict[str, tuple[ProcessUse, ...]] = defaultdict(tuple)
    for (pci_id, pid, name), mine in sorted(by_process.items()):
        vram, gtt = (_sum([dict(one.resident_bytes).get(kind) for one in mine]) for kind in ("vram", "gtt"))
        evicted = _sum([None if isinstance(c, Unknown) else c for c in (m.evicted_vram_bytes for m in mine)])
        found[pci_id] += (ProcessUse(pid, name, vram, gtt, evicted),)
    return found


def _sum(figures: list[int | None]) -> int | Unknown:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else _UNSEEN
