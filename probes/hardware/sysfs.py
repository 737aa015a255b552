"""Reads where memory is from the kernel's files. Every reader takes the root of the file tree; all in bytes.

Formats: Linux Documentation/gpu/drm-usage-stats.rst, amdgpu sysfs (mem_info_*), KFD topology.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from probes.core.unknown import Unknown
from probes.hardware.kfd import decimal, gfx_target, gpu_nodes, listed, properties
from probes.records.facts import Card, KfdNode, Link
from probes.records.rows import Reading

HEADER = 4  # bytes: size, format, content
JOULES_PER_COUNT = 2.0**-16  # of the energy counters of tables 1.4 and later
_ABSENT = {"H": 0xFFFF, "I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}  # what firmware writes where it has nothing

_Layout = Mapping[str, tuple[int, str]]  # field -> offset, form
_V1_1: _Layout = {
    "edge": (4, "H"),
    "hotspot": (6, "H"),
    "memory": (8, "H"),
    "power": (22, "H"),
    "core": (54, "H"),
    "clock": (58, "H"),
    "status": (68, "I"),
}
_MI300: _Layout = {"hotspot": (4, "H"), "memory": (6, "H"), "power": (10, "H")}
_MI300_BITS = ("hardware hot", "power cap", "socket hot", "voltage regulator hot", "memory hot")


def _counted(at: int) -> _Layout:
    """The firmware's ticks, and after them those of each of MI300's throttlers."""
    return {field: (at + 4 * place, "I") for place, field in enumerate(("ticks", *_MI300_BITS))}


_V1_7: _Layout = {**_MI300, "energy": (24, "Q"), "core": (296, "H"), "clock": (336, "H"), **_counted(40)}
_V2_1: _Layout = {"core": (76, "H"), "clock": (80, "H"), "status": (108, "I")}
_LAYOUTS: Mapping[tuple[int, int], _Layout] = {
    (1, 0): {**_V1_1, "edge": (16, "H"), "hotspot": (18, "H"), "memory": (20, "H"), "power": (34, "H")},
    (1, 1): _V1_1,
    (1, 2): _V1_1,
    (1, 3): {**_V1_1, "independent": (112, "Q")},
    (1, 4): {**_MI300, "energy": (24, "Q"), "core": (240, "H"), "clock": (280, "H"), "status": (40, "I")},
    (1, 5): {**_MI300, "energy": (56, "Q"), "core": (280, "H"), "clock": (320, "H"), "status": (72, "I")},
    (1, 6): {**_MI300, "energy": (16, "Q"), "core": (264, "H"), "clock": (304, "H"), **_counted(32)},
    (1, 7): _V1_7,
    (1, 8): _V1_7,
    (2, 0): {"core": (80, "H"), "clock": (84, "H"), "status": (112, "I")},
    (2, 1): _V2_1,
    (2, 2): {**_V2_1, "independent": (120, "Q")},
    (2, 3): {**_V2_1, "independent": (120, "Q")},
    (2, 4): {**_V2_1, "independent": (120, "Q")},
    (3, 0): {
        "core": (174, "H"),
        "clock": (186, "H"),
        "hardware hot": (228, "I"),
        "power cap": (232, "I"),
        "fast power cap": (236, "I"),
        "slow power cap": (240, "I"),
        "CPU cores hot": (244, "I"),
        "GPU hot": (248, "I"),
        "SoC hot": (252, "I"),
    },
}
# fields that count how long each throttler was active; all others are no residencies
_PLAIN = {"edge", "hotspot", "memory", "power", "energy", "core", "clock", "status", "independent", "ticks"}
_INDEPENDENT = (
    (range(8), "power cap"),
    (range(16, 21), "current limit"),
    (range(21, 23), "peak current limit"),
    (range(23, 24), "current limit"),
    (range(32, 34), "hot"),
    (range(34, 35), "memory hot"),
    (range(35, 38), "hot"),
    (range(38, 42), "voltage regulator hot"),
    (range(42, 44), "liquid hot"),
    (range(44, 46), "voltage regulator hot"),
    (range(46, 48), "hardware hot"),
)
_GAUGES = {  # field -> gauge and the factor that makes the gauge's unit of it
    "edge": ("edge_celsius", 1.0),
    "hotspot": ("hotspot_celsius", 1.0),
    "memory": ("memory_celsius", 1.0),
    "power": ("power_w", 1.0),
    "core": ("core_mhz", 1.0),
    "clock": ("memory_mhz", 1.0),
    "energy": ("energy_j", JOULES_PER_COUNT),
}


@dataclass(frozen=True)
class Metrics:
    """One table: gauges by name, and what it says about throttling."""

    form: tuple[int, int]
    values: Mapping[str, float]
    status: tuple[str, ...] | Unknown  # at this moment
    residencies: Mapping[str, int]  # time in each throttler since the driver started, in the firmware's unit


def parse(data: bytes) -> Metrics | Unknown:
    """A whole table; unknown for a form that isn't in our list, or one that is cut short."""
    form = (data[2], data[3]) if len(data) >= HEADER else (0, 0)
    layout = _LAYOUTS.get(form)
    if layout is None or len(data) < max(at + struct.calcsize(how) for at, how in layout.values()):
        return Unknown(f"gpu_metrics of form {form[0]}.{form[1]} isn't known here")
    found = {}
    for field, (at, how) in layout.items():
        (figure,) = struct.unpack_from(f"<{how}", data, at)
        if figure != _ABSENT[how]:
            found[field] = figure
    return Metrics(
        form=form,
        values={_GAUGES[k][0]: v * _GAUGES[k][1] for k, v in found.items() if k in _GAUGES},
        status=_status(form, found, layout),
        residencies={field: figure for field, figure in found.items() if field not in _PLAIN},
    )


