"""What this host has for building and running images: engine, plugins, disk space, AMD cards.

`gather` reads the facts from files and programs; `diagnose` says what they mean, and is pure.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from buildtool.core.command import CommandFailed, find, run
from buildtool.core.errors import EnvironmentMissing, ToolError
from buildtool.core.files import free_bytes
from buildtool.core.progress import Progress
from buildtool.engine.buildx import require_buildx
from buildtool.engine.client import Engine, EngineInfo
from buildtool.engine.connection import INSTALL, Endpoint, endpoint_here
from probes.core.units import decimal_bytes
from probes.core.unknown import Unknown

T = TypeVar("T")

ROOMY_BYTES = 25_000_000_000  # the rocm image, its root file system, its context and the engine's copies


@dataclass(frozen=True)
class Facts:
    """The engine and what builds need beside it; None means absent."""

    engine: EngineInfo | ToolError  # or why none answers
    buildx: str | None
    compose: str | None
    mmdebstrap: bool
    free_disk_bytes: int | Unknown  # where the engine's images are
    images: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # builds made: labels by name


def gather() -> Facts:
    """Look at this host's engine and what builds need beside it."""
    engine, images = _engine()
    return Facts(
        engine=engine,
        buildx=_or_none(require_buildx),
        compose=_or_none(_compose_version),
        mmdebstrap=find("mmdebstrap") is not None,
        free_disk_bytes=free_image_bytes(engine),
        images=images,
    )


def _engine() -> tuple[EngineInfo | ToolError, dict[str, dict[str, str]]]:
    """The engine, and the labels of the images that builds made."""
    try:
        engine = Engine(timeout_s=10)
        info = engine.info()
        return info, {name: engine.labels(name) for name in engine.tags("weir/*")}
    except ToolError as error:
        return error, {}


def _compose_version() -> str:
    return run(["docker", "compose", "version", "--short"]).stdout.strip()


def _or_none(look: Callable[[], T]) -> T | None:
    try:
        return look()
    except (EnvironmentMissing, CommandFailed):
        return None


@dataclass(frozen=True)
class Row:
    """A thing that isn't as builds and containers need it, and what to type about it."""

    thing: str
    state: str
    next_step: str
    fails: bool = False  # builds or runs fail without it; else it works less well, or only some need it


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
    needed = f"the rocm image needs {decimal_bytes(ROOMY_BYTES)}"
    if isinstance(free, Unknown):
        yield Row("disk", f"unknown: {free.reason}", f"{needed}; check with: df -h")
    elif free < ROOMY_BYTES:
        yield Row("disk", f"{decimal_bytes(free)} free for the engine", f"{needed}: docker builder prune")


# ---- disk space --------------------------------------------------------------------------------------------


def require_free_space(place: Path, n_bytes: int, purpose: str) -> int:
    """The free bytes at `place`. Raises EnvironmentMissing for a purpose that may take more."""
    free = free_bytes(place)
    if free < n_bytes:
        raise EnvironmentMissing(
            f"{place} has {decimal_bytes(free)} free; {purpose} may take {decimal_bytes(n_bytes)}",
            "free some space (docker system df; docker builder prune), or work elsewhere: WEIR_STATE=DIR",
        )
    return free


def require_engine_space(engine: Engine, n_bytes: int, purpose: str, *, progress: Progress) -> None:
    """`require_free_space` on the engine's disk; one that isn't this host's is reported as not checked."""
    place = engine_disk(engine.info())
    if isinstance(place, Unknown):
        progress(f"the engine's disk isn't checked: {place.reason}")
    else:
        require_free_space(place, n_bytes, purpose)


def free_image_bytes(engine: EngineInfo | ToolError) -> int | Unknown:
    """Free bytes for images: on the engine's disk, or where an engine would be installed."""
    if isinstance(engine, EngineInfo):
        place = engine_disk(engine)
        return place if isinstance(place, Unknown) else free_bytes(place)
    try:
        named_by = endpoint_here().named_by
    except ToolError as error:
        return Unknown(error.message)
    return Unknown(f"no engine answers where {named_by} says") if named_by else free_bytes(Path("/var/lib"))


def engine_disk(info: EngineInfo) -> Path | Unknown:
    """The directory of the engine's images on this host, or why their disk can't be measured.

    Raises EngineUnavailable.
    """
    root = Path(info.root_dir)
    try:
        is_seen = root.is_dir()
    except OSError:  # below a directory that we may not search
        is_seen = False
    return disk_of(
        endpoint_here(),
        root,
        engine_host=info.host,
        this_host=socket.gethostname(),
        is_seen=is_seen,
    )


def disk_of(
    endpoint: Endpoint, root: Path, *, engine_host: str, this_host: str, is_seen: bool
) -> Path | Unknown:
    """The engine's directory if it is on this host, else the reason why its disk can't be measured.

    `root` is the engine's name for it; `is_seen` says whether this host has a directory of that name,
    which may be another one. A socket alone proves nothing: ssh forwards them, containers are given them.
    """
    if not endpoint.host.startswith("unix://"):
        return Unknown(f"the engine is at {endpoint.host}, and its disk can't be measured from here")
    if engine_host != this_host:
        return Unknown(f"the engine runs on {engine_host or 'a host without a name'}, not on {this_host}")
    return root if is_seen else Unknown(f"the engine's directory {root} can't be seen from here")
