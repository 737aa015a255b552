"""The gate to NVML, NVIDIA's management library, through ctypes; needs no package.

What it refuses is unknown.

Names, structures and codes: NVML API reference. Handles are looked up by PCI id, 0000:03:00.0.
"""

import ctypes
from ctypes import Structure, byref, c_char, c_char_p, c_uint, c_ulonglong, c_void_p

from probes.records.facts import Link, NvidiaCard
from probes.shared.unknown import Unknown

LIBRARY = "libnvidia-ml.so.1"
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


def open_nvml() -> Nvml | Unknown:
    """NVML, initialised for the life of this process; unknown where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return Unknown(f"no {LIBRARY} here")
    nvml = Nvml(library)
    return nvml.call("nvmlInit_v2") or nvml
