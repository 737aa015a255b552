"""Reads a host: kernel files with the probes' readers, the engine, Pythons and their torch.

Files are looked for below `root`. Nothing is started except what `engine.host` asks the engine.
"""

import ast
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from buildtool.core.errors import ToolError
from buildtool.core.model import LABEL
from buildtool.core.yaml_text import Limits, parse
from buildtool.doctor.host import (
    Display,
    EngineFacts,
    Host,
    Node,
    OwnImage,
    Python,
    TorchBuild,
    User,
    platform_of,
)
from buildtool.engine import host as engine_host
from buildtool.engine.client import EngineInfo
from probes.core.files import read_regular
from probes.core.unknown import Unknown
from probes.hardware import host, snapshot
from probes.hardware.nvml import Nvml, open_nvml
from probes.hardware.sysfs import (
    UNKNOWN_TARGET,
    is_there,
    listed,
    read_cards,
    read_kfd_nodes,
    read_link,
    read_text,
)
from probes.records.facts import NvidiaCard

DISPLAY_CLASSES = ("0x03", "0x12")  # PCI class codes: display controllers, processing accelerators
VENDORS = ("0x1002", "0x10de")
CDI_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
CDI_LIMITS = Limits(depth=20, nodes=100_000)
MOST_BYTES = 4 << 20  # of a CDI specification
_MOST_VERSION_BYTES = 64 << 10  # of a torch/version.py, which has some 300
_UNREADABLE = "its torch/version.py can't be read"
PYTHONS = (
    "usr/bin/python3.*",
    "usr/local/bin/python3.*",
    "opt/*/bin/python3.*",
    "root/*conda*/bin/python3.*",
    "home/*/*conda*/bin/python3.*",
    "home/*/.pyenv/versions/*/bin/python3.*",
)
MOST_PYTHONS = 32
PACKAGES = ("lib/python{v}/site-packages", "local/lib/python{v}/dist-packages", "lib/python3/dist-packages")
HYPERVISORS = re.compile(
    r"kvm|qemu|vmware|virtualbox|virtual machine|hvm domu|google compute|amazon ec2|bochs|xen", re.I
)


def gather(root: Path, env: Mapping[str, str], engine: engine_host.Facts, *, cwd: Path) -> Host:
    """The host below `root`; `engine` is what `engine.host` found, `cwd` may hold virtual environments."""
    kernel = read_text(root / "proc/sys/kernel/osrelease")
    facts = _engine(engine)
    directories = facts.cdi_directories if isinstance(facts, EngineFacts) else ()
    return Host(
        name=socket.gethostname(),
        platform=platform_of(root),
        distribution=_distribution(root),
        kernel=kernel,
        machine=os.uname().machine,
        virtual=_virtual(root),
        container=host.container_kind(root),
        cpus=len(os.sched_getaffinity(0)),
        cpu_limit=host.cpu_limit(root),
        ram_total_bytes=host.meminfo_bytes(root, "MemTotal"),
        ram_available_bytes=host.available_bytes(root),
        ram_limit_bytes=host.cgroup_limit_bytes(root),
        disk_free_bytes=engine.free_disk_bytes,
        gpu_driver=snapshot.gpu_driver(root),
        displays=read_displays(root, _nvidia_cards(root)),
        nodes=read_nodes(root),
        cdi_kinds=read_cdi_kinds(root, directories or CDI_DIRECTORIES),
        user=_user(root),
        pythons=read_pythons(root, env, cwd),
        engine=facts,
        override=env.get("HSA_OVERRIDE_GFX_VERSION", ""),
        composed=is_there(cwd / "compose.yaml"),
    )


def _nvidia_cards(root: Path) -> tuple[NvidiaCard, ...]:
    nvml = open_nvml() if root == Path("/") else None
    return nvml.cards() if isinstance(nvml, Nvml) else ()


