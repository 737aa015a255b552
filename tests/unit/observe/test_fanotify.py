"""The watch of opened files leaves nothing open, whatever happens to it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildtool.observe import fanotify
from buildtool.observe.fanotify import Fanotify


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_a_root_that_cannot_be_listed_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_root: bytes) -> Iterator[str]:
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(fanotify, "_files_below", gone)
    before = descriptors()
    with pytest.raises(OSError, match=r"gone|fanotify_init"):  # the latter: this isn't root
        Fanotify(os.getpid())
    assert descriptors() == before


def test_a_file_that_its_run_removes_was_opened() -> None:
    watch = Fanotify.__new__(Fanotify)
    watch._fault, watch._ended, watch._files = "", threading.Event(), frozenset({"/etc/a", "/b"})
    watch._ended.set()
    watch._paths = {"/etc/a (deleted)", "/own (deleted)"}
    assert watch.finish() == {"/etc/a"}


def test_events_after_one_that_cannot_be_read_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer has many events, each with a descriptor."""
    watch = Fanotify.__new__(Fanotify)
    watch._paths, watch._fault = set(), ""
    before = descriptors()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    layout = fanotify._EVENT
    events = b"".join(layout.pack(layout.size, 3, 0, layout.size, 0x20, each, 1) for each in opened)

    def gone(_path: Path) -> Path:
        raise OSError("no link")

    with monkeypatch.context() as context:
        context.setattr(Path, "readlink", gone)
        watch._read(events)
    assert (descriptors(), watch._fault) == (before, "no link")
