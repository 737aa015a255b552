"""Chooses the torch device for a profile's `device:`, or says why it isn't available (`choose_device`); and
checks that a pruned image holds code for this machine's AMD cards (`check_cards`).

Neither uses torch: `service.inference.model` reads what torch can do (`TorchBuild`), and the cards are
checked before torch starts the GPU runtime.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.errors import DeviceMissing, SettingsError

DEVICE_NAMES = ("cpu", "cuda", "rocm", "hip")
_SYNTAX = re.compile(rf"({'|'.join(DEVICE_NAMES)})(?::(\d{{1,3}}))?")
MANIFEST = Path(__file__).parents[3] / "weir-prune.json"  # /opt/weir/weir-prune.json
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.MULTILINE)
_OVERRIDE = re.compile(r"(\d{1,2})\.(\d)\.(\d{1,2})")


@dataclass(frozen=True)
class Gpu:
    """One device that torch sees: its name and, on HIP, its gfx target (`gfx90a`, without feature flags)."""

    name: str
    gfx: str | None = None


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch can do, and the devices that this container has."""

    version: str
    hip: str | None = None  # torch.version.hip: None unless this is a ROCm build
    cuda: str | None = None  # torch.version.cuda: None unless this is a CUDA build
    gpus: tuple[Gpu, ...] = ()
    gfx_targets: tuple[str, ...] = ()  # that the build has kernels for (HIP only)
    nodes: dict[str, str] = field(default_factory=dict)  # device file -> "absent" | "denied" | "open"

    def __str__(self) -> str:
        kind = f"ROCm/HIP {self.hip}" if self.hip else f"CUDA {self.cuda}" if self.cuda else "CPU only"
        return f"torch {self.version} ({kind})"


@dataclass(frozen=True)
class Device:
    """A device to use: torch's name for it (`cuda:0`), the profile's (`rocm:0`), and a description."""

    torch_name: str
    label: str
    description: str


def choose_device(requested: str, build: TorchBuild) -> Device:
    """Return the device that a profile's `device:` names. Never falls back to another one.

    `rocm` and `hip` are torch's device `cuda` on a HIP build; `cuda` is accepted on both builds. Raises
    SettingsError for other names, DeviceMissing if it isn't available.
    """
    match = _SYNTAX.fullmatch(requested.strip().lower())
    if match is None:
        raise SettingsError(
            f"device {requested!r} is not known",
            f"use one of {', '.join(DEVICE_NAMES)}, with an index as in rocm:0",
        )
    name, index = match[1], int(match[2] or 0)
    if name == "cpu":
        return Device("cpu", "cpu", f"cpu, {build}")
    _check_build(name, build)
    _check_present(name, index, build)
    gpu = build.gpus[index]
    _check_kernels(gpu, build)
    return Device(f"cuda:{index}", f"{name}:{index}", f"{name}:{index} {gpu.name}, {build}")


def _check_build(name: str, build: TorchBuild) -> None:
    needs_hip = name in ("rocm", "hip")
    if build.hip or (build.cuda and not needs_hip):
        return
    kind = "ROCm (HIP)" if needs_hip else "CUDA or ROCm"
    raise DeviceMissing(
        f"device {name!r} needs a {kind} build of torch, but this image has {build}",
        "use an image whose torch has GPU kernels (`docker compose up api-rocm` with WEIR_ROCM_IMAGE), "
        "or run on the CPU: APP_PROFILE=experiment1",
    )


def _check_present(name: str, index: int, build: TorchBuild) -> None:
    if index < len(build.gpus):
        return
    if build.gpus:
        raise DeviceMissing(
            f"device '{name}:{index}' is not there: {build} sees {len(build.gpus)} device(s)",
            f"use an index from 0 to {len(build.gpus) - 1}",
        )
    nodes = ", ".join(f"{path} {state}" for path, state in sorted(build.nodes.items()))
    raise DeviceMissing(
        f"device {name!r} is not there: {build} sees no GPU{f' ({nodes})' if nodes else ''}",
        _missing_gpu_hint(build),
    )


def _missing_gpu_hint(build: TorchBuild) -> str:
    if not build.hip:
        return "give the container a GPU: `docker compose up api-cuda`, or `docker run --gpus all ...`"
    if "denied" in build.nodes.values():
        return (
            "the device file is there but closed to this user: add its group by number, "
            "RENDER_GID=$(stat -c %g /dev/dri/renderD128) docker compose up api-rocm"
        )
    return (
        "pass the device files: `docker compose up api-rocm` (Linux: /dev/kfd and /dev/dri/renderD*) "
        "or `docker compose up api-wsl` (WSL: /dev/dxg)"
    )


def _check_kernels(gpu: Gpu, build: TorchBuild) -> None:
    if gpu.gfx is None or not build.gfx_targets or gpu.gfx in build.gfx_targets:
        return
    raise DeviceMissing(
        f"{gpu.name} is {gpu.gfx}, but {build} has kernels for {', '.join(build.gfx_targets)} only",
        f"use a torch built for {gpu.gfx}, or run on the CPU: APP_PROFILE=experiment1",
    )


def check_cards(device: str, env: Mapping[str, str]) -> None:
    """Raise DeviceMissing if a GPU is asked for and the image holds code for none of this machine's cards."""
    if not device.strip().lower().startswith("cpu"):
        check_targets(targets_of_image(MANIFEST), targets_of_cards(TOPOLOGY, env))


def check_targets(held: Sequence[str], cards: Sequence[str]) -> None:
    """Raise DeviceMissing if a pruned image holds code for none of the cards.

    `held` is empty for an image that isn't pruned. Without `cards`, choosing the device gives a better
    message. An image for a family (`gfx11-generic`) is assumed to have the card's code.
    """
    processors = {target.partition(":")[0] for target in held}
    family = any(name.endswith("-generic") for name in processors)
    if not held or not cards or family or processors.intersection(cards):
        return
    raise DeviceMissing(
        f"this image holds {', '.join(held)}, this machine has {', '.join(cards)}",
        f"rebuild it on the host: make images GPU_TARGETS={','.join(cards)}",
    )


def targets_of_image(manifest: Path) -> tuple[str, ...]:
    """Return the AMD targets that a prune kept, by its manifest; none for an image that wasn't pruned."""
    try:
        targets = json.loads(manifest.read_text())["targets"]
        return tuple(name for name in targets if name.startswith("gfx"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ()


def targets_of_cards(topology: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the AMD cards' targets by the kernel's KFD topology, or HSA_OVERRIDE_GFX_VERSION, if set."""
    texts = [_read_text(path) for path in sorted(topology.glob("*/properties"))]
    versions = {int(match[1]) for text in texts for match in _VERSION.finditer(text)} - {0}
    override = _OVERRIDE.fullmatch(env.get("HSA_OVERRIDE_GFX_VERSION", ""))
    if versions and override:
        major, minor, step = map(int, override.groups())
        versions = {major * 10000 + minor * 100 + step}
    return tuple(f"gfx{v // 10000}{v // 100 % 100:x}{v % 100:x}" for v in sorted(versions))


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