def _engine(facts: engine_host.Facts) -> EngineFacts | Unknown:
    if isinstance(facts.engine, ToolError):
        return Unknown(facts.engine.message)
    info: EngineInfo = facts.engine
    return EngineFacts(
        version=info.version,
        containerd_store=info.containerd_store,
        rootless=any("name=rootless" in option for option in info.security_options),
        runtimes=info.runtimes,
        cdi_directories=info.cdi_directories,
        compose=facts.compose or Unknown("the plugin isn't installed"),
        buildx=facts.buildx or Unknown("the plugin isn't installed"),
        images=tuple(_own_image(name, labels) for name, labels in sorted(facts.images.items())),
    )


def _own_image(name: str, labels: Mapping[str, str]) -> OwnImage:
    targets = labels.get(f"{LABEL}.gpu-targets", "").split(",")
    return OwnImage(name, labels.get(f"{LABEL}.torch.build", ""), tuple(filter(None, targets)))


def read_displays(root: Path, nvidia: tuple[NvidiaCard, ...]) -> tuple[Display, ...]:
    """AMD's and NVIDIA's cards on the PCI bus, with what their drivers say about them."""
    displays = []
    for device in listed(root / "sys/bus/pci/devices"):
        code, vendor = read_text(device / "class"), read_text(device / "vendor")
        if isinstance(code, str) and code.startswith(DISPLAY_CLASSES) and vendor in VENDORS:
            displays.append(_display(root, device, nvidia))
    seen = {display.pci_id for display in displays}
    return (*displays, *(_by_nvml(card) for card in nvidia if card.pci_id.lower() not in seen))


def _by_nvml(card: NvidiaCard) -> Display:
    """A card that the PCI bus doesn't show: under WSL, Windows has it."""
    hidden = Unknown("the PCI bus doesn't show it")
    return Display(
        pci_id=card.pci_id.lower(),
        product="10de:????",
        revision=hidden,
        driver=hidden,
        name=card.name,
        target=card.target,
        vram_bytes=card.vram_total_bytes,
        link=card.link,
        max_link=card.max_link,
    )


def _display(root: Path, device: Path, nvidia: tuple[NvidiaCard, ...]) -> Display:
    pci_id = device.name
    ids = [read_text(device / name) for name in ("vendor", "device")]
    revision = read_text(device / "revision")
    driver = read_text(device / "uevent")
    named = re.search(r"^DRIVER=(\S+)$", driver, re.MULTILINE) if isinstance(driver, str) else None
    nvml = next((card for card in nvidia if card.pci_id.lower() == pci_id), None)
    return Display(
        pci_id=pci_id,
        product=":".join("????" if isinstance(each, Unknown) else each.removeprefix("0x") for each in ids),
        revision=revision if isinstance(revision, Unknown) else revision.removeprefix("0x"),
        driver=named[1] if named else Unknown("no driver is bound to it"),
        name=nvml.name if nvml else Unknown("its driver gives no name"),
        target=nvml.target if nvml else _kfd_target(root, pci_id),
        vram_bytes=nvml.vram_total_bytes if nvml else _vram(root, pci_id),
        link=read_link(root, pci_id),
        max_link=read_link(root, pci_id, "max"),
    )


def _kfd_target(root: Path, pci_id: str) -> str | Unknown:
    targets = [node.target for node in read_kfd_nodes(root) if node.pci_id == pci_id]
    known = [target for target in targets if target != UNKNOWN_TARGET]
    return known[0] if known else Unknown("no driver reports it")


def _vram(root: Path, pci_id: str) -> int | Unknown:
    sizes = [card.vram_total_bytes for card in read_cards(root) if card.pci_id == pci_id]
    return sizes[0] if sizes else Unknown("its driver isn't loaded")


def read_nodes(root: Path) -> tuple[Node, ...]:
    """The GPUs' device files with owner, group and mode."""
    names = _names(root / "etc/group")
    nodes = []
    for path in host.device_files(root):
        try:
            status = (root / path.lstrip("/")).stat()
        except OSError:
            continue
        name = names.get(status.st_gid, Unknown("no group of this host has the number"))
        nodes.append(Node(path, status.st_uid, status.st_gid, name, f"{status.st_mode & 0o7777:04o}"))
    return tuple(nodes)