def _status(form: tuple[int, int], found: Mapping[str, int], layout: _Layout) -> tuple[str, ...] | Unknown:
    if "status" not in layout:
        return Unknown("this table counts residencies: two readings show what was active between them")
    if found.get("independent"):
        return _independent(found["independent"])
    if "status" not in found:
        return Unknown("the card's firmware doesn't report its throttle status")
    status = found["status"]
    if form in ((1, 4), (1, 5)):
        return tuple(word for bit, word in enumerate(_MI300_BITS) if status >> bit & 1) or _bare(status)
    return _bare(status)


def _bare(status: int) -> tuple[str, ...]:
    """Bits whose meaning depends on the chip."""
    return (f"status {status:#x}",) if status else ()


def _independent(status: int) -> tuple[str, ...]:
    words = [word for bits, word in _INDEPENDENT if any(status >> bit & 1 for bit in bits)]
    return tuple(dict.fromkeys(words)) or _bare(status)


def slowdowns_between(before: Metrics | None, now: Metrics) -> tuple[str, ...] | Unknown:
    """Why the card was slowed down: at this moment, or since `before` where the table counts residencies."""
    if not now.residencies:
        return now.status
    if before is None or before.form != now.form:
        return Unknown("the first reading of a counter says nothing of now")
    return tuple(
        word for word, ticks in now.residencies.items() if ticks > before.residencies.get(word, ticks)
    )


FDINFO_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}
# the newer kernels' name first; the older is an alias of it, so never both
RESIDENT_KEYS = ("drm-resident-", "drm-memory-")
# transfers per second to the generation of PCI Express, as the kernel writes them
LINK_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
LOCAL_HEAPS = (1, 2)  # frame buffer, public and private (HSA_MEM_HEAP_TYPE in kfd_crat.h)
PCI_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Client:
    """One client of one card, by fdinfo: memory of each region ("vram", "gtt", "cpu") in bytes."""

    pci_id: str
    client_id: str
    resident_bytes: tuple[tuple[str, int], ...]
    evicted_vram_bytes: int | Unknown


