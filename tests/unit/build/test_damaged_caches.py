"""Damaged results of an earlier run: made again or reported, never a traceback and never trusted."""

import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from buildtool.build import pipeline
from buildtool.build.lockfile import Lock
from buildtool.build.rootfs import RootfsCache
from buildtool.build.wheels import WheelCache
from buildtool.cli import program
from buildtool.core import files
from buildtool.core.errors import ConfigError, DataError, EngineUnavailable, Exit
from buildtool.core.model import Bootstrap, TorchBuild, Wheel
from buildtool.engine import proof
from buildtool.engine.client import Engine
from buildtool.engine.connection import DEFAULT_HOST, endpoint_here
from buildtool.gpucode.target import parse_targets
from buildtool.prune.inputs import PruneCache

DAMAGED = (b"", b"{", b"[]", b"{}", b"\xff\xfe", b"5", b"null", b'{"torch_build": "abacus"}', b"[" * 100_000)
WHEEL = Wheel("a-1-py3-none-any.whl", "00" * 32, 3)


def silent(_line: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_seal_means_another_proof_and_no_traceback(tmp_path: Path, text: bytes) -> None:
    seal = tmp_path / "seal"
    seal.write_bytes(text)
    assert files.read_cached(seal, proof.from_seal) is None
    assert files.read_cached(seal, pipeline._audit_from_seal) is None


def test_a_whole_seal_is_read(tmp_path: Path) -> None:
    seen = proof.Proof("3.11.2", "2.9", TorchBuild.CPU, "not installed")
    (tmp_path / "seal").write_text(proof.to_seal(seen))
    assert files.read_cached(tmp_path / "seal", proof.from_seal) == seen
    assert files.read_cached(tmp_path, proof.from_seal) is None  # a directory
    assert files.read_cached(tmp_path / "nothing", proof.from_seal) is None


@pytest.mark.parametrize("text", [*DAMAGED, b'{"changed": 0, "run": {"targets": []}, "sha256": ""}'])
def test_a_damaged_record_of_a_prune_means_another_prune(tmp_path: Path, text: bytes) -> None:
    original = tmp_path / "x.tar"
    tarfile.open(original, "w").close()
    cache = PruneCache(tmp_path / "pruned", silent)
    first = cache.bring(original, "aa", parse_targets("gfx906"))
    (told,) = (tmp_path / "pruned").glob("*.json")
    told.write_bytes(text)
    assert cache.bring(original, "aa", parse_targets("gfx906")).run["targets"] == first.run["targets"]
    assert json.loads(told.read_text())["changed"] is False


@pytest.mark.parametrize("digest", [b"", b"\xff\xff", b"0" * 63, b"z" * 64])
def test_a_damaged_digest_of_a_root_file_system_is_neither_locked_nor_a_traceback(
    tmp_path: Path, digest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, recipe = RootfsCache(tmp_path, silent), Bootstrap("bookworm", ("tini",))
    path = cache.path(recipe, 1)
    path.write_bytes(b"old")
    path.with_suffix(".sha256").write_bytes(digest)
    monkeypatch.setattr(cache, "_make", lambda _base, path, _epoch: path.write_bytes(b"new"))
    assert cache.bring(recipe, 1) == (path, files.sha256_of(path))
    assert path.read_bytes() == b"new"


def test_a_directory_where_a_cached_file_is_expected_is_removed(tmp_path: Path) -> None:
    wheels, rootfs = WheelCache(tmp_path / "wheels", silent), RootfsCache(tmp_path / "rootfs", silent)
    for path in (wheels.path(WHEEL), rootfs.path(Bootstrap("bookworm", ()), 1)):
        path.mkdir(parents=True)
    with pytest.raises(DataError, match="corrupt"):
        wheels.verify([WHEEL])
    with pytest.raises(DataError, match="corrupt"):
        rootfs.verify(rootfs.path(Bootstrap("bookworm", ()), 1), "00" * 32)
    assert not wheels.path(WHEEL).exists()


def test_a_file_where_a_cached_directory_is_expected_is_reported(tmp_path: Path) -> None:
    (tmp_path / WHEEL.sha256).write_text("in the way")
    with pytest.raises(DataError, match="Not a directory"):
        WheelCache(tmp_path, silent).verify([WHEEL])


@pytest.mark.parametrize(
    "wheel",
    [
        {"filename": "../../../precious-1.whl", "sha256": "00" * 32, "stored_bytes": 1},
        {"filename": "a-1-py3-none-any.whl", "sha256": "../..", "stored_bytes": 1},
        {"filename": "..", "sha256": "..", "stored_bytes": 1},
        {"filename": 5, "sha256": "00" * 32, "stored_bytes": 1},
        {"filename": "a-1-py3-none-any.whl", "sha256": "00" * 32, "stored_bytes": None},
    ],
)
def test_a_lock_file_leads_to_nothing_outside_the_cache(tmp_path: Path, wheel: dict[str, object]) -> None:
    """A damaged wheel is deleted, so a lock file that names another file would delete that one."""
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({"schema_version": 1, "variants": {}, "tools": [wheel]}))
    with pytest.raises(ConfigError, match="not a lock file"):
        Lock.load(path)


def test_a_lock_file_that_can_not_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Is a directory"):
        Lock.load(tmp_path)


def test_the_remedy_for_a_foreign_lock_file_is_quoted_for_the_shell(tmp_path: Path) -> None:
    path = tmp_path / "$(touch x) lock.json"
    path.write_text("{}")
    with pytest.raises(ConfigError) as caught:
        Lock.load(path)
    assert f"rm -- '{path}'" in caught.value.hint


@pytest.mark.parametrize("host", ["tcp://[::1", "tcp://x:port", "tcp://127.0.0.1:99999", "garbage"])
def test_an_address_that_is_none_is_reported_and_no_traceback(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineUnavailable, match="DOCKER_HOST names"):
        Engine()


def test_a_user_without_a_home_directory_has_the_default_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert endpoint_here().host == DEFAULT_HOST


def test_an_unforeseen_failure_of_the_file_system_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(_args: object) -> int:
        raise FileNotFoundError(2, "No such file or directory", "/gone")

    monkeypatch.setattr("buildtool.cli.plan.run", gone)
    assert program.main(["plan"]) == Exit.DATA
    assert "can't use /gone: No such file or directory" in capsys.readouterr().err


def test_free_space_below_a_directory_that_can_not_be_searched_is_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(path: Path) -> object:
        if path != tmp_path:
            raise PermissionError(13, "Permission denied")
        return SimpleNamespace(free=12_345)  # what really is free changes between two looks at it

    monkeypatch.setattr(files.shutil, "disk_usage", usage)
    assert files.free_bytes(tmp_path / "closed/docker") == 12_345
