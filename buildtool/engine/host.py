"""What this host has for images and containers: engine, plugins, disk; which AMD cards it has.

Facts are read from files and programs; what they mean (`diagnose`) is decided without touching anything.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
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


class State(Enum):
    """The state of one thing."""

    OK = "ok"
    MISSING = "MISSING"  # builds or runs fail without it
    NOTE = "note"  # something works less well, or only some variants need it


@dataclass(frozen=True)
class Facts:
    """What was found; None means absent."""

    engine: EngineInfo | ToolError  # or why none answers
    buildx: str | None
    compose: str | None
    mmdebstrap: bool
    free_disk_bytes: int | Unknown  # where the engine's images are


@dataclass(frozen=True)
class Row:
    """One thing, its state, and what to type about it."""

    thing: str
    state: State
    found: str
    next_step: str = ""


def gather() -> Facts:
    """Look at this host's engine and what builds need beside it."""
    engine = _engine()
    return Facts(
        engine=engine,
        buildx=_or_none(require_buildx),
        compose=_or_none(_compose_version),
        mmdebstrap=find("mmdebstrap") is not None,
        free_disk_bytes=_free_for(engine),
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


def diagnose(facts: Facts) -> list[Row]:
    """What the facts mean for building and running images."""
    return [*_engine_rows(facts), *_source_rows(facts)]


def _engine_rows(facts: Facts) -> list[Row]:
    hint = INSTALL
    if isinstance(facts.engine, ToolError):
        engine = Row("engine", State.MISSING, facts.engine.message, facts.engine.hint)
    elif facts.engine.containerd_store:
        engine = Row("engine", State.OK, f"{facts.engine.version}, containerd image store")
    else:
        switch = (
            'for zstd layers put {"features": {"containerd-snapshotter": true}} into /etc/docker/daemon.json '
            "(it hides the images that are there now)"
        )
        engine = Row("engine", State.NOTE, f"{facts.engine.version}, classic image store", switch)
    plugins = [
        Row(name, State.OK if version else State.MISSING, version or "not there", "" if version else hint)
        for name, version in (("buildx", facts.buildx), ("compose", facts.compose))
    ]
    return [engine, *plugins]


def _disk_row(free: int | Unknown) -> Row:
    wanted = f"the rocm image needs {decimal_bytes(ROOMY_BYTES)}"
    if isinstance(free, Unknown):
        return Row("disk", State.NOTE, f"unknown: {free.reason}", f"{wanted}; check with: df -h")
    roomy = free >= ROOMY_BYTES
    found = f"{decimal_bytes(free)} free for the engine"
    return Row(
        "disk",
        State.OK if roomy else State.NOTE,
        found,
        "" if roomy else f"{wanted}: docker builder prune",
    )


def _source_rows(facts: Facts) -> list[Row]:
    return [
        _disk_row(facts.free_disk_bytes),
        Row(
            "mmdebstrap",
            State.OK if facts.mmdebstrap else State.NOTE,
            "installed" if facts.mmdebstrap else "not installed",
            "" if facts.mmdebstrap else "only needed where no registry answers: apt-get install mmdebstrap",
        ),
    ]


def _engine() -> EngineInfo | ToolError:
    try:
        return Engine(timeout_s=10).info()
    except ToolError as error:
        return error


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
