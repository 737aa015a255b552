"""An AMD card by sysfs, hwmon and gpu_metrics. Not run on AMD hardware; our tests construct the trees.

Units: Documentation/hwmon/sysfs-interface.rst (microwatt, millidegree, hertz, pwm of 255), amdgpu's own
documentation for the rest.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, byref, c_char_p, c_double, c_int, c_uint, c_void_p
from pathlib import Path

from probes.core.unknown import Unknown
from probes.hardware import gpu_metrics
from probes.hardware import nvml as nvmlcard
from probes.hardware.gpu_metrics import Metrics
from probes.hardware.nvml import Nvml, NvmlCard
from probes.hardware.sysfs import is_there, listed, read_text
from probes.records.facts import Card, NvidiaCard
from probes.records.watch import CARD_GAUGES, CardSample, ProcessUse, WatchedCard, gathered
from probes.watch.readers import KeptFile, Rate

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
        metrics = table if isinstance(table, Unknown) else gpu_metrics.parse(table)
        if isinstance(metrics, Metrics):
            slow = gpu_metrics.slowdowns_between(self._last, metrics)
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


# NVML_GPM_METRIC_*
SM_ACTIVE, SM_OCCUPANCY, TENSOR, DRAM = 2, 3, 5, 10
SENT_MIB_PER_S, RECEIVED_MIB_PER_S = 20, 21
MOST_METRICS = 512  # of a request: more than any NVML has


class _GpmMetric(Structure):
    _fields_ = (
        ("metric", c_uint),
        ("code", c_int),
        ("value", c_double),
        ("short_name", c_char_p),
        ("long_name", c_char_p),
        ("unit", c_char_p),
    )


class _GpmRequest(Structure):
    _fields_ = (
        ("version", c_uint),
        ("count", c_uint),
        ("before", c_void_p),
        ("after", c_void_p),
        ("metrics", _GpmMetric * MOST_METRICS),
    )


class _GpmSupport(Structure):
    _fields_ = (("version", c_uint), ("supported", c_uint))


class Performance:
    """Metrics over the time between two readings (GPM), on Hopper and later cards that aren't partitioned."""

    def __init__(self, nvml: Nvml, pci_id: str) -> None:
        self._nvml = nvml
        handle = nvml.handle(pci_id)
        self._handle = handle if isinstance(handle, c_void_p) else c_void_p()
        self._missing = handle if isinstance(handle, Unknown) else self._begin()
        self._request = _GpmRequest(version=1)
        self._samples = [] if self._missing else [self._sample(), self._sample()]
        self._taken = False

    def _begin(self) -> Unknown | None:
        support = _GpmSupport(version=1)
        failed = self._nvml.call("nvmlGpmQueryDeviceSupport", self._handle, byref(support))
        mig, pending = c_uint(), c_uint()
        if (
            not self._nvml.call("nvmlDeviceGetMigMode", self._handle, byref(mig), byref(pending))
            and mig.value
        ):
            return Unknown("the card is partitioned (MIG); its metrics are the partitions'")
        if failed or support.supported:
            return failed
        return Unknown("this card has no such counter (NVML's GPM begins with Hopper)")

    def _sample(self) -> c_void_p:
        found = c_void_p()
        self._missing = self._missing or self._nvml.call("nvmlGpmSampleAlloc", byref(found))
        return found

    @property
    def works(self) -> bool:
        """Whether this card has them."""
        return not self._missing

    def read(self, ids: Sequence[int]) -> dict[int, float | Unknown]:
        """Values by metric id since the last reading; the first one is unknown."""
        if self._missing:
            return dict.fromkeys(ids, self._missing)
        before, after = self._samples
        failed = self._nvml.call("nvmlGpmSampleGet", self._handle, after)
        if failed:
            self._taken = False
            return dict.fromkeys(ids, failed)
        self._samples = [after, before]
        if not self._taken:
            self._taken = True
            return dict.fromkeys(ids, Unknown("measured between two readings, and this is the first"))
        return self._between(ids, before, after)

    def _between(self, ids: Sequence[int], before: c_void_p, after: c_void_p) -> dict[int, float | Unknown]:
        request = self._request
        request.count, request.before, request.after = len(ids), before, after
        for at, one in enumerate(ids):
            request.metrics[at].metric = one
        failed = self._nvml.call("nvmlGpmMetricsGet", byref(request))
        return {
            one: failed or (self._nvml.words(int(metric.code)) if metric.code else float(metric.value))
            for one, metric in zip(ids, request.metrics[: len(ids)], strict=True)
        }


