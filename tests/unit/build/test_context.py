"""A staged context depends on content alone: not on the clone's times, modes or leftovers."""

from dataclasses import replace
from pathlib import Path

import pytest

from buildtool.build import payload, pipeline
from buildtool.build.wheels import WheelCache
from buildtool.core.errors import DataError, EnvironmentMissing
from buildtool.core.files import replacing, write_text
from buildtool.core.model import PinnedBase, Resolved, TorchBuild, Wheel

WHEEL = Wheel("torch-2-py3-none-any.whl", "ab" * 32, 3)
RESOLVED = Resolved("cpu", "", "s", TorchBuild.CPU, "3.11", PinnedBase("bootstrap", "b", ""), (WHEEL,))
RESOLVED_WITHOUT_WHEELS = replace(RESOLVED, wheels=())


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    cache = WheelCache(tmp_path / "wheels", lambda _line: None)
    cache.path(WHEEL).parent.mkdir(parents=True)
    cache.path(WHEEL).write_bytes(b"zip")
    rootfs = tmp_path / "root.tar"
    rootfs.write_bytes(b"tar")
    pipeline.stage_context(tmp_path / "context", RESOLVED, cache, (), rootfs=rootfs, epoch=1_000_000)
    return tmp_path / "context"


def test_wheels_and_root_file_system_are_linked_not_copied(staged: Path) -> None:
    assert (staged / "wheels/torch" / WHEEL.filename).stat().st_nlink == 2
    assert (staged / "rootfs.tar").stat().st_nlink == 2


def test_every_payload_time_and_mode_is_set(staged: Path) -> None:
    for path in (staged / "payload").rglob("*"):
        status = path.stat()
        assert 1_000_000 - 4 * 86_400 < status.st_mtime <= 1_000_000, path
        assert status.st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_an_edit_of_the_same_length_changes_a_files_time(tmp_path: Path) -> None:
    file = tmp_path / "service.py"
    times = []
    for text in ("x = 1", "x = 2", "x = 1"):
        file.write_text(text)
        pipeline._set_modes_and_times(tmp_path, 1_000_000)
        times.append(file.stat().st_mtime_ns)
    assert times[0] == times[2] != times[1]


def test_the_payload_holds_the_service_the_probes_and_the_smoke_test(staged: Path) -> None:
    app = staged / "payload/opt/weir/app"
    assert (app / "probes/__main__.py").is_file()
    assert (app / "smoke.py").is_file()
    assert not list(app.rglob("__pycache__"))


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_text(path, "old")

    def fail_halfway() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_reported_as_one(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="no space left"), replacing(tmp_path / "x"):
        raise OSError(28, "No space left on device")


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't write"):
        write_text(tmp_path / "file" / "x", "text")


def test_an_interrupted_staging_never_leaves_half_of_the_old_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / RESOLVED.variant
    old.mkdir()
    (old / "file").touch()

    def half(path: Path, *_: object, **__: object) -> None:
        assert path != old, "removed in place"

    monkeypatch.setattr(pipeline, "_fill", lambda folder, *_args, **_more: folder.mkdir())
    monkeypatch.setattr(pipeline.shutil, "rmtree", half)
    cache = WheelCache(tmp_path / "wheels", lambda _line: None)
    pipeline.stage_context(old, RESOLVED, cache, (), rootfs=None, epoch=1)
    assert old.is_dir()
    assert not (old / "file").exists()


def test_what_editors_leave_in_a_clone_changes_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "service"
    clone.mkdir()
    for name in ("main.py", "main.py~", ".main.py.swp", ".DS_Store"):
        (clone / name).touch()
    monkeypatch.setattr(payload, "PAYLOAD", {clone: "service"})
    pipeline.stage_context(
        tmp_path / "context", RESOLVED_WITHOUT_WHEELS, WheelCache(tmp_path, print), (), rootfs=None, epoch=1
    )
    service = tmp_path / "context/payload/opt/weir/app/service"
    assert [path.name for path in service.iterdir()] == ["main.py"]
