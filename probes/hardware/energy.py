"""What drivers count of a device while it works: energy, and the share of time that it was busy."""

import time
from collections.abc import Callable
from pathlib import Path

from probes.core.unknown import Unknown
from probes.hardware.nvml import open_card
from probes.hardware.sysfs import listed, read_int

MICRO = 1e-6  # powercap and hwmon count in microjoules and microwatts


class CpuGauges:
    """The energy of the CPU's packages, by Linux's powercap (RAPL)."""

    def __init__(self, root: Path) -> None:
        self._packages = [
            place / "energy_uj"
            for place in listed(root / "sys/class/powercap")
            if place.name.startswith("intel-rapl:") and place.name.count(":") == 1
        ]

    def joules(self) -> float | Unknown:
        """The sum over all packages, which begins anywhere."""
        if not self._packages:
            return Unknown("no powercap (RAPL) here")
        total = 0
        for package in self._packages:
            counted = read_int(package)
            if isinstance(counted, Unknown):
                return counted
            total += counted
        return MICRO * total

    def busy_percent(self) -> float | Unknown:
        """Return unknown: no driver counts it for a CPU."""
        return Unknown("a CPU has no driver that counts it")


class AmdGauges:
    """An AMD card by its hwmon directory; energy is summed from power readings where it has no counter."""

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
        """What rocm-smi shows as GPU use."""
        percent = read_int(self._device / "gpu_busy_percent")
        return percent if isinstance(percent, Unknown) else float(percent)


class NvidiaGauges:
    """An NVIDIA card by NVML."""

    def __init__(self, pci_id: str | Unknown) -> None:
        self._card = open_card(pci_id)

    def joules(self) -> float | Unknown:
        """Energy since the driver was loaded."""
        counted = self._card if isinstance(self._card, Unknown) else self._card.energy_mj()
        return counted if isinstance(counted, Unknown) else counted / 1e3

    def busy_percent(self) -> float | Unknown:
        """What nvidia-smi shows as GPU-Util."""
        rates = self._card if isinstance(self._card, Unknown) else self._card.utilization()
        return rates if isinstance(rates, Unknown) else float(rates[0])
