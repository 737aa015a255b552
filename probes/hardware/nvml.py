"""NVML, NVIDIA's management library, through ctypes; needs no package.

A reading is a figure, or Unknown with NVML's own words. Names, structures and codes are those of the NVML API
reference; cards are found by PCI id, 0000:03:00.0.
"""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import Structure, byref, c_char, c_char_p, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass

from probes.core.unknown import Unknown
from probes.records.facts import Link, NvidiaCard

LIBRARY = "libnvidia-ml.so.1"
# nvmlClocksEventReasons; idle, application clocks and sync boost slow no busy card down unasked
SLOWDOWNS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
NOT_FOUND, INSUFFICIENT_SIZE = 6, 7  # nvmlReturn_t
# NVML_FI_DEV_*
MEMORY_CELSIUS, POWER_MW, SENT_BYTES, RECEIVED_BYTES = 82, 186, 197, 198
COUNTED_BYTES = 2**32  # by the fields SENT_BYTES and RECEIVED_BYTES, which begin again then
SM_CLOCK, MEMORY_CLOCK = 1, 2  # nvmlClockType_t
MOST_PROCESSES = 128
_MEMORY_V2 = 2 << 24
_VALUE_KINDS = {0: "d", 1: "I", 2: "Q", 3: "Q", 4: "q", 5: "i", 6: "H"}  # nvmlValueType_t as struct's codes
_NO_FIGURE = 0xFFFFFFFFFFFFFFFF


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


class _Memory2(Structure):
    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class _Utilization(Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Field(Structure):
    _fields_ = (
        ("field", c_uint),
        ("scope", c_uint),
        ("at_us", c_longlong),
        ("latency_us", c_longlong),
        ("kind", c_uint),
        ("code", c_int),
        ("value", ctypes.c_ubyte * 8),
    )


class _ProcessInfo(Structure):
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
            link=self.link_of(handle),
            max_link=self.link_of(handle, "Max"),
            mig=mig_told or bool(mig.value),
        )

    def link_of(self, handle: c_void_p, which: str = "Curr") -> Link | Unknown:
        """A card's link as it is now, trained down when idle; or with "Max" at its best."""
        generation = self._number(f"nvmlDeviceGet{which}PcieLinkGeneration", handle)
        lanes = self._number(f"nvmlDeviceGet{which}PcieLinkWidth", handle)
        if isinstance(generation, Unknown):
            return generation
        if isinstance(lanes, Unknown):
            return lanes
        return Link(generation, lanes)

    def slowdowns_of(self, handle: c_void_p) -> tuple[str, ...] | Unknown:
        """Why a card runs slower than it could at this moment; empty when it doesn't."""
        reasons = c_ulonglong()
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        if not hasattr(self._library, name):  # before driver 535
            name = "nvmlDeviceGetCurrentClocksThrottleReasons"
        failed = self.call(name, handle, byref(reasons))
        return failed or tuple(word for bit, word in SLOWDOWNS.items() if reasons.value & bit)

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
        code = self.code(name, *args)
        if isinstance(code, Unknown):
            return code
        return self.words(code) if code else None

    def code(self, name: str, *args: object) -> int | Unknown:
        """Call a function of NVML: its nvmlReturn_t, 0 on success."""
        function = getattr(self._library, name, None)
        return int(function(*args)) if function else Unknown(f"this NVML has no {name}")

    def words(self, code: int) -> Unknown:
        """NVML's words for a code."""
        text = self._library.nvmlErrorString
        text.restype = c_char_p
        return Unknown(f"NVML: {(text(code) or b'?').decode(errors='replace')}")


@dataclass(frozen=True)
class ProcessUtilization:
    """How much one process used a card in a sampling period, in percent of the period."""

    pid: int
    time_us: int
    sm_percent: int
    memory_percent: int


