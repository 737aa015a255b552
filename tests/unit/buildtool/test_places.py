"""A path that a user typed is recognised for what it is, before anything reads or writes it."""

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from buildtool.core.errors import DataError
from buildtool.core.files import PathKind, kind_of_path


def test_each_kind_of_place_is_reported_with_links_followed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, to in (("to-file", "file"), ("to-folder", "."), ("to-pipe", "pipe"), ("to-nothing", "gone")):
        (tmp_path / name).symlink_to(to)
    assert {path.name: kind_of_path(path) for path in (*tmp_path.iterdir(), tmp_path / "file/below")} == {
        "file": PathKind.FILE,
        "to-file": PathKind.FILE,
        "to-folder": PathKind.DIRECTORY,
        "pipe": PathKind.PIPE,
        "to-pipe": PathKind.PIPE,
        "to-nothing": PathKind.NOTHING,
        "below": PathKind.NOTHING,
    }
    assert kind_of_path(tmp_path) is PathKind.DIRECTORY
    assert kind_of_path(tmp_path / ("x" * 5000)) is PathKind.NOTHING


def test_a_place_that_can_not_be_looked_at_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(DataError, match=f"{tmp_path}: Permission denied"):
        kind_of_path(tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (stat.S_IFREG, "a regular file"),
        (stat.S_IFDIR, "a directory"),
        (stat.S_IFCHR, "a character device"),
        (stat.S_IFBLK, "a block device"),
        (stat.S_IFIFO, "a named pipe"),
        (stat.S_IFSOCK, "a socket"),
    ],
)
def test_no_kind_of_file_is_called_another(kind: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "stat", lambda _path: SimpleNamespace(st_mode=kind | 0o644))
    assert kind_of_path(Path("x")).value == words