METRICS = {
    "sm_active_percent": SM_ACTIVE,
    "sm_occupancy_percent": SM_OCCUPANCY,
    "tensor_percent": TENSOR,
    "dram_percent": DRAM,
}
FIELDS = (nvmlcard.MEMORY_CELSIUS, nvmlcard.POWER_MW)
LINK_FIELDS = (nvmlcard.SENT_BYTES, nvmlcard.RECEIVED_BYTES)
LINK_METRICS = (SENT_MIB_PER_S, RECEIVED_MIB_PER_S)
MIB = 2**20
ENERGY_EVERY_S = 10.0  # its counter takes 4 ms of processor time to read (H200, driver 580)
NOT_SUPPORTED = Unknown("NVML: Not Supported")
_NOT_DUE = Unknown("read every 10 s, because reading it is slow")
_NO_GTT = Unknown("NVIDIA's driver has no counter of system memory that it maps for the card")


class NvidiaReader:
    """One card of NVIDIA's driver."""

    def __init__(self, root: Path, nvml: Nvml, card: NvidiaCard) -> None:
        self._root = root
        self._card = NvmlCard(nvml, card.pci_id)
        self._performance = Performance(nvml, card.pci_id)
        self.card = WatchedCard(
            card.name, "nvidia", card.pci_id, card.vram_total_bytes, self._card.memory_bytes_per_s()
        )
        self._sent, self._received = Rate(), Rate()
        self._names: dict[int, str] = {}
        self._energy_due_s, self._has_fan = 0.0, True
        self._top, self._link_at_s = card.max_link, 0.0

    def sample(self, at_s: float, *, closing: bool = False) -> CardSample:
        """The card at this moment."""
        card = self._card
        due = closing or at_s >= self._energy_due_s
        if due:
            self._energy_due_s = at_s + ENERGY_EVERY_S
        use = card.utilization()
        by_metrics = self._performance.works
        fields = card.fields(FIELDS if by_metrics else (*FIELDS, *LINK_FIELDS))
        power = fields[nvmlcard.POWER_MW]
        metrics = self._performance.read((*METRICS.values(), *LINK_METRICS))
        if by_metrics:
            sent, received = (_scaled(metrics[one], MIB) for one in LINK_METRICS)
        else:
            sent, received = self._link(fields, at_s)
        found: dict[str, float | Unknown] = {
            "busy_percent": use if isinstance(use, Unknown) else use[0],
            "memory_busy_percent": use if isinstance(use, Unknown) else use[1],
            "vram_bytes": card.used_bytes(),
            "gtt_bytes": _NO_GTT,
            "power_w": _scaled(card.power_mw() if isinstance(power, Unknown) else power, 1e-3),
            "energy_j": _scaled(card.energy_mj(), 1e-3) if due else _NOT_DUE,
            "edge_celsius": card.celsius(),
            "hotspot_celsius": Unknown("NVML has no such sensor"),
            "memory_celsius": fields[nvmlcard.MEMORY_CELSIUS],
            "core_mhz": card.mhz(nvmlcard.SM_CLOCK),
            "memory_mhz": card.mhz(nvmlcard.MEMORY_CLOCK),
            "to_card_bytes_per_s": received,
            "from_card_bytes_per_s": sent,
            "fan_percent": self._fan_percent(),
            **{gauge: metrics[metric] for gauge, metric in METRICS.items()},
            "evicted_bytes": _NO_GTT,
        }
        return CardSample(gathered(found), card.slowdowns(), self._processes())

    def _link(
        self, fields: Mapping[int, float | Unknown], at_s: float
    ) -> tuple[float | Unknown, float | Unknown]:
        """Bytes per second sent and received by counters, where they can't have begun again unnoticed."""
        span_s, self._link_at_s = at_s - self._link_at_s, at_s
        sent, received = (
            rate.of(fields[one], at_s)
            for rate, one in zip((self._sent, self._received), LINK_FIELDS, strict=True)
        )
        if isinstance(self._top, Unknown):
            return self._top, self._top
        if self._top.raw_gb_per_s * 1e9 * span_s >= nvmlcard.COUNTED_BYTES:
            why = Unknown("the link may move more between two samples than its counters of 32 bits can count")
            return why, why
        return sent, received

    def _fan_percent(self) -> int | Unknown:
        """A card without a fan takes as long to say so as all quick figures together, so it is asked once."""
        if self._has_fan:
            found = self._card.fan_percent()
            self._has_fan = not (isinstance(found, Unknown) and found == NOT_SUPPORTED)
            return found
        return NOT_SUPPORTED

    def _processes(self) -> tuple[ProcessUse, ...] | Unknown:
        found = self._card.processes()
        if isinstance(found, Unknown):
            return found
        # an id of a process that has ended may become another one's
        known = self._names
        self._names = {pid: known[pid] if pid in known else self._name(pid) for pid, _ in found}
        return tuple(ProcessUse(pid, self._names[pid], used, _NO_GTT, _NO_GTT) for pid, used in found)

    def _name(self, pid: int) -> str:
        """The program's name where the id is of this container, else none."""
        name = read_text(self._root / "proc" / str(pid) / "comm")
        return name if isinstance(name, str) else ""


def _scaled(figure: float | Unknown, factor: float) -> float | Unknown:
    return figure if isinstance(figure, Unknown) else figure * factor
