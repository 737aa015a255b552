"""What this host has for images and containers: engine, plugins, disk; which AMD cards it has.

Facts are read from files and programs; what they mean (`diagnose`) is decided without touching anything.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from buildtool.command import CommandFailed, find, run
from buildtool.engine.buildx import require_buildx
from buildtool.engine.client import Engine, EngineInfo
from buildtool.engine.connection import INSTALL, endpoint_here
from buildtool.engine.room import disk_here
from buildtool.errors import EnvironmentMissing, ToolError
from buildtool.files import free_bytes
from buildtool.gpucode.target import target_of_override
from probes.shared import kfd
from probes.shared.units import decimal_bytes
from probes.shared.unknown import Unknown

T = TypeVar("T")

ROOMY_BYTES = 25_000_000_000  # the rocm image, its root file system, its context and the engine's copies


@dataclass(frozen=True)
class Facts:
    """What was found; None means absent."""

    engine: EngineInfo | ToolError  # or why none answers
    buildx: str | None
    compose: str | None
    mmdebstrap: bool
    free_disk_bytes: int | Unknown  # where the engine's images are
    images: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # builds made: labels by name


@dataclass(frozen=True)
class Row:
    """One thing that isn't as builds and containers need it, and what to type about it."""

    thing: str
    found: str
    next_step: str
    fails: bool = False  # builds or runs fail without it; else it works less well, or only some need it


def gather() -> Facts:
    """Look at this host's engine and what builds need beside it."""
    engine, images = _engine()
    return Facts(
        engine=engine,
        buildx=_or_none(require_buildx),
        compose=_or_none(_compose_version),
        mmdebstrap=find("mmdebstrap") is not None,
        free_disk_bytes=_free_for(engine),
        images=images,
    )


def amd_targets(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The targets of this host's AMD cards by the KFD topology, each once: `gfx906`. None without cards.

    With HSA_OVERRIDE_GFX_VERSION set, they are the target that it names. Old kernels don't report a
    card's target. Raises BadTarget when the variable isn't a version.
    """
    found = kfd.targets(root)
    override = env.get("HSA_OVERRIDE_GFX_VERSION")
    if found and override:
        return (str(target_of_override(override)),)
    return found


def diagnose(facts: Facts) -> Iterator[Row]:
    """What this host lacks for building and running images; nothing where it has everything."""
    if isinstance(facts.engine, ToolError):
        yield Row("engine", facts.engine.message, facts.engine.hint, fails=True)
    elif not facts.engine.containerd_store:
        switch = (
            'for zstd layers put {"features": {"containerd-snapshotter": true}} into /etc/docker/daemon.json '
            "(it hides the images that are there now)"
        )
        yield Row("engine", f"{facts.engine.version}, classic image store", switch)
    for name, version in (("buildx", facts.buildx), ("compose", facts.compose)):
        if not version:
            yield Row(name, "the docker CLI has no working plugin of this name", INSTALL, fails=True)
    yield from _disk_rows(facts.free_disk_bytes)
    if not facts.mmdebstrap:
        hint = "only needed where no registry answers: apt-get install mmdebstrap"
        yield Row("mmdebstrap", "not installed", hint)


def _disk_rows(free: int | Unknown) -> Iterator[Row]:
    wanted = f"the rocm image needs {decimal_bytes(ROOMY_BYTES)}"
    if isinstance(free, Unknown):
        yield Row("disk", f"unknown: {free.reason}", f"{wanted}; check with: df -h")
    elif free < ROOMY_BYTES:
        yield Row("disk", f"{decimal_bytes(free)} free for the engine", f"{wanted}: docker builder prune")


def _engine() -> tuple[EngineInfo | ToolError, dict[str, dict[str, str]]]:
    """The engine, and the labels of the images that builds made."""
    try:
        engine = Engine(timeout_s=10)
        info = engine.info()
        return info, {name: engine.labels(name) for name in engine.tags("weir/*")}
    except ToolError as error:
        return error, {}


def _free_for(engine: EngineInfo | ToolError) -> int | Unknown:
    """Free bytes for images: the engine's, or those of the place where one would be installed."""
    if isinstance(engine, EngineInfo):
        place = disk_here(engine)
        return place if isinstance(place, Unknown) else free_bytes(place)
    try:
        named_by = endpoint_here().named_by
    except ToolError as error:
        return Unknown(error.message)
    return Unknown(f"no engine answers where {named_by} says") if named_by else free_bytes(Path("/var/lib"))


def _compose_version() -> str:
    return run(["docker", "compose", "version", "--short"]).stdout.strip()


def _or_none(look: Callable[[], T]) -> T | None:
    try:
        return look()
    except (EnvironmentMissing, CommandFailed):
        return None
