"""What a build will do, as values: plans of images, their layers, configs and labels, the bake file. Pure.

The same inputs give the same bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from buildtool.core.model import LABEL, Bootstrap, Registry, Resolved, Variant, Wheel
from buildtool.gpucode.source import prefix_errors
from buildtool.gpucode.target import TargetId, served_targets
from buildtool.image.documents import Platform
from buildtool.image.reader import host_platform

HEAVY_BYTES = 20_000_000  # wheels of at least this size get their own layer
DISK_FLOOR = 2_000_000_000  # bytes; with less, no build is started
UNPACKED_PER_STORED = 4  # wheels; a generous guess for the disk check alone
PACKAGES = "packages"  # the layer of small wheels
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# how the service is run in images that are written here
ENVIRONMENT = {
    "PYTHONPATH": "/opt/weir/lib:/opt/weir/app",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "HOME": "/tmp",
}
_SECOND = 10**9  # in nanoseconds
SERVED = {
    "User": "10001:10001",
    "Cmd": ["python3", "-m", "service"],
    "Healthcheck": {
        "Test": ["CMD", "python3", "-m", "service.health"],
        "Interval": 10 * _SECOND,
        "Timeout": 5 * _SECOND,
        "StartPeriod": 120 * _SECOND,
        "StartInterval": _SECOND,
    },
}


@dataclass(frozen=True)
class Groups:
    """A variant's wheels by layer."""

    torch: tuple[Wheel, ...]
    heavy: tuple[Wheel, ...]
    small: tuple[Wheel, ...]


@dataclass(frozen=True)
class ImagePlan:
    """One image to build: its variant for the cards that were chosen, its inputs, its context directory."""

    variant: Variant
    resolved: Resolved
    context: Path

    @property
    def scanned_inputs(self) -> tuple[str, ...]:
        """SHA-256 of the inputs that are scanned for GPU code and pruned; none without pruning."""
        if not self.variant.prune:
            return ()
        groups = group_wheels(self.resolved.wheels)
        base = (self.resolved.base.pin,) if self.resolved.base.origin == "bootstrap" else ()
        return (*(wheel.sha256 for wheel in (*groups.torch, *groups.heavy)), *base)

    def with_targets(self, available: Iterable[TargetId], *, every_target: bool) -> tuple["ImagePlan", str]:
        """The plan for those of its targets that have code, and a remark about those that have none.

        `available` are the targets that the inputs have code for. Raises TargetMissing where that serves
        none of the plan's or, with `every_target`, not all of them.
        """
        if not self.variant.prune:
            return self, ""
        wanted = tuple(sorted(map(TargetId.parse, self.variant.gpu_targets)))
        with prefix_errors(f"{self.variant.name}: its GPU libraries"):
            left = served_targets(available, wanted, strict=every_target)
        remark = ""
        if missing := [str(target) for target in wanted if target not in left]:
            remark = f"{self.variant.name}: its GPU libraries have no code for {', '.join(missing)}"
        return replace(self, variant=replace(self.variant, gpu_targets=tuple(map(str, left)))), remark


@dataclass(frozen=True)
class BuildPlan:
    """Everything that a build does, as a value: `weir plan` prints it, `weir build` carries it out."""

    images: tuple[ImagePlan, ...]
    epoch: int  # SOURCE_DATE_EPOCH, seconds since 1970
    tools: tuple[Wheel, ...] = ()  # run inside BuildKit's builds, stay out of the images

    @property
    def written(self) -> tuple[ImagePlan, ...]:
        """The images that are written here, layer by layer."""
        return tuple(image for image in self.images if image.variant.dockerfile is None)

    @property
    def baked(self) -> tuple[ImagePlan, ...]:
        """The images that BuildKit makes, by a Dockerfile."""
        return tuple(image for image in self.images if image.variant.dockerfile is not None)

    def as_json(self) -> dict[str, Any]:
        """What `weir plan` prints."""
        images = {image.variant.name: _image_json(image, self.epoch) for image in self.written}
        return {"images": images, **({"bake": self.bake()} if self.baked else {})}

    def bake(self, named: str | None = None) -> dict[str, Any]:
        """The bake file for `docker buildx bake -f -`.

        The images get their own names or, where it is `named`, those that it is the beginning of.
        Provenance is off: it holds the time of the build, and with it no two builds have the same digest.
        """
        targets = {image.variant.name: _bake_target(image, self.epoch) for image in self.baked}
        for name, target in targets.items() if named else ():
            target["tags"] = [f"{named}-{name}"]
        return {"group": {"default": {"targets": [*targets]}}, "target": targets}


def _image_json(image: ImagePlan, epoch: int) -> dict[str, Any]:
    base = image.resolved.base
    layers: list[dict[str, Any]] = [{"layer": "base", base.origin: base.name, "pin": base.pin}]
    for name, wheels in wheel_layers(image.resolved.wheels):
        rows = {wheel.filename: f"sha256:{wheel.sha256}" for wheel in wheels}
        layers.append({"layer": name, "wheels": rows})
    layers += [{"layer": "bytecode"}] if base.origin == "bootstrap" else []
    layers.append({"layer": "service"})
    run = config_of(image, epoch, host_platform(), {})["config"]
    return {"tags": [image.variant.ref], "layers": layers, "config": run}


def _bake_target(image: ImagePlan, epoch: int) -> dict[str, Any]:
    variant = image.variant
    return {
        "context": str(image.context),
        "dockerfile": str(variant.dockerfile),
        "args": build_args(variant, image.resolved, epoch),
        "labels": labels(variant, image.resolved),
        "tags": [variant.ref],
        "attest": ["type=provenance,disabled=true"],
    }