class NvmlCard:
    """A card by its handle. A reading is a figure or Unknown with NVML's own words, also once it is lost."""

    def __init__(self, nvml: Nvml, pci_id: str) -> None:
        self._nvml, self._pci_id = nvml, pci_id
        self._handle: c_void_p | Unknown = nvml.handle(pci_id)

    def _found(self) -> c_void_p | Unknown:
        if isinstance(self._handle, Unknown):  # it may come back
            self._handle = self._nvml.handle(self._pci_id)
        return self._handle

    def _ask(self, name: str, *more: object) -> Unknown | None:
        handle = self._found()
        return handle if isinstance(handle, Unknown) else self._nvml.call(name, handle, *more)

    def utilization(self) -> tuple[int, int] | Unknown:
        """Percent of the driver's sampling period in which a kernel ran, and in which memory was accessed."""
        rates = _Utilization()
        return self._ask("nvmlDeviceGetUtilizationRates", byref(rates)) or (int(rates.gpu), int(rates.memory))

    def used_bytes(self) -> int | Unknown:
        """VRAM in use, without what the driver keeps for itself, as nvidia-smi shows it."""
        memory = _Memory2(version=ctypes.sizeof(_Memory2) | _MEMORY_V2)
        return self._ask("nvmlDeviceGetMemoryInfo_v2", byref(memory)) or int(memory.used)

    def mhz(self, clock: int) -> int | Unknown:
        """A clock at this moment."""
        return self._number("nvmlDeviceGetClockInfo", c_int(clock))

    def celsius(self) -> int | Unknown:
        """The GPU's one sensor."""
        return self._number("nvmlDeviceGetTemperature", c_int(0))

    def fan_percent(self) -> int | Unknown:
        """The intended speed of the fan; cards without one refuse."""
        return self._number("nvmlDeviceGetFanSpeed")

    def power_mw(self) -> int | Unknown:
        """The power of cards without the instant field; an average over a second on newer ones."""
        return self._number("nvmlDeviceGetPowerUsage")

    def energy_mj(self) -> int | Unknown:
        """The energy since the driver was loaded."""
        counted = c_ulonglong()
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", byref(counted)) or int(counted.value)

    def memory_bytes_per_s(self) -> float | Unknown:
        """What the memory can move at its highest clock: two transfers a cycle on each line of the bus."""
        clock = self._number("nvmlDeviceGetMaxClockInfo", c_int(MEMORY_CLOCK))
        width = self._number("nvmlDeviceGetMemoryBusWidth")
        if isinstance(clock, Unknown):
            return clock
        return width if isinstance(width, Unknown) else clock * 1e6 * 2 * width / 8

    def slowdowns(self) -> tuple[str, ...] | Unknown:
        """Why the card runs slower than it could at this moment; empty when it doesn't."""
        handle = self._found()
        return handle if isinstance(handle, Unknown) else self._nvml.slowdowns_of(handle)

    def link(self) -> Link | Unknown:
        """The card's link as it is now; it trains down when idle."""
        handle = self._found()
        return handle if isinstance(handle, Unknown) else self._nvml.link_of(handle)

    def link_bytes_per_s(self, *, up: bool) -> int | Unknown:
        """The traffic on the card's link in one direction (`up`: towards the host); takes 20 ms."""
        rate = self._number("nvmlDeviceGetPcieThroughput", c_uint(0 if up else 1))  # NVML_PCIE_UTIL_*_BYTES
        return rate if isinstance(rate, Unknown) else rate * 1000  # it counts in KB/s

    def fields(self, ids: Sequence[int]) -> dict[int, float | Unknown]:
        """Values by field id, in one call."""
        values = (_Field * len(ids))(*(_Field(field=item) for item in ids))
        failed = self._ask("nvmlDeviceGetFieldValues", c_int(len(ids)), values)
        return {int(item.field): failed or self._value(item) for item in values}

    def _value(self, field: _Field) -> float | Unknown:
        if field.code:
            return self._nvml.words(int(field.code))
        kind = _VALUE_KINDS.get(int(field.kind))
        if kind is None:
            return Unknown(f"NVML: a value of kind {field.kind}")
        (value,) = struct.unpack_from(f"={kind}", bytes(field.value))
        return float(value)

    def _number(self, name: str, *before: object) -> int | Unknown:
        value = c_uint()
        return self._ask(name, *before, byref(value)) or int(value.value)

    def computing(self) -> dict[int, int | Unknown] | Unknown:
        """The processes that compute on the card, with the bytes that each holds; see `processes`."""
        return self._running("Compute")

    def processes(self) -> tuple[tuple[int, int | Unknown], ...] | Unknown:
        """Process ids (the host's, also in a container) with the bytes that each holds, graphics included."""
        computing, drawing = self.computing(), self._running("Graphics")
        if isinstance(computing, Unknown):
            return computing
        return tuple(sorted((computing | ({} if isinstance(drawing, Unknown) else drawing)).items()))

    def _running(self, kind: str) -> dict[int, int | Unknown] | Unknown:
        count, each = c_uint(MOST_PROCESSES), (_ProcessInfo * MOST_PROCESSES)()
        failed = self._ask(f"nvmlDeviceGet{kind}RunningProcesses_v3", byref(count), each)
        return failed or {
            int(process.pid): Unknown("hidden by the driver")
            if process.used == _NO_FIGURE
            else int(process.used)
            for process in each[: count.value]
        }

    def uses(self, since_us: int) -> tuple[ProcessUtilization, ...] | Unknown:
        """What processes did on the card since the time stamp of an earlier reading (0: since the first)."""
        handle = self._found()
        if isinstance(handle, Unknown):
            return handle
        name, since, count = "nvmlDeviceGetProcessUtilization", c_ulonglong(since_us), c_uint(0)
        code = self._nvml.code(name, handle, None, byref(count), since)
        each = (_Use * max(count.value, 1))()
        if code in (0, INSUFFICIENT_SIZE):
            code = self._nvml.code(name, handle, each, byref(count), since)
        if isinstance(code, Unknown) or code not in (0, NOT_FOUND):
            return code if isinstance(code, Unknown) else self._nvml.words(code)
        return tuple(
            ProcessUtilization(int(sample.pid), int(sample.time_us), int(sample.sm), int(sample.memory))
            for sample in each[: 0 if code else count.value]
            if sample.time_us > since_us
        )


def open_nvml() -> Nvml | Unknown:
    """NVML, initialised for the life of this process; unknown where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return Unknown(f"no {LIBRARY} here")
    nvml = Nvml(library)
    return nvml.call("nvmlInit_v2") or nvml


def open_card(pci_id: str | Unknown) -> NvmlCard | Unknown:
    """A card by its PCI id, where that is known and NVML is here."""
    if isinstance(pci_id, Unknown):
        return pci_id
    nvml = open_nvml()
    return nvml if isinstance(nvml, Unknown) else NvmlCard(nvml, pci_id)
