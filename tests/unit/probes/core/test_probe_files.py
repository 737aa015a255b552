"""What locks, links and scratch directories leave behind: no descriptor, no lock, no file of anybody else."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from probes.core import files
from probes.measure import journal
from probes.measure.journal import gpu_lock

LEFT = ".weir-0123456789abcdef.partial"
NEVER = "nobody waits"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def held(path: Path) -> Iterator[None]:
    """The lock of a file or directory, held as by another process."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    try:
        with held(path):
            return False
    except BlockingIOError:
        return True


def never() -> None:
    raise AssertionError(NEVER)


def use_all(folder: Path) -> None:
    """Every operation of the module, those that fail included."""
    files.write_text(folder / "a", "x")
    files.write_text(Path("/dev/null"), "x")
    assert files.read_text(folder / "a", most_bytes=1) == "x"
    files.sync_directory(folder)
    files.link_over(folder / "a", folder / "b")
    with files.scratch(folder), files.locked(folder / "lock", never), files.locked(folder, never):
        assert files.open_lock(folder / "lock", shared=False) is None
    with suppress(OSError):
        files.read_text(folder / "a", most_bytes=0)
    with suppress(OSError):
        files.link_over(folder / "a", folder)
    with suppress(OSError), files.replacing(folder):
        pass
    (folder / LEFT).mkdir()
    (folder / LEFT.replace("0", "1")).touch()
    with held(folder / LEFT):
        files.sweep_partials(folder)
    files.sweep_partials(folder)


def test_no_descriptor_stays_open_whatever_is_done(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    use_all(tmp_path)
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert names(tmp_path) == ["a", "b", "lock"]


def test_a_file_system_without_locks_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    files.write_text(tmp_path / "a", "x")
    files.link_over(tmp_path / "a", tmp_path / "b")
    with files.scratch(tmp_path) as folder:
        assert folder.is_dir()
    (tmp_path / LEFT).touch()
    files.sweep_partials(tmp_path)  # nobody can know that its owner is dead
    assert names(tmp_path) == [LEFT, "a", "b"]
    descriptor = files.open_lock(tmp_path / "lock", shared=True)
    assert descriptor is not None
    os.close(descriptor)
    assert files.open_lock(tmp_path / "lock", shared=False) is None


@pytest.mark.parametrize("name", ["", "a/b/lock"])
def test_a_directory_or_a_lock_file_is_held_for_the_block_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for _ in range(2):  # a lock file stays
        with files.locked(path, never):
            assert is_held(path)
        assert not is_held(path)
    assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) & 0o111 == 0


def test_who_finds_a_lock_held_says_so_and_waits_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked, said = fcntl.flock, [], []

    def flock(descriptor: int, how: int) -> None:
        asked.append(how)
        if how & fcntl.LOCK_NB:
            raise BlockingIOError
        assert said == ["waiting"]
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.locked(tmp_path / "lock", lambda: said.append("waiting")):
        assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]


@pytest.mark.parametrize("use", [lambda path: files.locked(path, never).__enter__(), files.open_lock])
def test_a_link_planted_in_a_lock_file_s_place_is_not_followed(
    use: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "lock").symlink_to("victim")
    with pytest.raises(OSError, match=r"symbolic link"):
        use(tmp_path / "lock") if use is not files.open_lock else use(tmp_path / "lock", shared=True)
    assert not (tmp_path / "victim").exists()


def test_many_share_a_lock_and_only_the_last_one_can_have_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = files.open_lock(path, shared=True), files.open_lock(path, shared=True)
    assert first is not None
    assert second is not None
    assert stat.S_IMODE(path.stat().st_mode) & 0o111 == 0
    assert files.open_lock(path, shared=False) is None
    os.close(first)
    assert files.open_lock(path, shared=False) is None
    os.close(second)
    alone = files.open_lock(path, shared=False)
    assert alone is not None
    assert is_held(path)
    os.close(alone)