def _names(place: Path) -> dict[int, str]:
    """Number to name, of /etc/group or /etc/passwd."""
    text = read_text(place)
    rows = [line.split(":") for line in text.splitlines()] if isinstance(text, str) else []
    return {
        int(row[2]): row[0]
        for row in reversed(rows)
        if len(row) > 2 and row[2].isdecimal() and len(row[2]) <= 10
    }


def _user(root: Path) -> User:
    number = os.getuid()
    name = _names(root / "etc/passwd").get(number, str(number))
    return User(number, name, tuple(sorted({*os.getgroups(), os.getgid()})))


def _distribution(root: Path) -> str | Unknown:
    text = read_text(root / "etc/os-release")
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', text, re.MULTILINE) if isinstance(text, str) else None
    return match[1] if match else Unknown("no PRETTY_NAME in /etc/os-release")


def _virtual(root: Path) -> str | Unknown:
    texts = [read_text(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    known = " ".join(text for text in texts if isinstance(text, str))
    if HYPERVISORS.search(known):
        return known
    processor = read_text(root / "proc/cpuinfo")
    if isinstance(processor, str) and re.search(r"^flags\s*:.*\bhypervisor\b", processor, re.MULTILINE):
        return known or "a hypervisor"
    return Unknown("none seen")


def read_cdi_kinds(root: Path, directories: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of devices (`amd.com/gpu`) that CDI specifications describe."""
    places = (place for directory in directories for place in listed(root / directory.lstrip("/")))
    return tuple(sorted({_cdi_kind(place) for place in places} - {""}))


def _cdi_kind(place: Path) -> str:
    try:
        if place.suffix not in (".json", ".yaml", ".yml"):
            return ""
        text = read_regular(Path(os.path.realpath(place)), most_bytes=MOST_BYTES).decode("utf-8", "replace")
        data = json.loads(text) if place.suffix == ".json" else parse(text, str(place), CDI_LIMITS).data
    except (OSError, ValueError, RecursionError, ToolError):
        return ""
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else ""


def read_pythons(root: Path, env: Mapping[str, str], cwd: Path) -> tuple[Python, ...]:
    """Pythons in the usual places, the active environment and `cwd`, each with its torch."""
    pythons: dict[Path, Python] = {}
    for program in _programs(root, env, cwd):
        prefix = program.parent.parent
        version = program.name.removeprefix("python")
        place = f"/{program.relative_to(root)}"
        pythons.setdefault(prefix / version, Python(place, version, _torch(prefix, version)))
    return tuple(pythons.values())[:MOST_PYTHONS]


def _programs(root: Path, env: Mapping[str, str], cwd: Path) -> Iterator[Path]:
    prefixes = [Path(env[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    near = [place for place in listed(cwd) if is_there(place / "pyvenv.cfg")]
    own = [path for prefix in [*prefixes, *near] for path in listed(prefix / "bin")]
    usual = [path for pattern in PYTHONS for path in sorted(root.glob(pattern))]
    for path in [*(path for path in own if path.is_relative_to(root)), *usual]:
        if re.fullmatch(r"python3\.\d{1,3}", path.name):
            yield path


def _torch(prefix: Path, version: str) -> TorchBuild | Unknown:
    for packages in PACKAGES:
        try:
            place = Path(os.path.realpath(prefix / packages.format(v=version) / "torch/version.py"))
            text = read_regular(place, most_bytes=_MOST_VERSION_BYTES).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return Unknown(_UNREADABLE)
        return parse_torch_version(text)
    return Unknown("no torch")


def parse_torch_version(text: str) -> TorchBuild | Unknown:
    """The build that a `torch/version.py` describes; it is read, not run."""
    values = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last for deep nesting
        return Unknown(_UNREADABLE)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if (
                isinstance(target, ast.Name)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                values[target.id] = value.value
    if not values.get("__version__"):
        return Unknown("its torch/version.py names no version")
    return TorchBuild(values["__version__"], values.get("cuda", ""), values.get("hip", ""))
