"""Reads the host as the kernel shows it to this process: container, limits, memory, processors, disks.

Functions take the root of the file tree, so that tests can construct one. What can't be read is Unknown.
"""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from probes.core.unknown import Unknown
from probes.hardware.sysfs import is_there, read_int, read_text
from probes.records.facts import DeviceFile, DeviceMemoryLimit, Surroundings

# ---- container and limits ------------------------------------------------------------------------------

NOT_SEEN = "none seen"
_DEVICE_FILES = ("dev/kfd", "dev/dri/renderD*", "dev/dxg", "dev/nvidiactl", "dev/nvidia[0-9]*")
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


def surroundings(root: Path) -> Surroundings:
    """The container of this process, its user, its limits and the GPU device files that it may use."""
    return Surroundings(
        container=container_kind(root),
        user=os.getuid(),
        groups=tuple(sorted(os.getgroups())),
        cpu_limit=cpu_limit(root),
        pids_limit=_limit(root / "sys/fs/cgroup/pids.max", root / "sys/fs/cgroup/pids/pids.max"),
        locked_limit_bytes=_locked_limit_bytes(),
        files=tuple(_device_file(root, path) for path in device_files(root)),
        device_memory=_device_memory(root),
    )


def container_kind(root: Path) -> str:
    """The kind of container, by the marks that each kind leaves; NOT_SEEN where there are none."""
    marked = next((kind for mark, kind in _MARKS if is_there(root / mark)), None)
    return marked or _declared_kind(root) or _mounted_kind(root) or NOT_SEEN


def _declared_kind(root: Path) -> str | None:
    """The container type by systemd's container interface: a file, or the first process's environment."""
    declared = read_text(root / "run/systemd/container")
    if isinstance(declared, str) and declared:
        return declared
    environment = read_text(root / "proc/1/environ")
    match = re.search(r"(?:^|\0)container=([\w-]+)", environment) if isinstance(environment, str) else None
    return match.group(1) if match else None


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


def _limit(*paths: Path) -> int | Unknown:
    """The limit in the first of these files that can be read."""
    texts = [read_text(path) for path in paths]
    text = next((text for text in texts if isinstance(text, str)), None)
    if text is None:
        return Unknown(f"no {paths[0].name} is visible")
    return int(text) if text.isdecimal() else Unknown("no limit is set")


def _locked_limit_bytes() -> int | Unknown:
    """How much memory this process may lock; CUDA and HIP pin through the driver, which counts apart."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Unknown("no limit is set") if soft == resource.RLIM_INFINITY else soft


def device_files(root: Path) -> tuple[str, ...]:
    """The GPU device files that this container or host can see, as absolute paths."""
    paths = [path for pattern in _DEVICE_FILES for path in sorted(root.glob(pattern))]
    return tuple(f"/{path.relative_to(root)}" for path in paths)


def _device_file(root: Path, path: str) -> DeviceFile:
    place = root / path.lstrip("/")
    try:
        status = place.stat()
    except OSError as error:
        reason = Unknown(f"{path}: {error.strerror}")
        return DeviceFile(path, reason, reason, usable=False)
    mode = f"{status.st_mode & 0o7777:04o}"
    return DeviceFile(path, status.st_gid, mode, usable=os.access(place, os.R_OK | os.W_OK))


def _device_memory(root: Path) -> tuple[DeviceMemoryLimit, ...]:
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


def _regions(path: Path) -> dict[str, int | Unknown]:
    """Lines of `drm/0000:08:00.0/vram 17095983104`, or `max` for the figure."""
    text = read_text(path)
    lines = [line.split() for line in text.splitlines()] if isinstance(text, str) else []
    return {
        words[0]: int(words[1]) if words[1].isdecimal() else Unknown("no limit is set")
        for words in lines
        if len(words) == 2
    }


# ---- memory --------------------------------------------------------------------------------------------

LEAST_FLOOR = 2 * 2**30  # bytes


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


def meminfo_bytes(root: Path, key: str) -> int | Unknown:
    """A figure of /proc/meminfo."""
    text = read_text(root / "proc/meminfo")
    return text if isinstance(text, Unknown) else memory_bytes(text, key)


def memory_bytes(meminfo: str, key: str) -> int | Unknown:
    """A figure of the text of /proc/meminfo, which counts in KiB (and writes kB)."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else Unknown(f"no {key} in /proc/meminfo")


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
    match = re.search(rf"^{group.cache_key} (\d+)$", stat, re.MULTILINE) if isinstance(stat, str) else None
    return used - (int(match.group(1)) if match else 0)


