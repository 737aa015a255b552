"""What the doctor knows of a host: values only, read by `gather`, written as JSON by `weir doctor --json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from probes.core.unknown import Unknown
from probes.hardware.sysfs import is_there, read_text
from probes.records.facts import Link

Platform = Literal["linux", "wsl", "windows"]


def platform_of(root: Path) -> Platform:
    """The platform of the host whose files are below `root`."""
    kernel = read_text(root / "proc/sys/kernel/osrelease")
    wsl = is_there(root / "dev/dxg") or (isinstance(kernel, str) and "microsoft" in kernel.lower())
    return "wsl" if wsl else "linux"


@dataclass(frozen=True)
class Display:
    """A display or compute card on the PCI bus, with or without a driver. Bytes."""

    pci_id: str  # 0000:03:00.0
    product: str  # PCI vendor:device, 1002:67e3
    revision: str | Unknown  # 00
    driver: str | Unknown  # amdgpu, nvidia, vfio-pci
    name: str | Unknown  # as the driver's library names it; the data file knows more names
    target: str | Unknown  # gfx803 or sm_90, by the driver
    vram_bytes: int | Unknown
    link: Link | Unknown  # as it is now
    max_link: Link | Unknown

    @property
    def maker(self) -> str:
        """The PCI vendor: amd, nvidia, or its number."""
        vendor = self.product.partition(":")[0]
        return {"1002": "amd", "10de": "nvidia"}.get(vendor, vendor)


@dataclass(frozen=True)
class Node:
    """A GPU's device file and who may open it."""

    path: str
    owner: int
    group: int
    group_name: str | Unknown  # on this host; an image can have another name for the number, or none
    mode: str  # 0660

    def opens_for(self, user: "User") -> bool:
        """Whether the user may read and write it, by its owner, group and mode (access lists aside)."""
        bits = int(self.mode, 8)
        shift = 6 if user.number == self.owner else 3 if self.group in user.groups else 0
        return user.number == 0 or bits >> shift & 6 == 6


@dataclass(frozen=True)
class User:
    """The user who runs the command."""

    number: int
    name: str
    groups: tuple[int, ...]


@dataclass(frozen=True)
class TorchBuild:
    """A torch that was found, by its version file. Empty texts for what it wasn't built with."""

    tag: ClassVar[str] = "torch-build"
    version: str
    cuda: str
    hip: str

    @property
    def api(self) -> str:
        """Return the API that torch uses: cuda, hip or cpu."""
        return "hip" if self.hip else "cuda" if self.cuda else "cpu"


@dataclass(frozen=True)
class Python:
    """A Python that was found, and its torch."""

    place: str
    version: str | Unknown  # 3.11
    torch: TorchBuild | Unknown


@dataclass(frozen=True)
class OwnImage:
    """An image that `weir build` made, by its labels."""

    name: str  # weir/rocm:latest
    torch: str  # its build: cpu, cuda, rocm
    targets: tuple[str, ...]  # the cards that it is for; none where it is for all


@dataclass(frozen=True)
class EngineFacts:
    """The engine that the Docker CLI of this user reaches."""

    tag: ClassVar[str] = "engine"
    version: str
    containerd_store: bool
    rootless: bool
    runtimes: tuple[str, ...]  # runc, nvidia, amd
    cdi_directories: tuple[str, ...]  # where it looks for CDI specifications; none where CDI is off
    compose: str | Unknown
    buildx: str | Unknown
    images: tuple[OwnImage, ...] = ()


@dataclass(frozen=True)
class Host:
    """One host, in one snapshot. Memory and disk in bytes."""

    name: str
    platform: Platform
    distribution: str | Unknown  # Debian GNU/Linux 12 (bookworm)
    kernel: str | Unknown
    machine: str  # x86_64
    virtual: str | Unknown  # the virtual machine's product
    container: str  # docker, ..., none seen
    cpus: int
    cpu_limit: float | Unknown
    ram_total_bytes: int | Unknown
    ram_available_bytes: int | Unknown
    ram_limit_bytes: int | Unknown  # of the cgroup
    disk_free_bytes: int | Unknown  # where the engine's images are
    gpu_driver: str | Unknown  # amdgpu 6.10.5, nvidia 580.95.05
    displays: tuple[Display, ...]
    nodes: tuple[Node, ...]
    cdi_kinds: tuple[str, ...]  # amd.com/gpu, nvidia.com/gpu: in the specifications that were found
    user: User
    pythons: tuple[Python, ...]
    engine: EngineFacts | Unknown
    override: str  # HSA_OVERRIDE_GFX_VERSION of this environment, empty without
    composed: bool = False  # whether the current directory has compose.yaml
    supposed: bool = False  # its cards are asked about and not here: nothing can be missing for them

    def node(self, start: str) -> Node | None:
        """The first device file whose path starts so."""
        return next((node for node in self.nodes if node.path.startswith(start)), None)
