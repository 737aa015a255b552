"""Reads what this process runs in and what it is allowed: container, limits, device files."""

import ctypes
import os
import platform
import re
import resource
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from probes.core.errors import DeviceUnusable
from probes.core.unknown import Unknown
from probes.hardware.kfd import is_there
from probes.hardware.sysfs import read_text
from probes.records.facts import DeviceFile, DeviceMemoryLimit, Machine, NumaNode, Surroundings
from probes.records.rows import NumaPlaces

DEVICE_FILES = ("dev/kfd", "dev/dri/renderD*", "dev/dxg", "dev/nvidiactl", "dev/nvidia[0-9]*")
NOT_SEEN = "none seen"
_MARKS = (
    ("var/run/secrets/kubernetes.io", "kubernetes"),
    (".dockerenv", "docker"),
    ("run/.containerenv", "podman"),
)
_TRACES = (
    ("kubepods", "kubernetes"),
    ("lxcfs|/lxc[/.]", "lxc"),
    ("/docker[-/]", "docker"),
    ("/libpod[-/]", "podman"),
)


def describe(root: Path) -> Surroundings:
    """The surroundings of this process."""
    return Surroundings(
        container=container_kind(root),
        user=os.getuid(),
        groups=tuple(sorted(os.getgroups())),
        cpu_limit=cpu_limit(root),
        pids_limit=_limit(root / "sys/fs/cgroup/pids.max", root / "sys/fs/cgroup/pids/pids.max"),
        locked_limit_bytes=locked_limit_bytes(),
        files=tuple(_device_file(root, path) for path in device_files(root)),
        device_memory=device_memory(root),
    )


def container_kind(root: Path) -> str:
    """What kind of container this is, by the marks that each leaves; `none seen` where there is none."""
    marked = next((kind for mark, kind in _MARKS if is_there(root / mark)), None)
    return marked or _declared_kind(root) or _mounted_kind(root) or NOT_SEEN


def _declared_kind(root: Path) -> str | None:
    """The container type by systemd's container interface: a file, or the first process's environment."""
    declared = read_text(root / "run/systemd/container")
    if isinstance(declared, str) and declared:
        return declared
    environment = read_text(root / "proc/1/environ")
    found = re.search(r"(?:^|\0)container=([\w-]+)", environment) if isinstance(environment, str) else None
    return found.group(1) if found else None


def _mounted_kind(root: Path) -> str | None:
    """The container type by the names of control groups and mounts."""
    texts = [read_text(root / name) for name in ("proc/1/cgroup", "proc/self/mountinfo")]
    text = " ".join(text for text in texts if isinstance(text, str))
    return next((kind for pattern, kind in _TRACES if re.search(pattern, text)), None)


