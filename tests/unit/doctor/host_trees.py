"""Small /sys, /proc, /dev and /etc trees of whole hosts, and what the doctor must say about each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from buildtool.core.errors import EngineUnavailable
from buildtool.doctor.gather import gather
from buildtool.doctor.host import EngineFacts, Host, Node, Python, TorchBuild, User
from buildtool.engine.client import EngineInfo
from buildtool.engine.host import Facts
from probes.core.unknown import Unknown

GIB = 2**30
ENGINE = EngineFacts("28.5.1", True, False, ("runc",), ("/etc/cdi", "/var/run/cdi"), "2.40.0", "0.29.0")
ROOT = User(0, "root", (0,))
ANN = User(1000, "ann", (44, 993, 1000))
STRANGER = User(1001, "bob", (1001,))


@dataclass(frozen=True)
class Card:
    """One card on the PCI bus; `version` is KFD's gfx_target_version, 0 without KFD."""

    product: str
    version: int = 0
    vram_gib: int = 16
    driver: str = "amdgpu"
    lanes: int = 16
    code: str = "0x030000"


@dataclass(frozen=True)
class Case:
    """A host and the right verdicts about it."""

    name: str
    cards: tuple[Card, ...]
    target: str | None = None  # of the first card
    rank: str = "none"
    torch: str = ""  # how the best route's torch begins
    next_step: str = "weir build cpu"
    says: tuple[str, ...] = ()  # words in the answer
    silent: tuple[str, ...] = ()  # words that mustn't be in it
    wsl: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    kfd: bool = True
    nvidia_driver: str = ""
    user: User = ROOT
    env: Mapping[str, str] = field(default_factory=dict)
    engine: EngineFacts | Unknown = ENGINE
    pythons: tuple[Python, ...] | None = None
    nodes: tuple[Node, ...] | None = None


def tree(case: Case) -> dict[str, str]:
    """The files of a case."""
    release = "6.6.87.2-microsoft-standard-WSL2" if case.wsl else "6.8.0-60-generic"
    files = {
        "proc/sys/kernel/osrelease": release,
        "proc/meminfo": "MemTotal: 32768000 kB\nMemAvailable: 30000000 kB\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        "etc/group": "root:x:0:\nvideo:x:44:ann\nrender:x:993:ann\n",
        "etc/passwd": "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n",
    }
    amd = [card for card in case.cards if card.product.startswith("1002") and card.driver == "amdgpu"]
    if amd and not case.wsl:
        files["sys/module/amdgpu/version"] = "6.12.12"
        files |= {"dev/kfd": ""} if case.kfd else {}
    if case.nvidia_driver:
        words = (
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {case.nvidia_driver}  Release Build"
        )
        files |= {"proc/driver/nvidia/version": words, "dev/nvidiactl": "", "dev/nvidia0": ""}
    for number, card in enumerate(case.cards):
        files |= card_files(card, number)
    if case.wsl:
        files["dev/dxg"] = ""
    return files | dict(case.files)


def card_files(card: Card, number: int) -> dict[str, str]:
    """A card under /sys and /dev."""
    bus = 3 + number
    pci_id = f"0000:{bus:02x}:00.0"
    vendor, device = card.product.split(":")
    own = {
        "class": card.code,
        "vendor": f"0x{vendor}",
        "device": f"0x{device}",
        "revision": "0x00",
        "uevent": f"PCI_ID={card.product.upper()}\nPCI_SLOT_NAME={pci_id}\n"
        + (f"DRIVER={card.driver}\n" if card.driver else ""),
        "current_link_speed": "8.0 GT/s PCIe",
        "current_link_width": str(card.lanes),
        "max_link_speed": "16.0 GT/s PCIe",
        "max_link_width": str(card.lanes),
    }
    found = {f"sys/bus/pci/devices/{pci_id}/{name}": text for name, text in own.items()}
    if card.driver == "amdgpu":
        own["mem_info_vram_total"] = str(card.vram_gib * GIB)
        found |= {f"sys/class/drm/card{number}/device/{name}": text for name, text in own.items()}
        found[f"dev/dri/renderD{128 + number}"] = ""
    if card.version:
        words = f"simd_count 64\ngfx_target_version {card.version}\nlocation_id {bus << 8}\ndomain 0\n"
        found[f"sys/class/kfd/kfd/topology/nodes/{1 + number}/properties"] = words
    return found


def host_of(case: Case, root: Path) -> Host:
    """The case's tree, laid under `root` and read."""
    for name, text in tree(case).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + ("" if text.endswith("\n") else "\n"))
    found = gather(root, dict(case.env), facts_of(case), cwd=root / "nowhere")
    own = {"user": case.user, "container": "none seen"}
    own |= {} if case.pythons is None else {"pythons": case.pythons}
    own |= {} if case.nodes is None else {"nodes": case.nodes}
    return found.__class__(**{**vars(found), **own})


def facts_of(case: Case) -> Facts:
    """What the engine's module would have found."""
    if isinstance(case.engine, Unknown):
        return Facts(
            EngineUnavailable(case.engine.reason), None, None, mmdebstrap=False, free_disk_bytes=10**11
        )
    one = case.engine
    info = EngineInfo(
        one.version,
        one.containerd_store,
        "here",
        "/var/lib/docker",
        ("name=rootless",) if one.rootless else (),
        runtimes=one.runtimes,
        cdi_directories=one.cdi_directories,
    )
    known = [None if isinstance(text, Unknown) else text for text in (one.buildx, one.compose)]
    return Facts(info, known[0], known[1], mmdebstrap=True, free_disk_bytes=10**11)


def python(version: str, torch: str = "", *, hip: str = "", cuda: str = "") -> Python:
    """A Python with a torch."""
    found = TorchBuild(torch, cuda, hip) if torch else Unknown("no torch")
    return Python(f"/usr/bin/python{version}", version, found)
