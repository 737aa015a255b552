"""Observes what else goes on between measurements: processor time, the GPU's other users, its clocks."""

import os
import time
from pathlib import Path

from probes.machine import hostload, sysfs
from probes.machine.nvml import Nvml, open_nvml
from probes.measure.noise import Look
from probes.measure.workbench import Workbench
from probes.records.schema import Unknown

MICROSECONDS = 10**6
LINK_EVERY_S = 0.4


class Bystanders:
    """Observes one GPU and its host. Without a GPU only the host is watched."""

    def __init__(self, bench: Workbench, root: Path, pci_id: str | Unknown) -> None:
        self._bench, self._root = bench, root
        self._pci_id: str | Unknown = pci_id if bench.has_gpu else Unknown("no GPU")
        self._nvml = open_nvml() if bench.has_gpu else Unknown("no GPU")
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
            own_cpu_s=sum(os.times()[:2]),
            gpu_processes=self._processes(),
            foreign_percent=self._foreign_percent(),
            link_bytes_per_s=self._link_bytes_per_s(),
            foreign_vram_bytes=self._bench.foreign_vram_bytes() if pulse else Unknown("no GPU"),
            slowdowns=self._slowdowns(),
            kernel_s=kernel_s,
            copy_s=copy_s,
        )

    def _asked(self) -> tuple[Nvml, str] | Unknown:
        if isinstance(self._pci_id, Unknown):
            return self._pci_id
        return self._nvml if isinstance(self._nvml, Unknown) else (self._nvml, self._pci_id)

    def _processes(self) -> int | Unknown:
        asked = self._asked()
        found = asked if isinstance(asked, Unknown) else asked[0].processes(asked[1])
        if isinstance(found, Unknown):
            return found
        return len(found) or Unknown("NVML doesn't even show this process")

    def _foreign_percent(self) -> int | Unknown:
        """By process ids; a container with its own ids can't distinguish other processes from this one."""
        asked = self._asked()
        if isinstance(asked, Unknown):
            return asked
        nvml, pci_id = asked
        mine, uses = nvml.processes(pci_id), nvml.uses(pci_id, self._seen_us)
        if isinstance(mine, Unknown) or os.getpid() not in mine:
            return Unknown("the driver's process ids aren't this container's")
        if isinstance(uses, Unknown):
            return uses
        self._seen_us = max((use.time_us for use in uses), default=self._seen_us)
        others = [max(u.sm_percent, u.memory_percent) for u in uses if u.pid != os.getpid()]
        return max(others, default=0)

    def _link_bytes_per_s(self) -> int | Unknown:
        """One direction at a time, in turns, and not too often: each costs 20 ms."""
        asked = self._asked()
        if isinstance(asked, Unknown):
            return asked
        if time.monotonic() - self._link_at_s > LINK_EVERY_S:
            self._upstream = not self._upstream
            self._link = asked[0].link_bytes_per_s(asked[1], up=self._upstream)
            self._link_at_s = time.monotonic()
        return self._link

    def _slowdowns(self) -> tuple[str, ...] | Unknown:
        asked = self._asked()
        if not isinstance(asked, Unknown):
            return asked[0].slowdowns(asked[1])
        return sysfs.slowdowns(self._root, self._pci_id)


def busy_cpu_s(root: Path) -> float | Unknown:
    """Processor seconds that the whole machine has spent on programs and the kernel since its start."""
    text = sysfs.read_text(root / "proc/stat")
    return text if isinstance(text, Unknown) else hostload.busy_cpu_s(text)
