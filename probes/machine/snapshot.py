"""Reads what this machine has: kernel, memory and its limits, cards. Readers take the tree's root."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from probes.machine import hostload, surroundings
from probes.machine.sysfs import PCI_ID, read_cards, read_int, read_kfd_nodes, read_text
from probes.records.schema import Card, Machine, NvidiaCard, TorchFacts, Unknown
from probes.shared.kfd import is_there

GIB = 2**30
LEAST_FLOOR = 2 * GIB


def describe(root: Path, torch: TorchFacts | Unknown, nvidia: tuple[NvidiaCard, ...] = ()) -> Machine:
    """The snapshot of this machine; the facts from torch and NVML are passed in."""
    kernel = read_text(root / "proc/sys/kernel/osrelease")
    around = surroundings.describe(root)
    files = tuple(file.path for file in around.files)
    limit = cgroup_limit_bytes(root)
    return Machine(
        host=socket.gethostname(),
        kernel=kernel,
        wsl="/dev/dxg" in files or (isinstance(kernel, str) and "microsoft" in kernel.lower()),
        container=around.container != surroundings.NOT_SEEN,
        cpus=len(os.sched_getaffinity(0)),
        ram_total_bytes=meminfo_bytes(root, "MemTotal"),
        ram_available_bytes=available_bytes(root),
        cgroup_limit_bytes=limit,
        gpu_driver=gpu_driver(root),
        device_files=files,
        cards=read_cards(root),
        kfd_nodes=read_kfd_nodes(root),
        torch=torch,
        nvidia=nvidia,
        surroundings=around,
    )


def gpu_driver(root: Path) -> str | Unknown:
    """The kernel driver's version. amdgpu in the kernel's own tree has none: then the kernel's release."""
    nvidia = read_text(root / "proc/driver/nvidia/version")
    if isinstance(nvidia, str):
        number = re.search(r"\b\d+\.\d+(\.\d+)?\b", nvidia)
        return f"nvidia {number.group()}" if number else Unknown("no number in /proc/driver/nvidia/version")
    if is_there(root / "sys/module/amdgpu"):
        version = read_text(root / "sys/module/amdgpu/version")
        return f"amdgpu {version}" if isinstance(version, str) else "amdgpu of the running kernel"
    return Unknown("neither nvidia nor amdgpu is loaded, or their files are hidden here")


def meminfo_bytes(root: Path, key: str) -> int | Unknown:
    """A figure of /proc/meminfo."""
    text = read_text(root / "proc/meminfo")
    return text if isinstance(text, Unknown) else hostload.memory_bytes(text, key)


@dataclass(frozen=True)
class _Cgroup:
    """Where a version of the kernel's memory controller keeps its figures."""

    limit: str
    used: str
    stat: str
    cache_key: str


# version 2 first; under version 1 the container sees its own controller at the mount's top
_CGROUPS = (
    _Cgroup("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Cgroup(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
_UNLIMITED = 1 << 60  # version 1 says "no limit" by a number near 2^63


def cgroup_limit_bytes(root: Path) -> int | Unknown:
    """The container's memory limit, cgroup v2 then v1."""
    texts = (read_text(root / "sys/fs/cgroup" / group.limit) for group in _CGROUPS)
    limit = next((text for text in texts if isinstance(text, str)), None)
    if limit is None:
        return Unknown("no memory cgroup is visible")
    if not limit.isdecimal() or int(limit) >= _UNLIMITED:  # version 2 says "max"
        return Unknown("no limit is set")
    return int(limit)


def available_bytes(root: Path) -> int | Unknown:
    """MemAvailable, or what the container's limit leaves, whichever is less."""
    kernel = meminfo_bytes(root, "MemAvailable")
    limit = cgroup_limit_bytes(root)
    used = next((u for u in (_cgroup_used_bytes(root, group) for group in _CGROUPS) if u is not None), None)
    if isinstance(kernel, Unknown) or isinstance(limit, Unknown) or used is None:
        return kernel
    return min(kernel, max(limit - used, 0))


def _cgroup_used_bytes(root: Path, group: _Cgroup) -> int | None:
    """Memory that counts against the limit and can't be reclaimed under pressure, unlike idle page cache."""
    used = read_int(root / "sys/fs/cgroup" / group.used)
    if isinstance(used, Unknown):
        return None
    stat = read_text(root / "sys/fs/cgroup" / group.stat)
    found = re.search(rf"^{group.cache_key} (\d+)$", stat, re.MULTILINE) if isinstance(stat, str) else None
    return used - (int(found.group(1)) if found else 0)


def floor_bytes(available: int) -> int:
    """The host memory that no probe may touch: 2 GiB or a tenth of what is available, whichever is more."""
    return max(LEAST_FLOOR, available // 10)


def spendable_bytes(available: int | Unknown, floor: int) -> int:
    """The memory above the floor; 0 where it isn't known how much is available."""
    return 0 if isinstance(available, Unknown) else max(available - floor, 0)


def pci_id_of_first_gpu(torch: TorchFacts, cards: tuple[Card, ...], root: Path) -> str | Unknown:
    """The PCI id of torch's first GPU: by torch, else the only candidate in the files."""
    if torch.gpus and isinstance(torch.gpus[0].pci_id, str):
        return torch.gpus[0].pci_id
    nvidia = [path.name for path in (root / "proc/driver/nvidia/gpus").glob("*") if PCI_ID.match(path.name)]
    amd = [card.pci_id for card in cards if card.driver == "amdgpu" and isinstance(card.pci_id, str)]
    found = amd if torch.api == "hip" else nvidia
    return found[0] if len(found) == 1 else Unknown(f"{len(found)} cards could be torch's first GPU")
