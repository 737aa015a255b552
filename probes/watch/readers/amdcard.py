"""An AMD card by sysfs, hwmon and gpu_metrics. Not run on AMD hardware; our tests construct the trees.

Units: Documentation/hwmon/sysfs-interface.rst (microwatt, millidegree, hertz, pwm of 255), amdgpu's own
documentation for the rest.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from probes.machine import gpumetrics
from probes.machine.gpumetrics import Metrics
from probes.machine.sysfs import read_text
from probes.records.samples import CARD_GAUGES, CardSample, ProcessUse, WatchedCard, gathered
from probes.records.schema import Card
from probes.shared.kfd import is_there, listed
from probes.shared.unknown import Unknown
from probes.watch.readers.keptfile import KeptFile

METRICS_BYTES = 4096  # the largest table known has 3,360
_TEMPERATURES = {"edge": "edge_celsius", "junction": "hotspot_celsius", "mem": "memory_celsius"}
_CLOCKS = {"sclk": "core_mhz", "mclk": "memory_mhz"}
_NO_LINK = "amdgpu's pcie_bw counts for a whole second at each reading, so it isn't asked"
_NO_SM = "amdgpu shows no such counter in sysfs"
_SHOWN_ELSEWHERE: Mapping[str, str] = {
    "to_card_bytes_per_s": _NO_LINK,
    "from_card_bytes_per_s": _NO_LINK,
    "sm_active_percent": _NO_SM,
    "sm_occupancy_percent": _NO_SM,
    "tensor_percent": _NO_SM,
    "dram_percent": _NO_SM,
}


class AmdCard:
    """One card of amdgpu. `clients` finds the processes that use it."""

    def __init__(
        self, root: Path, card: Card, clients: Callable[[str], tuple[ProcessUse, ...] | Unknown]
    ) -> None:
        pci_id = card.pci_id if isinstance(card.pci_id, str) else ""
        self.card = WatchedCard(
            name=f"{card.product} ({card.target})" if isinstance(card.product, str) else card.name,
            driver=card.driver,
            pci_id=pci_id or card.name,
            vram_total_bytes=card.vram_total_bytes,
            memory_bytes_per_s=Unknown("sysfs shows no width of the memory's bus"),
        )
        self._clients = clients
        self._place = root / "sys/class/drm" / card.name / "device"
        self._state = KeptFile(self._place / "power/runtime_status")
        self._table = KeptFile(self._place / "gpu_metrics", most_bytes=METRICS_BYTES)
        self._files = self._find()
        self._last: Metrics | None = None

    def _find(self) -> dict[str, tuple[KeptFile, float]]:
        """Gauge -> file and the factor that makes the gauge's unit of the file's."""
        place = self._place
        found = {
            "busy_percent": (KeptFile(place / "gpu_busy_percent"), 1.0),
            "memory_busy_percent": (KeptFile(place / "mem_busy_percent"), 1.0),
            "vram_bytes": (KeptFile(place / "mem_info_vram_used"), 1.0),
            "gtt_bytes": (KeptFile(place / "mem_info_gtt_used"), 1.0),
        }
        for sensors in listed(place / "hwmon")[:1]:
            found |= _sensors(sensors)
        return found

    def sample(self, at_s: float, *, closing: bool = False) -> CardSample:
        """The card at this moment."""
        del at_s, closing  # nothing here is a rate, or costly
        if not is_there(self._place):
            return self._absent(f"{self.card.pci_id} is gone")
        if self._state.text() == "suspended":
            return self._absent("the card is asleep, and reading its sensors would wake it")
        found: dict[str, float | Unknown] = {
            gauge: file.scaled(factor) for gauge, (file, factor) in self._files.items()
        }
        table = self._table.read()
        metrics = table if isinstance(table, Unknown) else gpumetrics.parse(table)
        if isinstance(metrics, Metrics):
            slow = gpumetrics.slowdowns(self._last, metrics)
            self._last = metrics
            found = {**metrics.values, **{k: v for k, v in found.items() if not isinstance(v, Unknown)}}
        else:
            slow, self._last = metrics, None
        processes = self._clients(self.card.pci_id)
        found["evicted_bytes"] = _evicted(processes)
        return CardSample(gathered(self._explained(found, metrics)), slow, processes)

    def _explained(
        self, found: Mapping[str, float | Unknown], metrics: Metrics | Unknown
    ) -> dict[str, float | Unknown]:
        """Every gauge of a card, with a reason for each that this one doesn't have."""
        why = metrics.reason if isinstance(metrics, Unknown) else "not in its table either"
        nothing = Unknown(f"no such sensor in hwmon; gpu_metrics: {why}")
        other = {gauge: Unknown(reason) for gauge, reason in _SHOWN_ELSEWHERE.items()}
        return {gauge.name: found.get(gauge.name, other.get(gauge.name, nothing)) for gauge in CARD_GAUGES}

    def _absent(self, reason: str) -> CardSample:
        """All unknown; the files are opened again when it comes back."""
        for file in (self._table, self._state, *(file for file, _ in self._files.values())):
            file.close()
        self._last = None
        gone = Unknown(reason)
        return CardSample(gathered(dict.fromkeys((g.name for g in CARD_GAUGES), gone)), gone, gone)


def _sensors(place: Path) -> dict[str, tuple[KeptFile, float]]:
    names = {path.name for path in listed(place)}
    found: dict[str, tuple[KeptFile, float]] = {}
    for kind, gauges, factor in (("temp", _TEMPERATURES, 1e-3), ("freq", _CLOCKS, 1e-6)):
        for name in sorted(names):
            if not re.fullmatch(rf"{kind}\d+_label", name):
                continue
            label = read_text(place / name)
            gauge = gauges.get(label) if isinstance(label, str) else None
            if gauge:
                found[gauge] = (KeptFile(place / name.replace("_label", "_input")), factor)
    if "temp1_input" in names:  # kernels before 5.3 have one sensor without a label
        found.setdefault("edge_celsius", (KeptFile(place / "temp1_input"), 1e-3))
    power = "power1_average" if "power1_average" in names else "power1_input"
    if power in names:
        found["power_w"] = (KeptFile(place / power), 1e-6)
    if "pwm1" in names:
        found["fan_percent"] = (KeptFile(place / "pwm1"), 100 / 255)
    return found


def _evicted(processes: tuple[ProcessUse, ...] | Unknown) -> float | Unknown:
    if isinstance(processes, Unknown):
        return processes
    known = [one.evicted_bytes for one in processes if not isinstance(one.evicted_bytes, Unknown)]
    return sum(known) if known else Unknown("no process here shows amd-evicted-vram in its fdinfo")