def group_wheels(wheels: Sequence[Wheel]) -> Groups:
    """Torch alone, other heavy wheels together, small ones together: what changes often stays light."""
    torch = tuple(w for w in wheels if w.distribution == "torch")
    rest = [w for w in wheels if w.distribution != "torch"]
    heavy = tuple(w for w in rest if w.stored_bytes >= HEAVY_BYTES)
    return Groups(torch, heavy, tuple(w for w in rest if w.stored_bytes < HEAVY_BYTES))


def wheel_layers(wheels: Sequence[Wheel]) -> list[tuple[str, tuple[Wheel, ...]]]:
    """The layers of wheels by name, from the bottom up: in the order of how seldom they change.

    The last one is there even without wheels: the user of the service is in it.
    """
    groups = group_wheels(wheels)
    heavy = [(name, each) for name, each in (("torch", groups.torch), ("heavy", groups.heavy)) if each]
    return [*heavy, (PACKAGES, groups.small)]


def build_args(variant: Variant, resolved: Resolved, epoch: int) -> dict[str, str]:
    """The arguments of a Dockerfile: the base, and what is to be installed on a registry's."""
    on_registry = resolved.base.origin == "registry"
    base = f"{resolved.base.name.split('@')[0]}@{resolved.base.pin}" if on_registry else "rootfs"
    args = {"SOURCE_DATE_EPOCH": str(epoch), "BASE": base}
    if on_registry and variant.system_packages:
        args["SYSTEM_PACKAGES"] = " ".join(variant.system_packages)
    return args


def config_of(image: ImagePlan, epoch: int, platform: Platform, base: Mapping[str, Any]) -> dict[str, Any]:
    """The config of an image that is written here, without its layers; `base` is that of a registry's base.

    What the base says of how it is to be run stays, unless the service needs another value.
    """
    below = base.get("config")
    run = dict(below) if isinstance(below, Mapping) else {}
    inherited = [text for text in run.get("Env") or [PATH] if text.partition("=")[0] not in ENVIRONMENT]
    run |= SERVED
    run["Env"] = [*inherited, *(f"{name}={value}" for name, value in ENVIRONMENT.items())]
    run["ExposedPorts"] = {**(run.get("ExposedPorts") or {}), "8000/tcp": {}}
    run["Labels"] = {**(run.get("Labels") or {}), **labels(image.variant, image.resolved)}
    run.setdefault("WorkingDir", "/")
    machine = {"architecture": platform.architecture, "os": platform.os}
    kept = {key: base[key] for key in ("variant", "os.version", "os.features") if key in base}
    return {**machine, **kept, "created": _time(epoch), "config": run}


def history_of(image: ImagePlan, epoch: int, base: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A step for each layer, after those of a registry's base."""
    resolved = image.resolved
    steps = [] if resolved.base.origin == "registry" else [f"root file system of Debian {resolved.base.name}"]
    for name, wheels in wheel_layers(resolved.wheels):
        user = " and the user of the service" if name == PACKAGES else ""
        steps.append(f"{', '.join(f'{w.distribution} {w.version}' for w in wheels) or 'no wheels'}{user}")
    steps += ["bytecode of what the service imports"] if resolved.base.origin == "bootstrap" else []
    steps.append("the service")
    own = [{"created": _time(epoch), "created_by": f"weir build: {step}"} for step in steps]
    return [*(dict(step) for step in base), *own]


def _time(epoch: int) -> str:
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def labels(variant: Variant, resolved: Resolved) -> dict[str, str]:
    """Labels of an image: what it is, and which sources it came from.

    Why other sources failed stays on the host (lock file, report): such messages name its network.
    """
    return {
        "org.opencontainers.image.title": f"weir/{variant.name}",
        "org.opencontainers.image.description": variant.summary,
        "org.opencontainers.image.base.name": resolved.base.name,
        "org.opencontainers.image.base.digest": resolved.base.pin,
        f"{LABEL}.variant": variant.name,
        f"{LABEL}.torch.build": resolved.torch_build.value,
        f"{LABEL}.torch.version": resolved.torch_version or "from the base",
        f"{LABEL}.gpu-targets": ",".join(variant.gpu_targets),
        f"{LABEL}.pruned": "yes" if variant.prune else "no",
        f"{LABEL}.source.base": f"{resolved.base.origin}:{resolved.base.name}",
        f"{LABEL}.source.torch": resolved.torch_source,
        f"{LABEL}.source.wheels": "host-pip" if resolved.wheels else "none",
        **dict(variant.labels),
    }


def unresolved(variant: Variant) -> Resolved:
    """Placeholder for inputs not resolved yet: a plan can be shown before anything is fetched."""
    source = variant.torch[0]
    base = (source.base or variant.base)[0]
    pin = "sha256:not-resolved-yet" if isinstance(base, Registry) else "not-resolved-yet"
    return Resolved(
        variant=variant.name,
        spec_sha256="",
        torch_source=source.name,
        torch_build=source.build,
        python=source.python or variant.python,
        base=base.pinned(pin),
        notes=("not resolved yet: run a build to find and lock the inputs",),
    )


def disk_needed(variant: Variant, resolved: Resolved | None) -> int:
    """Bytes a build may need at once, by the spec alone: context, snapshot, stored layers.

    An unpacked budget is the best guess of the image; without one, the wheels' bytes times a usual ratio.
    """
    wheels = sum(wheel.stored_bytes for wheel in resolved.wheels) if resolved else 0
    image = variant.budget.unpacked_bytes or wheels * UNPACKED_PER_STORED
    if any(isinstance(base, Bootstrap) and "python3-torch" in base.packages for base in variant.base):
        image = max(image, 6_000_000_000)
    return image + wheels
