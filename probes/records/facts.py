"""The machine's part of a report: torch, GPUs, cards, memory, limits."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from probes.core.unknown import Unknown

Api = Literal["cuda", "hip", "none"]
UNREAD = Unknown("not read")


@dataclass(frozen=True)
class Link:
    """A PCI Express link as it was at a moment."""

    tag: ClassVar[str] = "link"
    generation: int
    lanes: int

    @property
    def raw_gb_per_s(self) -> float:
        """Each way, after the line code, before packets' headers, by the PCIe standard's rates; GB/s."""
        giga_transfers = {1: 2.5 * 0.8, 2: 5.0 * 0.8}.get(self.generation, 2.0**self.generation * 128 / 130)
        return giga_transfers * self.lanes / 8


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    target: str  # gfx803, sm_90
    pci_id: str | Unknown  # 0000:03:00.0
    vram_total_bytes: int
    vram_free_bytes: int | Unknown
    l2_bytes: int | Unknown
    integrated: bool | Unknown
    link_under_load: "Link | Unknown" = UNREAD  # links train down at idle, so it was read during copies


@dataclass(frozen=True)
class TorchFacts:
    """The torch build, and what it can reach."""

    tag: ClassVar[str] = "torch"
    version: str
    api: Api
    api_version: str  # of the CUDA or HIP it was built with; empty for a CPU build
    threads: int
    gpus: tuple[Gpu, ...]
    obstacle: str  # why there is no GPU for this torch; empty when there is one


@dataclass(frozen=True)
class Check:
    """A claim about torch and its card that was tried, and what came of it."""

    tag: ClassVar[str] = "check"
    name: str
    holds: bool
    said: str


@dataclass(frozen=True)
class Card:
    """One display or compute card by the kernel's files, independent of torch. Bytes."""

    name: str  # card0
    driver: str
    pci_id: str | Unknown
    vram_total_bytes: int | Unknown
    vram_used_bytes: int | Unknown
    gtt_total_bytes: int | Unknown
    gtt_used_bytes: int | Unknown
    link_speed: str | Unknown  # "8.0 GT/s PCIe", as it is now: links train down at idle
    link_width: int | Unknown  # lanes
    max_link_speed: str | Unknown = UNREAD
    max_link_width: int | Unknown = UNREAD
    visible_vram_bytes: int | Unknown = UNREAD  # that the processor can reach; all of it with a large BAR
    target: str | Unknown = UNREAD  # gfx803, by the KFD topology
    apu: bool | Unknown = UNREAD
    partition: str | Unknown = UNREAD  # SPX, CPX, ...: how the card is divided
    product: str | Unknown = UNREAD  # PCI vendor:device, 1002:67e3


@dataclass(frozen=True)
class KfdNode:
    """One GPU of the KFD topology (AMD compute)."""

    node: int
    target: str  # gfx803
    render_minor: int | Unknown
    apu: bool
    pci_id: str | Unknown = UNREAD
    local_bytes: int | Unknown = UNREAD  # of its memory banks, system memory left out


@dataclass(frozen=True)
class NvidiaCard:
    """One card by NVIDIA's management library, NVML. Bytes."""

    name: str
    pci_id: str
    target: str | Unknown  # sm_90
    vram_total_bytes: int | Unknown
    vram_used_bytes: int | Unknown  # by all processes
    bar1_bytes: int | Unknown
    link: Link | Unknown  # as it is now
    max_link: Link | Unknown
    mig: bool | Unknown


@dataclass(frozen=True)
class DeviceFile:
    """A GPU's device file and who may use it."""

    path: str
    group: int | Unknown  # the number: names differ between the host and a container
    mode: str | Unknown  # 0660
    usable: bool  # by this process, for reading and writing


@dataclass(frozen=True)
class DeviceMemoryLimit:
    """A region of the dmem cgroup controller (Linux 6.14): device memory that this container may use."""

    region: str  # drm/0000:03:00.0/vram
    capacity_bytes: int | Unknown
    limit_bytes: int | Unknown
    used_bytes: int | Unknown


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node of the host."""

    node: int
    cpus: str  # 0-15,32-47
    memory_bytes: int | Unknown


@dataclass(frozen=True)
class Surroundings:
    """What this process runs in, and what it is allowed."""

    tag: ClassVar[str] = "surroundings"
    container: str  # docker, podman, lxc, kubernetes, systemd-nspawn, none seen
    user: int
    groups: tuple[int, ...]
    cpu_limit: float | Unknown  # processors' worth of time
    pids_limit: int | Unknown
    locked_limit_bytes: int | Unknown  # memory that may be pinned (RLIMIT_MEMLOCK)
    files: tuple[DeviceFile, ...]
    device_memory: tuple[DeviceMemoryLimit, ...]


@dataclass(frozen=True)
class Machine:
    """What this machine has, in one snapshot. The memory figures are those at the start of the run."""

    host: str
    kernel: str | Unknown
    wsl: bool
    container: bool
    cpus: int
    ram_total_bytes: int | Unknown
    ram_available_bytes: int | Unknown  # the kernel's MemAvailable, or less where a cgroup limit is nearer
    cgroup_limit_bytes: int | Unknown
    gpu_driver: str | Unknown
    device_files: tuple[str, ...]
    cards: tuple[Card, ...]
    kfd_nodes: tuple[KfdNode, ...]
    torch: TorchFacts | Unknown
    nvidia: tuple[NvidiaCard, ...] = ()
    surroundings: Surroundings | Unknown = UNREAD
    numa_nodes: tuple[NumaNode, ...] = ()
    gpu_numa_node: int | Unknown = UNREAD  # of the GPU that is measured
