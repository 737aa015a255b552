"""Observes what else goes on between measurements: processor time, the GPU's other users, its clocks."""

import os
import time
from pathlib import Path

from probes.machine import hostload, sysfs
from probes.machine.nvmlcard import open_card
from probes.measure.noise import Look
from probes.measure.workbench import Workbench
from probes.records.schema import Unknown

MICROSECONDS = 10**6
LINK_EVERY_S = 0.4


class Bystanders:
    """Observes one GPU and its host. Without a GPU only the host is watched.

    `beside` is the process of the other side of a run in turns, which isn't foreign; 0 for none.
    """

    def __init__(self, bench: Workbench, root: Path, pci_id: str | Unknown, *, beside: int = 0) -> None:
        self._beside = beside
        self._bench, self._root = bench, root
        self._pci_id: str | Unknown = pci_id if bench.has_gpu else Unknown("no GPU")
        self._card = open_card(self._pci_id)
        self._seen_us = int(time.time() * MICROSECONDS)
        self._upstream = False
        self._link: int | Unknown = Unknown("not read yet")
        self._link_at_s = -LINK_EVERY_S

    def look(self) -> Look:
        """The machine at this moment, while this process leaves the GPU idle."""
        pulse = self._bench.pulse()
        kernel_s, copy_s = pulse or (Unknown("no GPU"), Unknown("no GPU"))
        return Look(
            at_s=time.monotonic(),
            cpus=os.cpu_count() or 1,
            busy_cpu_s=busy_cpu_s(self._root),
            own_cpu_s=sum(os.times()[:2]) + self._beside_cpu_s(),
            gpu_processes=self._processes(),
            foreign_percent=self._foreign_percent(),
            link_bytes_per_s=self._link_bytes_per_s(),
            foreign_vram_bytes=self._foreign_vram_bytes() if pulse else Unknown("no GPU"),
            slowdowns=self._slowdowns(),
            kernel_s=kernel_s,
            copy_s=copy_s,
        )

    def _beside_cpu_s(self) -> float:
        """Processor seconds of the other side of a run in turns, which isn't foreign; 0 without one."""
        if not self._beside:
            return 0.0
        text = sysfs.read_text(self._root / f"proc/{self._beside}/stat")
        fields = text.rpartition(")")[2].split() if isinstance(text, str) else []
        # of proc(5)'s fields those 14 and 15, of which the first two are before the bracket
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def _processes(self) -> int | Unknown:
        found = self._card if isinstance(self._card, Unknown) else self._card.computing()
        if isinstance(found, Unknown):
            return found
        mine = 2 if self._beside and len(found) > 1 else 1
        return len(found) - mine + 1 if found else Unknown("NVML doesn't even show this process")

    def _foreign_vram_bytes(self) -> int | Unknown:
        if self._beside:
            return Unknown("the other side of a run in turns holds some, too")
        return self._bench.foreign_vram_bytes()

    def _foreign_percent(self) -> int | Unknown:
        """By process ids; a container with its own ids can't distinguish other processes from this one."""
        if isinstance(self._card, Unknown):
            return self._card
        mine, uses = self._card.computing(), self._card.uses(self._seen_us)
        if isinstance(mine, Unknown) or os.getpid() not in mine:
            return Unknown("the driver's process ids aren't this container's")
        if isinstance(uses, Unknown):
            return uses
        self._seen_us = max((use.time_us for use in uses), default=self._seen_us)
        others = [
            max(u.sm_percent, u.memory_percent) for u in uses if u.pid not in (os.getpid(), self._beside)
        ]
        return max(others, default=0)

    def _link_bytes_per_s(self) -> int | Unknown:
        """One direction at a time, in turns, and not too often: each costs 20 ms."""
        if isinstance(self._card, Unknown):
            return self._card
        if time.monotonic() - self._link_at_s > LINK_EVERY_S:
            self._upstream = not self._upstream
            self._link = self._card.link_bytes_per_s(up=self._upstream)
            self._link_at_s = time.monotonic()
        return self._link

    def _slowdowns(self) -> tuple[str, ...] | Unknown:
        if not isinstance(self._card, Unknown):
            return self._card.slowdowns()
        return sysfs.slowdowns(self._root, self._pci_id)


def busy_cpu_s(root: Path) -> float | Unknown:
    """Processor seconds that the whole machine has spent on programs and the kernel since its start."""
    text = sysfs.read_text(root / "proc/stat")
    return text if isinstance(text, Unknown) else hostload.busy_cpu_s(text)
