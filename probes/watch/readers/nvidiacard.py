"""An NVIDIA card by NVML."""

from collections.abc import Mapping
from pathlib import Path

from probes.machine import nvmlcard
from probes.machine.nvml import Nvml
from probes.machine.nvmlcard import NvmlCard
from probes.machine.sysfs import read_text
from probes.records.facts import NvidiaCard
from probes.records.samples import CardSample, ProcessUse, WatchedCard, gathered
from probes.shared.unknown import Unknown
from probes.watch.readers import nvidiametrics
from probes.watch.readers.cardreader import Rate
from probes.watch.readers.nvidiametrics import Performance

METRICS = {
    "sm_active_percent": nvidiametrics.SM_ACTIVE,
    "sm_occupancy_percent": nvidiametrics.SM_OCCUPANCY,
    "tensor_percent": nvidiametrics.TENSOR,
    "dram_percent": nvidiametrics.DRAM,
}
FIELDS = (nvmlcard.MEMORY_CELSIUS, nvmlcard.POWER_MW)
LINK_FIELDS = (nvmlcard.SENT_BYTES, nvmlcard.RECEIVED_BYTES)
LINK_METRICS = (nvidiametrics.SENT_MIB_PER_S, nvidiametrics.RECEIVED_MIB_PER_S)
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