@pytest.mark.parametrize("again", [False, True], ids=["removed", "made again"])
def test_a_lock_file_that_was_removed_meanwhile_holds_nobody(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last holder removes it: a lock on the file without a name would keep nobody else out."""
    path, real = tmp_path / "lock", fcntl.flock
    removed: list[int] = []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(path.stat().st_ino)
            path.unlink()
            if again:
                path.touch()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    descriptor = files.open_lock(path, shared=True)
    assert descriptor is not None
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    os.close(descriptor)
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_link_takes_the_place_of_what_had_its_name_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    files.link_over(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").stat().st_ino == (tmp_path / "a").stat().st_ino
    files.link_over(tmp_path / "a", tmp_path / "b")  # a second time changes nothing
    assert names(tmp_path) == ["a", "b"]


def test_a_link_to_a_link_is_refused_and_so_is_one_in_a_directory_s_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").mkdir()
    for existing, path in (("link", "b"), ("a", "folder"), ("nothing", "b")):
        with pytest.raises(OSError, match=r"symbolic link|Is a directory|No such file"):
            files.link_over(tmp_path / existing, tmp_path / path)
    assert names(tmp_path) == ["a", "folder", "link"]


def test_a_half_made_link_is_held_so_that_no_sweep_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: Path, target: Path, *, follow_symlinks: bool) -> None:
        real(source, target, follow_symlinks=follow_symlinks)
        files.sweep_partials(tmp_path)

    (tmp_path / "a").write_text("x")
    monkeypatch.setattr(os, "link", link)
    files.link_over(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == ["a", "b"]


def test_temporary_files_are_made_and_swept_where_the_system_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path / "new" / "tmp"))
    with files.scratch() as folder:
        assert folder.parent == tmp_path / "new" / "tmp"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "inner").mkdir()
    assert names(folder.parent) == []
    (folder.parent / LEFT).touch()
    (folder.parent / (LEFT + "~")).touch()
    (folder.parent / f"x{LEFT}").touch()
    files.sweep_partials()
    assert names(folder.parent) == [LEFT + "~", f"x{LEFT}"]


@pytest.mark.parametrize("most", [2, 3, 4])
def test_text_is_read_up_to_its_limit_and_refused_beyond(most: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    if most >= 3:
        assert files.read_text(tmp_path / "a", most_bytes=most) == "abc"
        return
    with pytest.raises(OSError, match="more than 2 bytes") as caught:
        files.read_text(tmp_path / "a", most_bytes=most)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a"))


def test_a_file_and_its_directory_are_with_the_disk_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text(tmp_path / "a", "x")
    assert synced == [False, True]


def test_a_replaced_file_of_another_owner_stays_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "a").chmod(0o640)
    owner = (tmp_path / "a").stat()
    given: list[tuple[int, int]] = []

    def fchown(descriptor: int, user: int, group: int) -> None:
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600  # nobody else's until it is theirs
        given.append((user, group))

    monkeypatch.setattr(os, "fchown", fchown)
    files.write_text(tmp_path / "a", "own")
    assert given == []
    monkeypatch.setattr(os, "geteuid", lambda: owner.st_uid + 1)
    files.write_text(tmp_path / "a", "theirs")
    assert given == [(owner.st_uid, owner.st_gid)]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_replaced_file_that_can_t_be_given_away_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    (tmp_path / "a").write_text("x")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "fchown", refuse)
    files.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_a_chain_of_forty_links_is_followed_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    """As Linux does; path_resolution(7)."""
    for number in range(41):
        (tmp_path / f"{number}").symlink_to(f"{number + 1}")
    files.write_text(tmp_path / "1", "x")
    assert (tmp_path / "1").read_text() == (tmp_path / "41").read_text() == "x"
    with pytest.raises(OSError, match=r"symbolic links") as caught:
        files.write_text(tmp_path / "0", "y")
    assert caught.value.errno == errno.ELOOP


MOUNTINFO = r"""24 30 0:22 / /proc rw - proc proc rw
31 30 0:27 / /a\040b/dev rw - devtmpfs udev rw
32 30 0:28 / /plain\134x/y rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("directory", "mounted"),
    [("/a b", True), ("/a b/dev", False), ("/a", False), ("/plain\\x", True), ("/elsewhere", False)],
)
def test_mounts_below_a_directory_are_known_by_the_kernel_s_spelling(
    directory: str, mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    monkeypatch.setattr(
        files, "open", lambda _path, **how: (tmp_path / "mountinfo").open(**how), raising=False
    )
    assert files.has_mounts(Path(directory)) is mounted


def test_a_mount_with_a_name_that_is_no_text_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_bytes(b"1 2 0:1 / /\xff rw - tmpfs t rw\n1 2 0:1 / /a/b rw - tmpfs t rw\n")
    monkeypatch.setattr(
        files, "open", lambda _path, **how: (tmp_path / "mountinfo").open(**how), raising=False
    )
    assert files.has_mounts(Path("/a"))


def test_what_can_t_be_removed_of_a_scratch_directory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "rmdir", refuse)
    with files.scratch(tmp_path) as folder:
        assert folder.is_dir()


