"""Files are whole or not there, whatever the destination is and whoever was killed before."""

import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from buildtool.core.errors import DataError, EnvironmentMissing
from buildtool.core.files import replacing, scratch, write_text
from probes.core import files
from probes.core.files import sweep_partials

LEFT = ".weir-0123456789abcdef.partial"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_device_is_written_into_and_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.open("wb").close()
    except OSError:
        device = Path("/dev/null")  # devices can't be made here; not root then, so it can't be lost either
    before = device.stat()
    write_text(device, "x" * 100_000)
    assert stat.S_ISCHR(device.stat().st_mode)
    assert device.stat().st_ino == before.st_ino
    assert not list(tmp_path.glob(".*"))


def test_a_fifo_is_written_into(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(fifo.read_bytes()))
    reader.start()
    write_text(fifo, "x" * 200_000)
    reader.join(60)
    assert heard == [b"x" * 200_000]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_standard_output_that_goes_to_a_file_is_not_torn_from_it(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb", buffering=0) as shell:
        shell.write(b"before ")
        write_text(Path(f"/dev/fd/{shell.fileno()}"), "report ")
        shell.write(b"after")
    assert (tmp_path / "out").read_text() == "before report after"


def test_symbolic_links_stay_and_lead_to_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/real").write_text("old")
    (tmp_path / "chain").symlink_to("link")
    (tmp_path / "link").symlink_to("folder/real")
    (tmp_path / "dangling").symlink_to("folder/new")
    write_text(tmp_path / "chain", "new")
    write_text(tmp_path / "dangling", "made")
    assert (tmp_path / "chain").is_symlink()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder/real").read_text() == "new"
    assert (tmp_path / "folder/new").read_text() == "made"


def test_links_in_a_circle_are_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(DataError, match="symbolic links"):
        write_text(tmp_path / "a", "x")


def test_a_directory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Is a directory"), replacing(tmp_path):
        raise AssertionError("the block began")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_gets_the_mode_that_the_umask_gives(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        write_text(tmp_path / "new", "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask


def test_a_replaced_file_keeps_its_mode_and_was_never_more_open(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o600)
    with replacing(path) as partial:
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
        partial.write_text("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_temporary_name_can_not_be_predicted_nor_taken_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for _ in range(3):
        with replacing(tmp_path / "file") as partial:
            seen.add(partial.name)
    assert len(seen) == 3
    (tmp_path / "victim").write_text("precious")
    (tmp_path / LEFT).symlink_to("victim")
    monkeypatch.setattr(files, "_new_name", lambda: LEFT)
    with pytest.raises(DataError, match="File exists"):
        write_text(tmp_path / "file", "evil")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half_write() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half_write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_reported_as_such() -> None:
    with pytest.raises(EnvironmentMissing, match="no space left while writing /dev/full"):
        write_text(Path("/dev/full"), "x")


def test_text_that_is_no_unicode_is_no_traceback(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "a\udcffb")
    assert (tmp_path / "file").read_text() == r"a\udcffb"


def test_only_what_the_dead_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / LEFT).write_text("half")
    (tmp_path / ".weir-00000000000000ff.partial").mkdir()
    (tmp_path / ".weir-00000000000000ff.partial/inner").write_text("half")
    (tmp_path / ".users.partial").write_text("another program's")
    with replacing(tmp_path / "file") as partial, scratch(tmp_path) as folder:
        sweep_partials(tmp_path)
        assert names(tmp_path) == sorted([".users.partial", partial.name, folder.name])
    assert names(tmp_path) == [".users.partial", "file"]


def test_what_is_mounted_below_a_leftover_is_never_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed bootstrap may leave the host's /dev bound below its scratch directory."""
    (tmp_path / LEFT / "rootfs/dev").mkdir(parents=True)
    (tmp_path / LEFT / "rootfs/dev/null").touch()
    monkeypatch.setattr(files, "has_mounts", lambda _directory: True)
    sweep_partials(tmp_path)
    with scratch(tmp_path) as folder:
        (folder / "mounted").touch()
    assert (tmp_path / LEFT / "rootfs/dev/null").exists()
    assert (folder / "mounted").exists()


def test_mounts_are_seen_in_what_the_kernel_lists() -> None:
    assert files.has_mounts(Path("/dev"))  # /dev/shm, /dev/pts
    assert not files.has_mounts(Path("/proc/self/nothing"))


def test_a_swept_link_does_not_lose_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/precious").write_text("x")
    (tmp_path / LEFT).symlink_to("folder")
    sweep_partials(tmp_path)
    assert (tmp_path / "folder/precious").exists()


def test_sweeping_what_is_not_there_is_silent(tmp_path: Path) -> None:
    sweep_partials(tmp_path / "nowhere")


def test_a_file_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the creation of a file and its lock another run's sweep may take it."""
    lock = fcntl.flock
    swept: list[Callable[[], None]] = [lambda: sweep_partials(tmp_path)]

    def late(descriptor: int, how: int) -> None:
        if swept:
            swept.pop()()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_text(tmp_path / "file", "whole")
    assert (tmp_path / "file").read_text() == "whole"
    assert names(tmp_path) == ["file"]


@pytest.mark.thorough
def test_many_writers_of_one_file_never_share_a_temporary_name(tmp_path: Path) -> None:
    texts = [f"{i}" * 50_000 for i in range(8)]
    failures: list[BaseException] = []

    def write(text: str) -> None:
        try:
            for _ in range(20):
                write_text(tmp_path / "file", text)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (tmp_path / "file").read_text() in texts
    assert names(tmp_path) == ["file"]