def cpu_limit(root: Path) -> float | Unknown:
    """Processors' worth of time that the container may use, cgroup v2 then v1."""
    group = root / "sys/fs/cgroup"
    text = read_text(group / "cpu.max")
    if isinstance(text, str):
        words = text.split()
    else:
        quota, period = (read_text(group / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if isinstance(quota, Unknown) or isinstance(period, Unknown):
            return Unknown("no cpu cgroup is visible")
        words = [quota, period]
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return Unknown("no limit is set")


def _limit(*places: Path) -> int | Unknown:
    texts = [read_text(place) for place in places]
    known = next((text for text in texts if isinstance(text, str)), None)
    if known is None:
        return Unknown(f"no {places[0].name} is visible")
    return int(known) if known.isdecimal() else Unknown("no limit is set")


def locked_limit_bytes() -> int | Unknown:
    """How much memory this process may lock; CUDA and HIP pin through the driver, which counts apart."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Unknown("no limit is set") if soft == resource.RLIM_INFINITY else soft


def device_files(root: Path) -> tuple[str, ...]:
    """The GPU device files that this container or host can see, as absolute paths."""
    found = [path for pattern in DEVICE_FILES for path in sorted(root.glob(pattern))]
    return tuple(f"/{path.relative_to(root)}" for path in found)


def _device_file(root: Path, path: str) -> DeviceFile:
    place = root / path.lstrip("/")
    try:
        status = place.stat()
    except OSError as error:
        reason = Unknown(f"{path}: {error.strerror}")
        return DeviceFile(path, reason, reason, usable=False)
    mode = f"{status.st_mode & 0o7777:04o}"
    return DeviceFile(path, status.st_gid, mode, usable=os.access(place, os.R_OK | os.W_OK))


def device_memory(root: Path) -> tuple[DeviceMemoryLimit, ...]:
    """The regions of the dmem controller; amdgpu registers VRAM only, and not GTT."""
    group = root / "sys/fs/cgroup"
    capacity, limit, used = (_regions(group / f"dmem.{name}") for name in ("capacity", "max", "current"))
    return tuple(
        DeviceMemoryLimit(
            region,
            capacity.get(region, Unknown("dmem.capacity is only in the root group")),
            limit.get(region, Unknown("no limit is set")),
            used.get(region, Unknown("no dmem.current here")),
        )
        for region in sorted({*capacity, *limit, *used})
    )


def _regions(place: Path) -> dict[str, int | Unknown]:
    """Lines of `drm/0000:08:00.0/vram 17095983104`, or `max` for the figure."""
    text = read_text(place)
    lines = [line.split() for line in text.splitlines()] if isinstance(text, str) else []
    return {
        words[0]: int(words[1]) if words[1].isdecimal() else Unknown("no limit is set")
        for words in lines
        if len(words) == 2
    }


# <asm/unistd.h>: set_mempolicy, get_mempolicy
CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
MPOL_BIND = 2  # <linux/mempolicy.h>
MPOL_F_NODE, MPOL_F_ADDR = 1, 2
MASK_BITS = 1024  # nodes that a mask can name


def cpus_of(text: str) -> frozenset[int]:
    """The processors in one of the kernel's lists: `0-3,8`. Raises ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def nodes(root: Path) -> tuple[NumaNode, ...]:
    """The NUMA nodes by sysfs, in order; none where the kernel shows none."""
    found = []
    for place in (root / "sys/devices/system/node").glob("node*"):
        cpus = read_text(place / "cpulist")
        if not place.name[4:].isdecimal() or isinstance(cpus, Unknown):
            continue
        memory = read_text(place / "meminfo")
        total = re.search(r"MemTotal:\s+(\d+) kB", memory) if isinstance(memory, str) else None
        size = int(total.group(1)) * 1024 if total else Unknown("no MemTotal in the node's meminfo")
        found.append(NumaNode(int(place.name[4:]), cpus, size))
    return tuple(sorted(found, key=lambda node: node.node))


def gpu_node(root: Path, pci_id: str | Unknown, known: Collection[NumaNode]) -> int | Unknown:
    """The node that a PCI device is attached to. On a machine of one node it is that one."""
    if isinstance(pci_id, Unknown):
        return pci_id
    said = read_text(root / "sys/bus/pci/devices" / pci_id / "numa_node")
    if isinstance(said, str) and said.isdecimal():
        return int(said)
    if len(known) == 1:
        return next(iter(known)).node
    return said if isinstance(said, Unknown) else Unknown(f"the firmware doesn't say (numa_node is {said})")


def described(machine: Machine, root: Path, pci_id: str | Unknown) -> Machine:
    """The machine with its nodes and that of the GPU."""
    known = nodes(root)
    return replace(machine, numa_nodes=known, gpu_numa_node=gpu_node(root, pci_id, known))


def processors(known: Collection[NumaNode], cpus: Collection[int]) -> tuple[int, ...]:
    """The nodes to which any of these processors belong. Pure."""
    return tuple(node.node for node in known if cpus_of(node.cpus) & frozenset(cpus))


def hold_to_gpu(machine: Machine) -> None:
    """Bind this process to the processors and the host memory of the GPU's node.

    Existing threads and memory stay where they are. Raises DeviceUnusable where the node isn't known, has
    no processor that this process may use, or the kernel refuses.
    """
    node = machine.gpu_numa_node
    if isinstance(node, Unknown):
        raise DeviceUnusable(f"the GPU's NUMA node is unknown: {node.reason}", "run without --numa gpu")
    mine = next((cpus_of(one.cpus) for one in machine.numa_nodes if one.node == node), frozenset())
    allowed = mine & os.sched_getaffinity(0)
    if not allowed:
        raise DeviceUnusable(
            f"this process may use no processor of the GPU's NUMA node {node}",
            "run without --numa gpu, or give the container that node's processors",
        )
    os.sched_setaffinity(0, allowed)
    mask = (ctypes.c_ulong * (MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    failed = _call(0, MPOL_BIND, ctypes.byref(mask), MASK_BITS)
    if failed:
        raise DeviceUnusable(
            f"host memory can't be held to NUMA node {node}: {failed}",
            "run without --numa gpu, or give the container the capability CAP_SYS_NICE",
        )


def node_of(address: int) -> int | Unknown:
    """The node of the page at an address of this process, which must have been touched."""
    found = ctypes.c_int(-1)
    failed = _call(
        1, ctypes.byref(found), None, 0, ctypes.c_void_p(address), ctypes.c_ulong(MPOL_F_NODE | MPOL_F_ADDR)
    )
    return Unknown(failed) if failed else found.value


def _call(which: int, *args: object) -> str:
    """The reason why the call failed; empty when it succeeded."""
    numbers = CALLS.get(platform.machine())
    if numbers is None:
        return f"the system call's number on {platform.machine()} isn't known"
    library = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    if library.syscall(ctypes.c_long(numbers[which]), *args) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def places(machine: Machine, *, pinned: int | Unknown, pageable: int | Unknown, held: bool) -> NumaPlaces:
    """The nodes on which this process measures, at this moment."""
    mine = processors(machine.numa_nodes, os.sched_getaffinity(0))
    return NumaPlaces(machine.gpu_numa_node, mine, pinned, pageable, held)


SECTOR = 512  # bytes, in /proc/diskstats whatever the device's own sectors are
_TICKS = os.sysconf("SC_CLK_TCK")
# partitions, and devices whose traffic another one in the list carries or that are memory
_NOT_WHOLE = re.compile(
    r"(?:loop|ram|zram|dm-|md|sr|fd)\d|(?:sd|hd|vd|xvd)[a-z]+\d|(?:nvme\d+n\d+|mmcblk\d+)p\d"
)


def busy_cpu_s(stat: str) -> float | Unknown:
    """Processor seconds spent on programs and the kernel since the start, by the text of /proc/stat."""
    found = re.match(r"cpu +((?:\d+ ?)+)", stat)
    if not found:
        return Unknown("no processor times in /proc/stat")
    user, nice, system, _idle, _iowait, irq, softirq, *_ = [*map(int, found[1].split()), *[0] * 7]
    return (user + nice + system + irq + softirq) / _TICKS


def memory_bytes(meminfo: str, key: str) -> int | Unknown:
    """A figure of the text of /proc/meminfo, which counts in KiB (and writes kB)."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else Unknown(f"no {key} in /proc/meminfo")


def disk_bytes(diskstats: str) -> tuple[int, int] | Unknown:
    """Bytes read from and written to all whole disks since the start, by the text of /proc/diskstats."""
    rows = [line.split() for line in diskstats.splitlines()]
    disks = [row for row in rows if len(row) >= 10 and not _NOT_WHOLE.match(row[2])]
    if not disks:
        return Unknown("no disk in /proc/diskstats")
    return sum(int(row[5]) for row in disks) * SECTOR, sum(int(row[9]) for row in disks) * SECTOR
