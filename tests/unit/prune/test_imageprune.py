"""Pruning an image that doesn't fit on the disk, or under a bad name, ends before it begins."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.core.errors import BuildFailed, ConfigError, DataError, EnvironmentMissing
from buildtool.engine import host
from buildtool.engine.client import EngineInfo
from buildtool.gpucode.target import parse_targets
from buildtool.prune import images

GFX906 = parse_targets("gfx906")
RECORD = {"Id": "sha256:" + "a" * 64, "RepoTags": ["weir/rocm:latest"], "Size": 552, "Config": {}}


class FakeEngine:
    """An engine with one image, whose files take 2,200 bytes; it hears what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def inspect(self, _ref: str) -> dict[str, Any]:
        return RECORD

    def tags(self, _repository: str) -> tuple[str, ...]:
        return ()

    def sweep_containers(self) -> None:
        pass

    def unpacked_bytes(self, _ref: str) -> int:
        return 2200

    def save(self, ref: str) -> Iterator[bytes]:
        self.asked.append(f"save {ref}")
        raise BuildFailed("far enough")


def prune(engine: FakeEngine, state: Path, tag: str | None = None) -> None:
    fake: Any = engine
    images.prune_image("weir/rocm", GFX906, tag, engine=fake, state=state, progress=lambda _line: None)


@pytest.mark.parametrize(("free", "fits"), [(4399, False), (4400, True)])
def test_a_disk_that_cannot_hold_two_tars_of_the_files_is_said_to_be_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda _path: free)
    engine = FakeEngine()
    with pytest.raises(BuildFailed if fits else EnvironmentMissing):
        prune(engine, tmp_path)
    assert bool(engine.asked) == fits


@pytest.mark.parametrize("tag", ["weir/rocm", "docker.io/weir/rocm:latest", "A:b", ""])
def test_the_original_keeps_its_name_and_a_bad_name_costs_nothing(tmp_path: Path, tag: str) -> None:
    engine = FakeEngine()
    with pytest.raises(ConfigError):
        prune(engine, tmp_path / "state", tag)
    assert engine.asked == []
    assert not (tmp_path / "state").exists()


def test_a_place_for_caches_that_is_none_is_refused_with_the_way_to_name_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = FakeEngine()
    with pytest.raises(DataError) as refused:
        prune(engine, tmp_path / "file/state")
    assert refused.value.hint == "name a directory for caches: WEIR_STATE=DIR"
    assert engine.asked == []


def job(engine: Any, folder: Path) -> images._Job:
    return images._Job("x", {"Id": "sha256:a"}, GFX906, engine, folder, lambda _line: None)


def test_more_files_than_there_is_room_for_stop_the_export(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(export=lambda _ref: iter([bytes(600)] * 10))
    with pytest.raises(EnvironmentMissing, match="more files than the engine reports"):
        job(engine, tmp_path).prune_files(2000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "fits"), [(10_240, False), (3 * 10_240, True)])
def test_an_engine_without_room_for_the_layer_and_its_files_is_not_given_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    """Filled to the last byte, its disk would stop every container that writes there."""
    root, scratch = tmp_path / "engine", tmp_path / "scratch"
    for folder in (root, scratch):
        folder.mkdir()
    (scratch / "rootfs.tar").write_bytes(bytes(10_240))
    monkeypatch.setenv("DOCKER_HOST", "unix:///var/run/docker.sock")
    monkeypatch.setattr(host, "free_bytes", lambda path: free if path == root else 10**12)
    info = EngineInfo("26.1", False, socket.gethostname(), str(root), ())
    given: list[bytes] = []

    def load(chunks: Iterator[bytes]) -> None:
        given.extend(chunks)
        raise BuildFailed("far enough")

    engine: Any = SimpleNamespace(info=lambda: info, load=load)
    with pytest.raises(BuildFailed if fits else EnvironmentMissing):
        job(engine, scratch).load_copy(b"{}", "x")
    assert bool(given) == fits
