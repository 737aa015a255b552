"""Reads the kernel's files about cards: sysfs, the KFD topology, and fdinfo of DRM clients.

Functions take the root of the file tree, so that tests can construct one. Sizes are in bytes; what can't be
read is Unknown, with the reason. Formats: Linux Documentation/gpu/drm-usage-stats.rst, amdgpu's sysfs
(mem_info_*), drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from probes.core.unknown import Unknown
from probes.hardware.gpu_metrics import parse, slowdowns_between
from probes.records.facts import Card, KfdNode, Link
from probes.records.rows import Reading

# ---- files and directories ---------------------------------------------------------------------------


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


def listed(folder: Path) -> list[Path]:
    """What a directory holds, in order; nothing where it can't be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_there(path: Path) -> bool:
    """Whether something has this name, as far as this process may look."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises where a folder on the way can't be searched


def decimal(text: str | None) -> int:
    """A decimal figure; 0 for anything else."""
    return int(text) if text and text.strip().isdecimal() else 0


# ---- cards -------------------------------------------------------------------------------------------

PCI_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# transfers per second to the generation of PCI Express, as the kernel writes them
_LINK_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


def read_cards(root: Path) -> tuple[Card, ...]:
    """The graphics and compute cards under /sys/class/drm, connectors and render nodes left out."""
    places = [p for p in listed(root / "sys/class/drm") if re.fullmatch(r"card\d+", p.name)]
    nodes = read_kfd_nodes(root)
    return tuple(_card(place, nodes) for place in sorted(places, key=lambda p: int(p.name[4:])))


def _card(place: Path, nodes: Sequence[KfdNode]) -> Card:
    device = place / "device"
    pci_id = _uevent(device, "PCI_SLOT_NAME") or Unknown("not a PCI device")
    kfd = next((node for node in nodes if isinstance(pci_id, str) and node.pci_id == pci_id), None)
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
        target=kfd.target if kfd else unlisted,
        apu=kfd.apu if kfd else unlisted,
        partition=read_text(device / "current_compute_partition"),
        product=(_uevent(device, "PCI_ID") or "").lower() or Unknown("no PCI_ID in uevent"),
    )


def _uevent(device: Path, key: str) -> str | None:
    text = read_text(device / "uevent")
    lines = [] if isinstance(text, Unknown) else text.splitlines()
    return next((line[len(key) + 1 :] for line in lines if line.startswith(f"{key}=")), None)


def read_link(root: Path, pci_id: str, which: Literal["current", "max"] = "current") -> Link | Unknown:
    """The link of a PCI device as it is now, or the best it can train to, by sysfs."""
    device = root / "sys/bus/pci/devices" / pci_id
    speed, lanes = read_text(device / f"{which}_link_speed"), read_int(device / f"{which}_link_width")
    if isinstance(speed, Unknown):
        return speed
    if isinstance(lanes, Unknown):
        return lanes
    generation = _LINK_GENERATIONS.get(speed.split()[0] if speed else "")
    return Link(generation, lanes) if generation else Unknown(f"{which}_link_speed says {speed!r}")


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
    metrics = parse(data)
    return metrics if isinstance(metrics, Unknown) else slowdowns_between(None, metrics)


# ---- the KFD topology: GPUs that AMD's compute driver knows ------------------------------------------

UNKNOWN_TARGET = "unknown"  # old kernels print no gfx_target_version
_LOCAL_HEAPS = (1, 2)  # frame buffer, public and private (HSA_MEM_HEAP_TYPE in kfd_crat.h)


def read_kfd_nodes(root: Path) -> tuple[KfdNode, ...]:
    """The GPUs of the KFD topology."""
    nodes = []
    for place, words in kfd_gpus(root):
        minor = decimal(words.get("drm_render_minor"))
        nodes.append(
            KfdNode(
                node=int(place.name),
                target=gfx_target(decimal(words.get("gfx_target_version"))),
                render_minor=minor if minor else Unknown("no drm_render_minor in the topology"),
                apu=decimal(words.get("cpu_cores_count")) > 0,
                pci_id=_kfd_pci_id(words),
                local_bytes=_local_bytes(place),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.node))


def _kfd_pci_id(words: Mapping[str, str]) -> str | Unknown:
    """KFD's location_id holds bus, device and function as PCI packs them."""
    if "location_id" not in words:
        return Unknown("no location_id in the topology")
    domain, location = decimal(words.get("domain")), decimal(words["location_id"])
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _local_bytes(node: Path) -> int | Unknown:
    """The node's own memory by its banks; `local_mem_size` is useless: some kernels print 0 there."""
    total = 0
    for bank in listed(node / "mem_banks"):
        words = properties(bank)
        if decimal(words.get("heap_type")) in _LOCAL_HEAPS:
            total += decimal(words.get("size_in_bytes"))
    return total or Unknown("no local memory bank in the topology")


