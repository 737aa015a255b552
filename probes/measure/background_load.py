"""Background load: what else uses the GPU and the host while a row is measured, and throttling.

The machine is observed before and after a row, while this process leaves the GPU idle.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware import host, sysfs
from probes.hardware.nvml import open_card
from probes.measure.workbench import Workbench
from probes.records.rows import Noise

# A kernel alone takes 20 us from call to end, a small copy 30 us; next to a process that computes or copies,
# both wait for its turns: 1 to 2.5 ms (measured on an H200, see docs/probes.md).
WAITED_S = 500e-6
IDLE_LINK_BYTES_PER_S = 100 * 10**6  # an idle link carries a few MB/s
DRIFT_BYTES = 256 * 2**20  # our own libraries load kernels lazily, which takes tens of MiB
BUSY_SHARE = 0.25  # of the processors, used by others
SHORTEST_S = 0.1  # the kernel counts processor time in steps of 10 ms
LINK_EVERY_S = 0.4  # a reading of the link's traffic costs 20 ms
MICROSECONDS = 10**6


@dataclass(frozen=True)
class Observation:
    """The machine at a moment at which this process leaves the GPU idle."""

    at_s: float  # of a clock that only goes forward
    cpus: int
    busy_cpu_s: float | Unknown  # of the whole machine since its start
    own_cpu_s: float
    gpu_processes: int | Unknown  # that compute on it, this one included
    foreign_percent: int | Unknown  # of the GPU, by the busiest other process since the previous observation
    link_bytes_per_s: int | Unknown
    foreign_vram_bytes: int | Unknown
    slowdowns: tuple[str, ...] | Unknown
    kernel_s: float | Unknown  # from call to end, the middle one of a few
    copy_s: float | Unknown


def judge(before: Observation, after: Observation) -> Noise:
    """Every disturbance that the two observations show, and the signals that were missing."""
    flags = [*_foreign(before, after), *_host(before, after), *_throttled(before, after)]
    missing = [
        f"{what}: {value.reason}"
        for what, value in (
            ("processes on the GPU", after.gpu_processes),
            ("their use of it", after.foreign_percent),
            ("link traffic", after.link_bytes_per_s),
            ("other processes' VRAM", after.foreign_vram_bytes),
            ("throttling", after.slowdowns),
            ("waiting kernels", after.kernel_s),
            ("host load", after.busy_cpu_s),
        )
        if isinstance(value, Unknown)
    ]
    return Noise(tuple(flags), tuple(missing))


def _foreign(before: Observation, after: Observation) -> list[str]:
    observations = (before, after)
    flags = []
    others = max((x.gpu_processes for x in observations if isinstance(x.gpu_processes, int)), default=1) - 1
    if others > 0:
        flags.append(f"foreign: {others} more process{'es' if others > 1 else ''} on the GPU")
    if isinstance(after.foreign_percent, int) and after.foreign_percent > 0:
        flags.append(f"foreign: another process used {after.foreign_percent}% of the GPU")
    traffic = max(
        (x.link_bytes_per_s for x in observations if isinstance(x.link_bytes_per_s, int)), default=0
    )
    if traffic > IDLE_LINK_BYTES_PER_S:
        flags.append(f"foreign: {traffic / 1e9:.1f} GB/s on the link while this process was idle")
    for what, waits in (
        ("kernel", [x.kernel_s for x in observations]),
        ("copy", [x.copy_s for x in observations]),
    ):
        longest = max((wait for wait in waits if isinstance(wait, float)), default=0.0)
        if longest > WAITED_S:
            flags.append(f"foreign: a small {what} had to wait {longest * 1e3:.1f} ms")
    a, b = before.foreign_vram_bytes, after.foreign_vram_bytes
    if isinstance(a, int) and isinstance(b, int) and abs(b - a) > DRIFT_BYTES:
        flags.append(f"foreign: other processes' VRAM changed by {binary_bytes(abs(b - a))}")
    return flags


def _host(before: Observation, after: Observation) -> list[str]:
    took = after.at_s - before.at_s
    if isinstance(before.busy_cpu_s, Unknown) or isinstance(after.busy_cpu_s, Unknown) or took < SHORTEST_S:
        return []
    others = (after.busy_cpu_s - before.busy_cpu_s - (after.own_cpu_s - before.own_cpu_s)) / took
    if others <= max(BUSY_SHARE * after.cpus, 0.5):
        return []
    return [f"host: other programs used {others:.1f} of {after.cpus} CPUs"]


def _throttled(before: Observation, after: Observation) -> list[str]:
    slowdowns = {word for x in (before, after) if isinstance(x.slowdowns, tuple) for word in x.slowdowns}
    return [f"throttled: {word}" for word in sorted(slowdowns)]


class BackgroundLoad:
    """Observes one GPU and its host. Without a GPU only the host is observed.

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

    def observe(self) -> Observation:
        """The machine at this moment, while this process leaves the GPU idle."""
        latencies = self._bench.small_latencies_s()
        kernel_s, copy_s = latencies or (Unknown("no GPU"), Unknown("no GPU"))
        return Observation(
            at_s=time.monotonic(),
            cpus=os.cpu_count() or 1,
            busy_cpu_s=host.machine_cpu_s(self._root),
            own_cpu_s=sum(os.times()[:2]) + self._other_side_cpu_s(),
            gpu_processes=self._processes(),
            foreign_percent=self._foreign_percent(),
            link_bytes_per_s=self._link_bytes_per_s(),
            foreign_vram_bytes=self._foreign_vram_bytes() if latencies else Unknown("no GPU"),
            slowdowns=self._slowdowns(),
            kernel_s=kernel_s,
            copy_s=copy_s,
        )

    def _other_side_cpu_s(self) -> float:
        return host.process_cpu_s(self._root, self._beside) if self._beside else 0.0

    def _processes(self) -> int | Unknown:
        running = self._card if isinstance(self._card, Unknown) else self._card.computing()
        if isinstance(running, Unknown):
            return running
        ours = 2 if self._beside and len(running) > 1 else 1
        return len(running) - ours + 1 if running else Unknown("NVML doesn't even show this process")

    def _foreign_vram_bytes(self) -> int | Unknown:
        if self._beside:
            return Unknown("the other side of a run in turns holds some, too")
        return self._bench.foreign_vram_bytes()

    def _foreign_percent(self) -> int | Unknown:
        """By process ids; a container with its own ids can't distinguish other processes from this one."""
        if isinstance(self._card, Unknown):
            return self._card
        running, uses = self._card.computing(), self._card.uses(self._seen_us)
        if isinstance(running, Unknown) or os.getpid() not in running:
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