def read_text(path: Path) -> str | Unknown:
    """The stripped content of a small file, or why it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return Unknown(f"no {path.name} here")
    except OSError as error:
        return Unknown(f"{path.name}: {error.strerror}")


def read_int(path: Path) -> int | Unknown:
    """The number in a file of one decimal figure, or why there is none."""
    text = read_text(path)
    if isinstance(text, Unknown):
        return text
    return int(text) if text.isdecimal() else Unknown(f"{path.name} says {text[:40]!r}")


def read_cards(root: Path) -> tuple[Card, ...]:
    """The graphics and compute cards under /sys/class/drm, connectors and render nodes left out."""
    places = [p for p in listed(root / "sys/class/drm") if re.fullmatch(r"card\d+", p.name)]
    nodes = read_kfd_nodes(root)
    return tuple(_card(place, nodes) for place in sorted(places, key=lambda p: int(p.name[4:])))


def _card(place: Path, nodes: Sequence[KfdNode]) -> Card:
    device = place / "device"
    pci_id = _uevent(device, "PCI_SLOT_NAME") or Unknown("not a PCI device")
    mine = [node for node in nodes if isinstance(pci_id, str) and node.pci_id == pci_id]
    unlisted = Unknown("no KFD node has this card's PCI id")
    return Card(
        name=place.name,
        driver=_uevent(device, "DRIVER") or "unknown",
        pci_id=pci_id,
        vram_total_bytes=read_int(device / "mem_info_vram_total"),
        vram_used_bytes=read_int(device / "mem_info_vram_used"),
        gtt_total_bytes=read_int(device / "mem_info_gtt_total"),
        gtt_used_bytes=read_int(device / "mem_info_gtt_used"),
        link_speed=read_text(device / "current_link_speed"),
        link_width=read_int(device / "current_link_width"),
        max_link_speed=read_text(device / "max_link_speed"),
        max_link_width=read_int(device / "max_link_width"),
        visible_vram_bytes=read_int(device / "mem_info_vis_vram_total"),
        target=mine[0].target if mine else unlisted,
        apu=mine[0].apu if mine else unlisted,
        partition=read_text(device / "current_compute_partition"),
        product=(_uevent(device, "PCI_ID") or "").lower() or Unknown("no PCI_ID in uevent"),
    )


def read_link(root: Path, pci_id: str, which: Literal["current", "max"] = "current") -> Link | Unknown:
    """The link of a PCI device as it is now, or the best it can train to, by sysfs."""
    device = root / "sys/bus/pci/devices" / pci_id
    speed, lanes = read_text(device / f"{which}_link_speed"), read_int(device / f"{which}_link_width")
    if isinstance(speed, Unknown):
        return speed
    if isinstance(lanes, Unknown):
        return lanes
    generation = LINK_GENERATIONS.get(speed.split()[0] if speed else "")
    return Link(generation, lanes) if generation else Unknown(f"{which}_link_speed says {speed!r}")


def _uevent(device: Path, key: str) -> str | None:
    text = read_text(device / "uevent")
    lines = [] if isinstance(text, Unknown) else text.splitlines()
    return next((line[len(key) + 1 :] for line in lines if line.startswith(f"{key}=")), None)


def read_kfd_nodes(root: Path) -> tuple[KfdNode, ...]:
    """The GPUs of the KFD topology."""
    nodes = []
    for place, found in gpu_nodes(root):
        minor = decimal(found.get("drm_render_minor"))
        nodes.append(
            KfdNode(
                node=int(place.name),
                target=gfx_target(decimal(found.get("gfx_target_version"))),
                render_minor=minor if minor else Unknown("no drm_render_minor in the topology"),
                apu=decimal(found.get("cpu_cores_count")) > 0,
                pci_id=_kfd_pci_id(found),
                local_bytes=_local_bytes(place),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.node))


def _kfd_pci_id(found: Mapping[str, str]) -> str | Unknown:
    """KFD's location_id holds bus, device and function as PCI packs them."""
    if "location_id" not in found:
        return Unknown("no location_id in the topology")
    domain, location = decimal(found.get("domain")), decimal(found["location_id"])
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _local_bytes(node: Path) -> int | Unknown:
    """The node's own memory by its banks; `local_mem_size` is useless: some kernels print 0 there."""
    total = 0
    for bank in listed(node / "mem_banks"):
        found = properties(bank)
        if decimal(found.get("heap_type")) in LOCAL_HEAPS:
            total += decimal(found.get("size_in_bytes"))
    return total or Unknown("no local memory bank in the topology")