def floor_bytes(available: int) -> int:
    """The host memory that no probe may touch: 2 GiB or a tenth of what is available, whichever is more."""
    return max(LEAST_FLOOR, available // 10)


def spendable_bytes(available: int | Unknown, floor: int) -> int:
    """The memory above the floor; 0 where it isn't known how much is available."""
    return 0 if isinstance(available, Unknown) else max(available - floor, 0)


def oom_kills(root: Path) -> int | Unknown:
    """How many processes of this cgroup were killed for its memory limit so far: cgroup v2, then v1."""
    group = root / "sys/fs/cgroup"
    counts = (oom_kills_in(path) for path in (group / "memory.events", group / "memory/memory.oom_control"))
    known = next((count for count in counts if count is not None), None)
    return Unknown("no memory cgroup is visible") if known is None else known


def oom_kills_in(path: Path) -> int | None:
    """The count of kills in a cgroup's `memory.events` or `memory.oom_control`; None where it has none."""
    text = read_text(path)
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) if isinstance(text, str) else None
    return int(match[1]) if match else None


# ---- processors, disks, processes ----------------------------------------------------------------------

SECTOR = 512  # bytes, in /proc/diskstats whatever the device's own sectors are
_TICKS = os.sysconf("SC_CLK_TCK")
# partitions, and devices whose traffic another one in the list carries or that are memory
_NOT_WHOLE = re.compile(
    r"(?:loop|ram|zram|dm-|md|sr|fd)\d|(?:sd|hd|vd|xvd)[a-z]+\d|(?:nvme\d+n\d+|mmcblk\d+)p\d"
)


def cpu_name(root: Path) -> str | Unknown:
    """The first processor's name."""
    text = read_text(root / "proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE) if isinstance(text, str) else None
    return match.group(1).strip() if match else Unknown("no model name in /proc/cpuinfo")


def machine_cpu_s(root: Path) -> float | Unknown:
    """Processor seconds that the whole machine has spent on programs and the kernel since its start."""
    text = read_text(root / "proc/stat")
    return text if isinstance(text, Unknown) else busy_cpu_s(text)


def busy_cpu_s(stat: str) -> float | Unknown:
    """The figure of `machine_cpu_s` in the text of /proc/stat."""
    match = re.match(r"cpu +((?:\d+ ?)+)", stat)
    if not match:
        return Unknown("no processor times in /proc/stat")
    user, nice, system, _idle, _iowait, irq, softirq, *_ = [*map(int, match[1].split()), *[0] * 7]
    return (user + nice + system + irq + softirq) / _TICKS


def process_cpu_s(root: Path, pid: int) -> float:
    """Processor seconds that a process has spent; 0 where it can't be read."""
    text = read_text(root / f"proc/{pid}/stat")
    fields = text.rpartition(")")[2].split() if isinstance(text, str) else []
    # of proc(5)'s fields those 14 and 15, of which the first two are before the bracket
    return sum(map(int, fields[11:13])) / _TICKS


def process_bytes(root: Path, key: str) -> int | Unknown:
    """A figure of this process's /proc/self/status, such as VmHWM, its largest resident set so far."""
    text = read_text(root / "proc/self/status")
    match = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE) if isinstance(text, str) else None
    return int(match[1]) * 1024 if match else Unknown(f"no {key} in /proc/self/status")


def threads(root: Path) -> int:
    """How many threads this process has."""
    return sum(1 for _ in (root / "proc/self/task").iterdir())


def disk_bytes(diskstats: str) -> tuple[int, int] | Unknown:
    """Bytes read from and written to all whole disks since the start, by the text of /proc/diskstats."""
    rows = [line.split() for line in diskstats.splitlines()]
    disks = [row for row in rows if len(row) >= 10 and not _NOT_WHOLE.match(row[2])]
    if not disks:
        return Unknown("no disk in /proc/diskstats")
    return sum(int(row[5]) for row in disks) * SECTOR, sum(int(row[9]) for row in disks) * SECTOR