def kfd_gpus(root: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """The directory and the properties of each GPU; nodes without SIMD units are processors."""
    for place in listed(root / "sys/class/kfd/kfd/topology/nodes"):
        words = properties(place)
        if place.name.isdecimal() and decimal(words.get("simd_count")):
            yield place, words


def kfd_targets(root: Path) -> tuple[str, ...]:
    """The targets of this machine's AMD GPUs, each once and in order, as far as the kernel names them."""
    names = {gfx_target(decimal(words.get("gfx_target_version"))) for _, words in kfd_gpus(root)}
    return tuple(sorted(names - {UNKNOWN_TARGET}))


def gfx_target(version: int) -> str:
    """KFD's major*10000 + minor*100 + step as LLVM writes it: 80003 -> gfx803, 90010 -> gfx90a."""
    if version <= 0:
        return UNKNOWN_TARGET
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def properties(place: Path) -> Mapping[str, str]:
    """The words of the file `properties` in a directory of the topology; none where it can't be read."""
    try:
        text = (place / "properties").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.strip().partition(" ") for line in text.splitlines())}


# ---- fdinfo: what a process holds on each card -------------------------------------------------------

_FDINFO_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}
# the newer kernels' name first; the older is an alias of it, so never both
_RESIDENT_KEYS = ("drm-resident-", "drm-memory-")


@dataclass(frozen=True)
class Client:
    """One client of one card, by fdinfo: memory of each region ("vram", "gtt", "cpu") in bytes."""

    pci_id: str
    client_id: str
    resident_bytes: tuple[tuple[str, int], ...]
    evicted_vram_bytes: int | Unknown


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
    for prefix in _RESIDENT_KEYS:
        if not resident:
            resident = {
                k[len(prefix) :]: v for k, v in figures.items() if k.startswith(prefix) and v is not None
            }
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
    if not words or len(words) > 2 or not words[0].isdecimal() or unit not in _FDINFO_UNITS:
        return None
    return int(words[0]) * _FDINFO_UNITS[unit]


# ---- gauges of the spill probe -----------------------------------------------------------------------


def readings(root: Path, pci_id: str | Unknown, moment: str) -> tuple[Reading, ...]:
    """Every gauge of the card and of this process that the kernel offers, with its source."""
    rows = [
        Reading(moment, "sysfs mem_info_vram_used", used_bytes(root, pci_id, "vram")),
        Reading(moment, "sysfs mem_info_gtt_used", used_bytes(root, pci_id, "gtt")),
    ]
    clients = [client for client in read_clients(root) if client.pci_id == pci_id]
    for region in ("vram", "gtt"):
        sizes = [dict(client.resident_bytes).get(region) for client in clients]
        known = [size for size in sizes if size is not None]
        value = sum(known) if known else Unknown(f"no fdinfo of this process has {region}")
        rows.append(Reading(moment, f"fdinfo resident {region}", value))
    evicted = [client.evicted_vram_bytes for client in clients]
    amounts = [amount for amount in evicted if isinstance(amount, int)]
    lost = sum(amounts) if amounts else Unknown("no amd-evicted-vram in this process's fdinfo")
    rows.append(Reading(moment, "fdinfo evicted vram", lost))
    return tuple(rows)
