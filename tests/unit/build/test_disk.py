"""The disk check before a build looks at the disks that the build will fill."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.build import catalog, pipeline
from buildtool.build.lockfile import Lock
from buildtool.build.workplace import Workplace
from buildtool.core.errors import EnvironmentMissing
from buildtool.engine import host
from buildtool.engine.client import EngineInfo

CPU = catalog.load().select(("cpu",))[0]


def test_a_remote_engines_build_is_not_refused_for_this_hosts_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host has a directory of the engine's name, and no room under it."""
    full = tmp_path / "engine"
    full.mkdir()
    monkeypatch.setattr(host, "free_bytes", lambda path: 0 if path == full else 10**12)
    info = EngineInfo("26.1", True, socket.gethostname(), str(full), ())
    engine: Any = SimpleNamespace(info=lambda: info)
    said: list[str] = []
    place = Workplace(tmp_path / "state", tmp_path / "lock.json", said.append)
    lock = Lock.load(place.lock)
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2376")
    pipeline.require_disk_space(place, [CPU], engine, lock)
    assert said == [
        "the engine's disk isn't checked: the engine is at tcp://far:2376, and its disk can't be measured"
        " from here"
    ]
    monkeypatch.setenv("DOCKER_HOST", "unix:///var/run/docker.sock")
    with pytest.raises(EnvironmentMissing, match="has 0 B free"):
        pipeline.require_disk_space(place, [CPU], engine, lock)