@pytest.mark.parametrize("what", ["swept", "being swept", "another's"])
@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_what_a_sweep_takes_before_it_is_locked_is_made_again(
    what: str, directory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not taken:
            (path,) = tmp_path.iterdir()
            taken.append(path.name)
            if what == "being swept":
                raise BlockingIOError
            path.rmdir() if directory else path.unlink()
            if what == "another's":
                path.touch()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with files.scratch(tmp_path) if directory else files.replacing(tmp_path / "a") as path:
        assert path.exists()
        assert path.name not in taken
        assert is_held(path)
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_names_of_ours_are_swept_and_links_and_pipes_of_that_name_do_no_harm(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "a") as partial:
        pass
    partial.touch()
    os.mkfifo(tmp_path / LEFT)  # to open it may not wait for a writer
    (tmp_path / LEFT.replace("0", "1")).symlink_to("a")
    files.sweep_partials(tmp_path)
    assert names(tmp_path) == [LEFT.replace("0", "1"), "a"]


def test_files_of_the_kernel_are_written_in_place() -> None:
    """They can't be replaced; /proc/self/comm is this thread's name."""
    old = files.read_text(Path("/proc/self/comm"), most_bytes=99)
    files.write_text(Path("/proc/self/comm"), "weir")
    assert files.read_text(Path("/proc/self/comm"), most_bytes=99) == "weir\n"
    files.write_text(Path("/proc/self/comm"), old.rstrip())


@pytest.mark.parametrize("place", ["/proc/self/fd/{}", "/proc/thread-self/fd/{}", "/dev/fd/{}", "link"])
def test_an_open_pipe_is_written_into_by_each_of_its_names(place: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    path = tmp_path / place.format(writer)
    if place == "link":
        path.symlink_to(f"/dev/fd/{writer}")
    files.write_text(path, "text")
    with files.replacing(path) as spool:
        assert spool.read_bytes() == b""  # what a block leaves empty is empty and not missing
    os.close(writer)
    assert os.read(reader, 99) == b"text"
    os.close(reader)


def test_a_file_whose_name_is_the_number_of_a_descriptor_is_a_file(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    files.write_text(tmp_path / f"{writer}", "text")
    assert (tmp_path / f"{writer}").read_text() == "text"
    os.close(writer)
    assert os.read(reader, 99) == b""
    os.close(reader)


def test_a_file_system_without_locks_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with gpu_lock(tmp_path, "0000:03:00.0"), journal.open_journal(tmp_path / "r.json"):
        assert journal.sweep(tmp_path) == ()  # whether it is alive can't be known
        assert journal.path_of(tmp_path / "r.json").exists()


def test_a_file_whose_name_is_a_number_is_no_descriptor_of_this_process(tmp_path: Path) -> None:
    assert files.own_descriptor(tmp_path / "1") is None
    (tmp_path / "out").symlink_to("/dev/stdout")
    assert files.own_descriptor(tmp_path / "out") == 1
    assert files.own_descriptor(Path("/dev/stderr")) == 2
    assert files.own_descriptor(Path("/proc/self/status")) is None


def test_what_is_written_to_a_device_waits_for_it(tmp_path: Path) -> None:
    """A pipe is opened without waiting for its reader, and written to as any other."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    descriptor = files._open_special(pipe, os.O_NONBLOCK)
    try:
        assert os.get_blocking(descriptor)
    finally:
        os.close(descriptor)
        os.close(reading)
