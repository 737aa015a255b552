"""Samples, trees and a fake NVML for the tests of the watch."""

import ctypes
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from probe_trees import GIB, HOST, WX4100, Tree, card, fdinfo, gpu_node, lay

from probes.core.unknown import Unknown
from probes.records.watch import CardSample, Look, ProcessUse, Sample, Subject, WatchedCard

NONE = Unknown("not here")
WATCHED = WatchedCard("Radeon \x1b[31m<b>", "amdgpu", WX4100, 4 * GIB, NONE)
SUBJECT = Subject("2026-11-21T23:00:00Z", "bench", 0.25, (WATCHED,), ())


def look(**values: float) -> Look:
    return Look(values, {})


def sample(
    at_s: float,
    *,
    late_s: float | None = 0.0,
    slow: tuple[str, ...] | Unknown = (),
    uses: tuple[ProcessUse, ...] | Unknown = (),
    **values: float,
) -> Sample:
    return Sample(at_s, late_s, look(cpu_percent=50.0), (CardSample(Look(values, {}), slow, uses),))


def table_1_3(**fields: int) -> bytes:
    """A gpu_metrics 1.3 table, absent fields as firmware writes them."""
    data = bytearray(b"\xff" * 120)
    data[:4] = struct.pack("<HBB", 120, 1, 3)
    places = {
        "edge": (4, "H"),
        "hotspot": (6, "H"),
        "memory": (8, "H"),
        "power": (22, "H"),
        "status": (68, "I"),
    }
    for name, value in {"status": 0, **fields}.items():
        at, form = {**places, "independent": (112, "Q")}[name]
        struct.pack_into(f"<{form}", data, at, value)
    return bytes(data)


HWMON: Tree = {
    "temp1_label": "edge",
    "temp1_input": "61000",
    "temp2_label": "junction",
    "temp2_input": "74000",
    "temp3_label": "mem",
    "temp3_input": "68000",
    "freq1_label": "sclk",
    "freq1_input": "1201000000",
    "freq2_label": "mclk",
    "freq2_input": "1500000000",
    "power1_average": "38000000",
    "pwm1": "102",
}
PROC: Tree = {
    "proc/stat": "cpu  100 0 100 1000 0 0 0 0 0 0\ncpu0 1 2 3\n",
    "proc/diskstats": " 8 0 sda 1 0 200 0 1 0 40 0 0 0 0\n 8 1 sda1 1 0 200 0 1 0 40 0 0 0 0\n",
    "sys/fs/cgroup/memory.current": "1048576\n",
}


def amd_tree(root: Path, **more: str | bytes) -> Path:
    """A WX 4100 with every sensor, and one process that has evicted buffers."""
    files = HOST | PROC | gpu_node(1, 80003, 3) | card("card0", WX4100, 4 * GIB, 8 * GIB)
    device = "sys/class/drm/card0/device"
    files |= {f"{device}/hwmon/hwmon2/{name}": text for name, text in HWMON.items()}
    files |= {f"{device}/gpu_busy_percent": "97\n", f"{device}/mem_busy_percent": "40\n"}
    files |= {f"{device}/gpu_metrics": table_1_3(), "proc/77/comm": "python3\n"}
    files |= {f"{device}/{name}": text for name, text in more.items()}
    keys = {"drm_resident_vram": "2048 KiB", "drm_resident_gtt": "1 MiB", "amd_evicted_vram": "512 KiB"}
    files["proc/77/fdinfo/5"] = fdinfo(9, **keys)
    lay(root, files)
    (root / "proc/77/fd").mkdir(parents=True)
    (root / "proc/77/fd/5").symlink_to("/dev/dri/renderD128")
    return root


class FakeNvml:
    """A libnvidia-ml of one card. `lost` makes every call fail as after a card has fallen off the bus."""

    LOST = 15

    class Words:
        restype: object = None

        def __call__(self, code: int) -> bytes:
            return b"GPU is lost" if code == FakeNvml.LOST else b"Not Supported"

    nvmlErrorString = Words()

    def __init__(self, *, gpm: bool = True, fields: Mapping[int, int] | None = None) -> None:
        self.lost = False
        self.gpm = gpm
        self.fields = {82: 55, 186: 250_000, 197: 10**9, 198: 2 * 10**9} if fields is None else dict(fields)
        self.energy_mj = 5_000_000
        self.sampled = 0
        self.gpm_values = {2: 80.0, 3: 30.0, 5: 62.5, 10: 25.0, 20: 1.0, 21: 2.0}

    def __getattr__(self, name: str) -> Any:
        if name not in FakeNvml.NUMBERS:
            raise AttributeError(name)

        def number(*args: Any) -> int:
            if self.lost:
                return self.LOST
            value = FakeNvml.NUMBERS[name]
            if value is None:
                return 3
            args[-1]._obj.value = value
            return 0

        return number

    NUMBERS: ClassVar[Mapping[str, int | None]] = {
        "nvmlDeviceGetCount_v2": 1,
        "nvmlDeviceGetTemperature": 48,
        "nvmlDeviceGetFanSpeed": None,
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetMaxClockInfo": 2619,
        "nvmlDeviceGetMemoryBusWidth": 5120,
        "nvmlDeviceGetPowerUsage": 249_000,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x04,
        "nvmlDeviceGetMigMode": 0,
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkGeneration": 3,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
    }

    def nvmlDeviceGetHandleByIndex_v2(self, _index: Any, handle: Any) -> int:
        handle._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, _pci_id: Any, handle: Any) -> int:
        handle._obj.value = 1
        return 0

    def nvmlDeviceGetName(self, _handle: Any, name: Any, _size: Any) -> int:
        name.value = b"NVIDIA H100"
        return 0

    def nvmlDeviceGetPciInfo_v3(self, _handle: Any, info: Any) -> int:
        info._obj.domain, info._obj.bus, info._obj.device = 0, 0x1B, 0
        return 0

    def nvmlDeviceGetMemoryInfo(self, _handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 * GIB, 2 * GIB
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, _handle: Any, memory: Any) -> int:
        memory._obj.used = GIB
        return self.LOST if self.lost else 0

    def nvmlDeviceGetUtilizationRates(self, _handle: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = 99, 12
        return self.LOST if self.lost else 0

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: Any, energy: Any) -> int:
        energy._obj.value = self.energy_mj
        return self.LOST if self.lost else 0

    def nvmlDeviceGetFieldValues(self, _handle: Any, _count: Any, fields: Any) -> int:
        for one in fields:
            one.code = 0 if one.field in self.fields else 3
            one.kind = 3
            struct.pack_into("=Q", one.value, 0, self.fields.get(one.field, 0))
        return self.LOST if self.lost else 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _handle: Any, count: Any, found: Any) -> int:
        found[0].pid, found[0].used = 4242, GIB // 2
        count._obj.value = 1
        return self.LOST if self.lost else 0

    def nvmlGpmQueryDeviceSupport(self, _handle: Any, support: Any) -> int:
        support._obj.supported = int(self.gpm)
        return 0

    def nvmlGpmSampleAlloc(self, pointer: Any) -> int:
        pointer._obj.value = 16
        return 0

    def nvmlGpmSampleGet(self, _handle: Any, _sample: ctypes.c_void_p) -> int:
        self.sampled += 1
        return self.LOST if self.lost else 0

    def nvmlGpmMetricsGet(self, request: Any) -> int:
        values = self.gpm_values
        for at in range(request._obj.count):
            request._obj.metrics[at].value = values[request._obj.metrics[at].metric]
            request._obj.metrics[at].code = 0
        return 0
