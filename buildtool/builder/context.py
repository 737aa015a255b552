"""Stages a build's context: a folder with the root file system, wheels by layer, tools and the payload.

Everything big is a hard link into a cache; every time and mode is set, so that a clone of the repository
made today gives the layers that one made last year gave.
"""

import os
import shutil
from pathlib import Path

from buildtool.builder.plan import group_wheels
from buildtool.builder.wheels import WheelCache
from buildtool.files import scratch, sha256_of
from buildtool.model import Resolved, Wheel
from buildtool.prune.inputs import PrunedInputs
from buildtool.prune.manifest import IMAGE_PATH
from buildtool.shipped import IMAGES, PROBES

APP = "payload/opt/weir/app"
# what goes into every image, and where below APP
PAYLOAD = {
    IMAGES / "service": "service",
    IMAGES / "profiles": "profiles",
    PROBES: "probes",
    IMAGES / "smoke.py": "smoke.py",
}
LEFT_OUT = shutil.ignore_patterns("__pycache__", "py.typed", ".*", "*~")  # bytecode, what editors leave


def stage(
    final: Path,
    resolved: Resolved,
    cache: WheelCache,
    tools: tuple[Wheel, ...],
    *,
    rootfs: Path | None,
    epoch: int,
    pruned: PrunedInputs | None = None,
) -> None:
    """Make the context `final` again, completely or not at all.

    Files of caches are linked, not copied. `pruned` inputs replace their originals, and the list of what
    was removed joins the payload.
    """
    with scratch(final.parent) as folder:
        context = folder / final.name
        _fill(context, resolved, cache, tools, epoch=epoch, pruned=pruned)
        if rootfs:
            _link(pruned.path(resolved.base.pin, rootfs) if pruned else rootfs, context / "rootfs.tar")
        if final.exists():  # moved, not removed: an interrupted removal would leave half of it there
            final.replace(folder / "old")
        context.replace(final)


def _fill(
    context: Path,
    resolved: Resolved,
    cache: WheelCache,
    tools: tuple[Wheel, ...],
    *,
    epoch: int,
    pruned: PrunedInputs | None,
) -> None:
    """Everything in a context except the root file system."""
    groups = group_wheels(resolved.wheels)
    by_folder = {"torch": groups.torch, "heavy": groups.heavy, "small": groups.small}
    for folder, wheels in by_folder.items():
        _link_all(wheels, cache, context / "wheels" / folder, pruned=pruned)
    _link_all(tools, cache, context / "tools")
    for script in (IMAGES / "tools").glob("*.py"):
        shutil.copyfile(script, context / "tools" / script.name)
    for origin, name in PAYLOAD.items():
        _copy(origin, context / APP / name)
    if pruned:
        (context / "payload" / IMAGE_PATH).write_text(pruned.manifest(), encoding="utf-8")
    _settle(context / "payload", epoch)
    _settle(context / "tools", epoch, links=False)


def _link_all(
    wheels: tuple[Wheel, ...], cache: WheelCache, folder: Path, *, pruned: PrunedInputs | None = None
) -> None:
    folder.mkdir(parents=True)
    for wheel in wheels:
        path = cache.path(wheel)
        _link(pruned.path(wheel.sha256, path) if pruned else path, folder / wheel.filename)


def _link(origin: Path, target: Path) -> None:
    try:
        os.link(origin, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(origin, target)


def _copy(origin: Path, target: Path) -> None:
    if origin.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, target)
    elif origin.is_dir():
        shutil.copytree(
            origin,
            target,
            ignore=LEFT_OUT,
            copy_function=shutil.copyfile,
        )


def _settle(folder: Path, epoch: int, *, links: bool = True) -> None:
    """Set modes and times below and including a folder; hard links into caches are left as they are.

    A file's time is made from its content: BuildKit sends a file again only when its size or time differs,
    so if all had the same time, an edit of the same length would never reach the engine.
    """
    for path in sorted((folder, *folder.rglob("*")), reverse=True):
        if not links and path.is_file() and path.stat().st_nlink > 1:
            continue
        path.chmod(0o755 if path.is_dir() else 0o644)
        before_ns = 0 if path.is_dir() else int(sha256_of(path)[:12], 16)  # 48 bits: 3 days in nanoseconds
        time_ns = max(0, epoch * 10**9 - before_ns)
        os.utime(path, ns=(time_ns, time_ns))
