"""Reads what this process runs in and what it is allowed: container, limits, device files."""

import os
import re
import resource
from pathlib import Path

from probes.machine.sysfs import read_text
from probes.records.facts import DeviceFile, DeviceMemoryLimit, Surroundings
from probes.shared.kfd import is_there
from probes.shared.unknown import Unknown

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
