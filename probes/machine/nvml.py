"""The gate to NVML, NVIDIA's management library, through ctypes; needs no package.

What it refuses is unknown.

Names, structures and codes: NVML API reference. Handles are looked up by PCI id, 0000:03:00.0.
"""

import ctypes
from ctypes import Structure, byref, c_char, c_char_p, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass

from probes.records.facts import Link, NvidiaCard
from probes.shared.unknown import Unknown

LIBRARY = "libnvidia-ml.so.1"
NOT_FOUND, INSUFFICIENT_SIZE = 6, 7  # nvmlReturn_t
# nvmlClocksEventReasons; idle, application clocks and sync boost slow no busy card down unasked
SLOWDOWNS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class _PciInfo(Structure):
    _fields_ = (
        ("legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("ids", c_uint),
        ("subsystem", c_uint),
        ("bus_id", c_char * 32),
    )


class _Memory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class ProcessInfo(Structure):
    """What one process holds of a card, as NVML writes it."""

    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute", c_uint))


class _Use(Structure):
    _fields_ = (
        ("pid", c_uint),
        ("time_us", c_ulonglong),
        ("sm", c_uint),
        ("memory", c_uint),
        ("encoder", c_uint),
        ("decoder", c_uint),
    )


@dataclass(frozen=True)
class ProcessUse:
    """How much one process used a card in a sampling period, in percent of the period."""

    pid: int
    time_us: int
    sm_percent: int
    memory_percent: int


class Nvml:
    """An initialised NVML. Every reading is a figure or Unknown with NVML's own words."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def cards(self) -> tuple[NvidiaCard, ...]:
        """Every card that NVML shows to this process."""
        count = self._number("nvmlDeviceGetCount_v2")
        handles = [self._by_index(index) for index in range(count)] if isinstance(count, int) else []
        return tuple(self._card(handle) for handle in handles if isinstance(handle, c_void_p))

    def _card(self, handle: c_void_p) -> NvidiaCard:
        memory, bar1, name = _Memory(), _Memory(), ctypes.create_string_buffer(96)
        failed = self.call("nvmlDeviceGetMemoryInfo", handle, byref(memory))
        bar1_told = self.call("nvmlDeviceGetBAR1MemoryInfo", handle, byref(bar1))
        self.call("nvmlDeviceGetName", handle, name, c_uint(len(name)))
        major, minor, mig, pending = c_uint(), c_uint(), c_uint(), c_uint()
        capability = self.call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
        mig_told = self.call("nvmlDeviceGetMigMode", handle, byref(mig), byref(pending))
        return NvidiaCard(
            name=name.value.decode(errors="replace"),
            pci_id=self._pci_id(handle),
            target=capability or f"sm_{major.value}{minor.value}",
            vram_total_bytes=failed or int(memory.total),
            vram_used_bytes=failed or int(memory.used),
            bar1_bytes=bar1_told or int(bar1.total),
            link=self._link(handle, "Curr"),
            max_link=self._link(handle, "Max"),
            mig=mig_told or bool(mig.value),
        )

    def link(self, pci_id: str) -> Link | Unknown:
        """The card's link as it is now; it trains down when idle."""
        handle = self.handle(pci_id)
        return handle if isinstance(handle, Unknown) else self._link(handle, "Curr")

    def _link(self, handle: c_void_p, which: str) -> Link | Unknown:
        generation = self._number(f"nvmlDeviceGet{which}PcieLinkGeneration", handle)
        lanes = self._number(f"nvmlDeviceGet{which}PcieLinkWidth", handle)
        if isinstance(generation, Unknown):
            return generation
        if isinstance(lanes, Unknown):
            return lanes
        return Link(generation, lanes)

    def slowdowns(self, pci_id: str) -> tuple[str, ...] | Unknown:
        """Why the card runs slower than it could at this moment; empty when it doesn't."""
        handle = self.handle(pci_id)
        return handle if isinstance(handle, Unknown) else self.slowdowns_of(handle)

    def slowdowns_of(self, handle: c_void_p) -> tuple[str, ...] | Unknown:
        """The same for a card whose handle is known."""
        reasons = c_ulonglong()
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        if not hasattr(self._library, name):  # before driver 535
            name = "nvmlDeviceGetCurrentClocksThrottleReasons"
        failed = self.call(name, handle, byref(reasons))
        return failed or tuple(word for bit, word in SLOWDOWNS.items() if reasons.value & bit)

    def processes(self, pci_id: str) -> tuple[int, ...] | Unknown:
        """The ids of processes that compute on the card; the host's ids, also in a container."""
        handle = self.handle(pci_id)
        if isinstance(handle, Unknown):
            return handle
        count = c_uint(64)
        found = (ProcessInfo * count.value)()
        failed = self.call("nvmlDeviceGetComputeRunningProcesses_v3", handle, byref(count), found)
        return failed or tuple(int(one.pid) for one in found[: count.value])

    def uses(self, pci_id: str, since_us: int) -> tuple[ProcessUse, ...] | Unknown:
        """What processes did on the card since the time stamp of an earlier reading (0: since the first)."""
        handle = self.handle(pci_id)
        if isinstance(handle, Unknown):
            return handle
        count = c_uint(0)
        function = self._library.nvmlDeviceGetProcessUtilization
        since = c_ulonglong(since_us)
        code = function(handle, None, byref(count), since)
        if code == NOT_FOUND:
            return ()
        if code not in (0, INSUFFICIENT_SIZE):
            return self.words(code)
        found = (_Use * max(count.value, 1))()
        code = function(handle, found, byref(count), since)
        if code == NOT_FOUND:
            return ()
        if code:
            return self.words(code)
        return tuple(
            ProcessUse(int(one.pid), int(one.time_us), int(one.sm), int(one.memory))
            for one in found[: count.value]
            if one.time_us > since_us
        )

    def link_bytes_per_s(self, pci_id: str, *, up: bool) -> int | Unknown:
        """The traffic on the card's link in one direction (`up`: towards the host); takes 20 ms."""
        handle = self.handle(pci_id)
        if isinstance(handle, Unknown):
            return handle
        value = c_uint()
        direction = c_uint(0 if up else 1)  # NVML_PCIE_UTIL_TX_BYTES, _RX_BYTES
        failed = self.call("nvmlDeviceGetPcieThroughput", handle, direction, byref(value))
        return failed or int(value.value) * 1000  # it counts in KB/s

    def _by_index(self, index: int) -> c_void_p | Unknown:
        handle = c_void_p()
        return self.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)) or handle

    def handle(self, pci_id: str) -> c_void_p | Unknown:
        """NVML's handle of a card, which stays valid for the life of this process."""
        handle = c_void_p()
        failed = self.call("nvmlDeviceGetHandleByPciBusId_v2", c_char_p(pci_id.encode()), byref(handle))
        return failed or handle

    def _pci_id(self, handle: c_void_p) -> str:
        info = _PciInfo()
        self.call("nvmlDeviceGetPciInfo_v3", handle, byref(info))
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

    def _number(self, name: str, *before: c_void_p) -> int | Unknown:
        value = c_uint()
        return self.call(name, *before, byref(value)) or int(value.value)

    def call(self, name: str, *args: object) -> Unknown | None:
        """Call a function of NVML: None on success, else the reason for the failure."""
        function = getattr(self._library, name, None)
        if function is None:
            return Unknown(f"this NVML has no {name}")
        code = int(function(*args))
        return self.words(code) if code else None

    def words(self, code: int) -> Unknown:
        """NVML's words for a code."""
        text = self._library.nvmlErrorString
        text.restype = c_char_p
        return Unknown(f"NVML: {(text(code) or b'?').decode(errors='replace')}")


def open_nvml() -> Nvml | Unknown:
    """NVML, initialised for the life of this process; unknown where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return Unknown(f"no {LIBRARY} here")
    nvml = Nvml(library)
    return nvml.call("nvmlInit_v2") or nvml
