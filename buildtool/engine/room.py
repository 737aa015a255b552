"""Room on disks, checked before something large is written: in our folders, and where engines keep images."""

import socket
from pathlib import Path

from buildtool.engine.client import Engine, EngineInfo
from buildtool.engine.connection import endpoint_here
from buildtool.engine.endpoint import disk_of
from buildtool.errors import EnvironmentMissing
from buildtool.files import free_bytes
from buildtool.progress import Say
from probes.shared.units import decimal_bytes
from probes.shared.unknown import Unknown


def require_room(place: Path, n_bytes: int, purpose: str) -> int:
    """The free bytes at `place`. Raises EnvironmentMissing where `purpose` may take more than those."""
    free = free_bytes(place)
    if free < n_bytes:
        raise EnvironmentMissing(
            f"{place} has {decimal_bytes(free)} free; {purpose} may take {decimal_bytes(n_bytes)}",
            "free some space (docker system df; docker builder prune), or work elsewhere: WEIR_STATE=DIR",
        )
    return free


def require_engine_room(engine: Engine, n_bytes: int, purpose: str, *, say: Say) -> None:
    """Check the engine's disk as `require_room` does; where it isn't one of this host's, only say so."""
    place = disk_here(engine.info())
    if isinstance(place, Unknown):
        say(f"the engine's disk isn't checked: {place.reason}")
    else:
        require_room(place, n_bytes, purpose)


def disk_here(info: EngineInfo) -> Path | Unknown:
    """Where on this host the engine's images are, or why their disk can't be measured.

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