def read_clients(root: Path, pid: str = "self") -> tuple[Client, ...]:
    """The process's DRM clients, each once: duplicated file descriptors share a client id."""
    clients: dict[tuple[str, str], Client] = {}
    for place in listed(root / "proc" / pid / "fdinfo"):
        text = read_text(place)
        client = None if isinstance(text, Unknown) else parse_fdinfo(text)
        if client:
            clients.setdefault((client.pci_id, client.client_id), client)
    return tuple(clients.values())


def parse_fdinfo(text: str) -> Client | None:
    """One fdinfo file; None when it isn't a DRM client's. Figures in an unknown unit are left out."""
    keys = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "drm-client-id" not in keys or "drm-pdev" not in keys:
        return None
    figures = {key: _quantity(value) for key, value in keys.items()}
    resident: dict[str, int] = {}
    for prefix in RESIDENT_KEYS:
        found = {k[len(prefix) :]: v for k, v in figures.items() if k.startswith(prefix) and v is not None}
        if found and not resident:
            resident = found
    evicted = figures.get("amd-evicted-vram")
    return Client(
        pci_id=keys["drm-pdev"].strip(),
        client_id=keys["drm-client-id"].strip(),
        resident_bytes=tuple(sorted(resident.items())),
        evicted_vram_bytes=evicted if evicted is not None else Unknown("no amd-evicted-vram in fdinfo"),
    )


def _quantity(text: str) -> int | None:
    """`1024 KiB`, `7 MiB` or `0`, in bytes; None for anything else."""
    words = text.split()
    unit = words[1] if len(words) == 2 else ""
    if not words or len(words) > 2 or not words[0].isdecimal() or unit not in FDINFO_UNITS:
        return None
    return int(words[0]) * FDINFO_UNITS[unit]


def used_bytes(root: Path, pci_id: str | Unknown, region: Literal["vram", "gtt"]) -> int | Unknown:
    """VRAM in use on the card, or system memory mapped for it (amdgpu's spill indicator), all processes."""
    if isinstance(pci_id, Unknown):
        return pci_id
    return read_int(root / "sys/bus/pci/devices" / pci_id / f"mem_info_{region}_used")


def slowdowns(root: Path, pci_id: str | Unknown) -> tuple[str, ...] | Unknown:
    """Why an AMD card throttles at this moment, by its gpu_metrics; empty when it doesn't."""
    if isinstance(pci_id, Unknown):
        return pci_id
    try:
        data = (root / "sys/bus/pci/devices" / pci_id / "gpu_metrics").read_bytes()
    except OSError as error:
        return Unknown(f"gpu_metrics: {error.strerror}")
    found = parse(data)
    return found if isinstance(found, Unknown) else slowdowns_between(None, found)


def readings(root: Path, pci_id: str | Unknown, moment: str) -> tuple[Reading, ...]:
    """Every gauge of the card and of this process that the kernel offers, with its source."""
    found = [
        Reading(moment, "sysfs mem_info_vram_used", used_bytes(root, pci_id, "vram")),
        Reading(moment, "sysfs mem_info_gtt_used", used_bytes(root, pci_id, "gtt")),
    ]
    mine = [client for client in read_clients(root) if client.pci_id == pci_id]
    for region in ("vram", "gtt"):
        sizes = [dict(client.resident_bytes).get(region) for client in mine]
        known = [size for size in sizes if size is not None]
        value = sum(known) if known else Unknown(f"no fdinfo of this process has {region}")
        found.append(Reading(moment, f"fdinfo resident {region}", value))
    evicted = [client.evicted_vram_bytes for client in mine]
    amounts = [amount for amount in evicted if isinstance(amount, int)]
    lost = sum(amounts) if amounts else Unknown("no amd-evicted-vram in this process's fdinfo")
    found.append(Reading(moment, "fdinfo evicted vram", lost))
    return tuple(found)
