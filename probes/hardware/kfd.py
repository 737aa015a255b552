"""The KFD topology of the kernel's AMD driver: which GPUs this machine has and which targets they are."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

UNKNOWN_TARGET = "unknown"  # old kernels print no gfx_target_version


def gpu_nodes(root: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """The directory and the properties of each GPU; nodes without SIMD units are processors."""
    for place in listed(root / "sys/class/kfd/kfd/topology/nodes"):
        found = properties(place)
        if place.name.isdecimal() and decimal(found.get("simd_count")):
            yield place, found


def properties(place: Path) -> Mapping[str, str]:
    """The words of the file `properties` in a directory of the topology; none where it can't be read."""
    try:
        text = (place / "properties").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.strip().partition(" ") for line in text.splitlines())}


def targets(root: Path) -> tuple[str, ...]:
    """The targets of this machine's AMD GPUs, each once and in order, as far as the kernel names them."""
    found = {gfx_target(decimal(words.get("gfx_target_version"))) for _, words in gpu_nodes(root)}
    return tuple(sorted(found - {UNKNOWN_TARGET}))


def gfx_target(version: int) -> str:
    """KFD's major*10000 + minor*100 + step as LLVM writes it: 80003 -> gfx803, 90010 -> gfx90a."""
    if version <= 0:
        return UNKNOWN_TARGET
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


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
