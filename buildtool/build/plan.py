"""What a build will do, as values: plans of images, the bake file, labels, build arguments. Pure.

The same inputs give the same bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buildtool.core.model import LABEL, ZSTD_LEVEL, Bootstrap, Registry, Resolved, Variant, Wheel
from buildtool.gpucode.source import prefix_errors
from buildtool.gpucode.target import TargetId, served_targets

HEAVY_BYTES = 20_000_000  # wheels of at least this size get their own layer
DISK_FLOOR = 2_000_000_000  # bytes; with less, no build is started
UNPACKED_PER_STORED = 4  # wheels; a generous guess for the disk check alone


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
    tools: tuple[Wheel, ...] = ()  # run inside the build, stay out of the images

    def bake(self, *, zstd: bool, named: str | None = None) -> dict[str, Any]:
        """The bake file for `docker buildx bake -f -`.

        The images get their own names or, where it is `named`, those that it is the beginning of.

        zstd needs the engine's containerd image store; the classic store keeps layers unpacked anyway.
        Provenance is off: it holds the time of the build, and with it no two builds have the same digest.
        """
        targets = {image.variant.name: _bake_target(image, self.epoch, zstd=zstd) for image in self.images}
        for name, target in targets.items() if named else ():
            target["tags"] = [f"{named}-{name}"]
        return {"group": {"default": {"targets": [*targets]}}, "target": targets}


def _bake_target(image: ImagePlan, epoch: int, *, zstd: bool) -> dict[str, Any]:
    variant = image.variant
    ours = variant.dockerfile.parent.name != "naive"  # the naive image stays as people build it
    return {
        "context": str(image.context),
        "dockerfile": str(variant.dockerfile),
        "args": build_args(variant, image.resolved, epoch),
        "labels": labels(variant, image.resolved),
        "tags": [variant.ref],
        "attest": ["type=provenance,disabled=true"],
        **({"output": [image_output()]} if zstd and ours else {}),
    }


def group_wheels(wheels: Sequence[Wheel]) -> Groups:
    """Torch alone, other heavy wheels together, small ones together: what changes often stays light."""
    torch = tuple(w for w in wheels if w.distribution == "torch")
    rest = [w for w in wheels if w.distribution != "torch"]
    heavy = tuple(w for w in rest if w.stored_bytes >= HEAVY_BYTES)
    return Groups(torch, heavy, tuple(w for w in rest if w.stored_bytes < HEAVY_BYTES))


def build_args(variant: Variant, resolved: Resolved, epoch: int) -> dict[str, str]:
    """The Dockerfile's arguments: the base, and which stages have something to do."""
    groups = group_wheels(resolved.wheels)
    on_registry = resolved.base.origin == "registry"
    base = f"{resolved.base.name.split('@')[0]}@{resolved.base.pin}" if on_registry else "rootfs"
    args = {"SOURCE_DATE_EPOCH": str(epoch), "BASE": base}
    stage = "base"
    if on_registry and variant.system_packages:
        args["SYSTEM_PACKAGES"] = " ".join(variant.system_packages)
        stage = "packages"
    for name, wheels in (("torch", groups.torch), ("heavy", groups.heavy)):
        args[f"{name.upper()}_FROM"] = stage
        stage = name if wheels else stage
    return args | {"SMALL_FROM": stage}


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


def image_output() -> str:
    """How BuildKit is to write an image into a containerd store."""
    compression = f"compression=zstd,compression-level={ZSTD_LEVEL},force-compression=true"
    return f"type=image,oci-mediatypes=true,{compression}"


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
