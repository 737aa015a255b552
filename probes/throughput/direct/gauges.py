"""Reads a device's energy and what its driver calls utilisation; unknown with the reason where there is none.

AMD: amdgpu's hwmon (`energy1_input` in microjoules, `power1_average` in microwatts) and `gpu_busy_percent`.
A CPU: the kernel's powercap (RAPL), in microjoules. Not run on AMD hardware.
"""

import time
from collections.abc import Callable
from pathlib import Path

from probes.machine.nvmlcard import open_card
from probes.machine.sysfs import read_int
from probes.shared.kfd import listed
from probes.shared.unknown import Unknown

MICRO = 1e-6


class CpuGauges:
    """The CPU's package energy. How busy processors are isn't what is compared here."""

    def __init__(self, root: Path) -> None:
        self._packages = [
            place / "energy_uj"
            for place in listed(root / "sys/class/powercap")
            if place.name.startswith("intel-rapl:") and place.name.count(":") == 1
        ]

    def joules(self) -> float | Unknown:
        """Energy of all packages, from any beginning."""
        if not self._packages:
            return Unknown("no powercap (RAPL) here")
        found = [read_int(package) for package in self._packages]
        missing = [value for value in found if isinstance(value, Unknown)]
        return missing[0] if missing else MICRO * sum(value for value in found if isinstance(value, int))

    def busy_percent(self) -> float | Unknown:
        """Not a driver's figure."""
        return Unknown("a CPU has no driver that counts it")


class AmdGauges:
    """An AMD card's, by the kernel's files. Energy from power readings where the card has no counter."""

    def __init__(
        self, root: Path, pci_id: str | Unknown, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._device = root / "sys/bus/pci/devices" / str(pci_id)
        sensors = listed(self._device / "hwmon") if isinstance(pci_id, str) else []
        self._sensor = sensors[0] if sensors else None
        self._at_s: float | None = None
        self._sum = 0.0

    def joules(self) -> float | Unknown:
        """Energy since the first reading; by power, it is exact only between readings close together."""
        if self._sensor is None:
            return Unknown("no hwmon of the card here")
        counted = read_int(self._sensor / "energy1_input")
        if isinstance(counted, int):
            return MICRO * counted
        watts = read_int(self._sensor / "power1_average")
        if isinstance(watts, Unknown):
            return watts
        at_s = self._now()
        self._sum += MICRO * watts * (at_s - self._at_s) if self._at_s is not None else 0.0
        self._at_s = at_s
        return self._sum

    def busy_percent(self) -> float | Unknown:
        """What rocm-smi shows as use."""
        found = read_int(self._device / "gpu_busy_percent")
        return found if isinstance(found, Unknown) else float(found)


class NvidiaGauges:
    """An NVIDIA card's, by NVML."""

    def __init__(self, pci_id: str | Unknown) -> None:
        self._card = open_card(pci_id)

    def joules(self) -> float | Unknown:
        """Energy since the driver was loaded."""
        found = self._card if isinstance(self._card, Unknown) else self._card.energy_mj()
        return found if isinstance(found, Unknown) else found / 1e3

    def busy_percent(self) -> float | Unknown:
        """What nvidia-smi shows as GPU-Util."""
        found = self._card if isinstance(self._card, Unknown) else self._card.utilization()
        return found if isinstance(found, Unknown) else float(found[0])
