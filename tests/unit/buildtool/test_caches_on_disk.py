"""What a build keeps on disk: locks, second names, removals and digests, with failures as our errors."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from buildtool.core import files
from buildtool.core.errors import DataError, EnvironmentMissing

OPERATIONS: dict[str, Callable[[Path], object]] = {
    "replacing": lambda path: files.replacing(path).__enter__(),
    "scratch": lambda path: files.scratch(path).__enter__(),
    "locked": lambda path: files.locked(path / "below", lambda: None).__enter__(),
    "link_over": lambda path: files.link_over(path / "existing", path / "below"),
    "open_lock": lambda path: files.open_lock(path / "below"),
    "lock_if_free": lambda path: files.lock_if_free(path / "below").__enter__(),
    "write_text": lambda path: files.write_text(path / "below", "x"),
    "discard": files.discard,
}


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, EnvironmentMissing), (errno.EDQUOT, EnvironmentMissing), (errno.EIO, DataError)],
)
def test_no_failure_of_the_file_system_is_a_traceback(
    name: str, number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "there"
    for method in ("mkdir", "unlink"):
        monkeypatch.setattr(Path, method, fail)
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(kind, match=str(path)) as caught:
        OPERATIONS[name](path)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_failure_without_a_number_still_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="as if"), files.replacing(tmp_path / "x"):
        raise OSError("as if")


def test_a_scratch_directory_is_ours_alone_and_goes_with_its_block(tmp_path: Path) -> None:
    with files.scratch(tmp_path / "made") as folder:
        (folder / "inner").write_text("x")
        assert folder.parent == tmp_path / "made"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list((tmp_path / "made").iterdir())
    with files.scratch() as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_a_failure_inside_a_scratch_directory_is_not_blamed_on_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="elsewhere"), files.scratch():
        (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(EnvironmentMissing, match="no space left"), files.scratch():
        raise OSError(errno.ENOSPC, "planted")


def test_a_second_holder_of_a_directory_waits_and_is_reported(tmp_path: Path) -> None:
    waited: list[str] = []

    class Waited(Exception):
        """Instead of a wait without an end."""

    def on_wait() -> None:
        waited.append("waited")
        raise Waited

    with files.locked(tmp_path, on_wait):
        assert waited == []
        with pytest.raises(Waited), files.locked(tmp_path, on_wait):
            raise AssertionError("two hold it")
    with files.locked(tmp_path, on_wait):
        assert waited == ["waited"]


def test_a_failure_inside_a_lock_is_not_one_of_the_lock(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), files.locked(tmp_path, lambda: None):
        (tmp_path / "gone").read_text()


def test_what_somebody_uses_is_not_free_and_many_may_use_it(tmp_path: Path) -> None:
    path = tmp_path / "made" / "as needed" / "lock"
    before = descriptors()
    users = [files.open_lock(path), files.open_lock(path)]
    with files.lock_if_free(path) as free:
        assert not free
    for user in users:
        os.close(user)
    with files.lock_if_free(path) as free:
        assert free
        with files.lock_if_free(path) as also:
            assert not also
    with files.lock_if_free(path) as free:
        assert free
    assert descriptors() <= before


def test_a_second_name_takes_the_place_of_what_had_it(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("one")
    (tmp_path / "two").write_text("two")
    files.link_over(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "one"
    assert (tmp_path / "two").samefile(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_discarded_link_takes_nothing_else_with_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/precious").write_text("x")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "file").write_text("x")
    for name in ("link", "file", "nothing"):
        files.discard(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder/precious").exists()
    files.discard(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_the_digest_of_a_file_is_that_of_all_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(data)
    assert files.sha256_of(tmp_path / "file") == hashlib.sha256(data).hexdigest()


@pytest.mark.thorough
def test_a_large_file_is_read_again_only_after_a_change_whatever_its_time_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, length, read = tmp_path / "file", 1 << 24, []
    digest_of = hashlib.file_digest

    def counted(handle: BinaryIO, name: str) -> object:
        read.append(handle.name)
        return digest_of(handle, name)

    monkeypatch.setattr(files.hashlib, "file_digest", counted)
    path.write_bytes(bytes(length))
    first = files.sha256_of(path)
    assert first == files.sha256_of(path) == hashlib.sha256(bytes(length)).hexdigest()
    assert len(read) == 1
    before = path.stat()
    with path.open("r+b") as handle:
        handle.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.sha256_of(path) == hashlib.sha256(b"x" + bytes(length - 1)).hexdigest()
    other = tmp_path / "other"
    other.write_bytes(bytes(length))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert files.sha256_of(path) == first
    assert len(read) == 3


def test_space_that_nobody_can_measure_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_path: Path) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.shutil, "disk_usage", closed)
    with pytest.raises(DataError, match=str(tmp_path)):
        files.free_bytes(tmp_path)
