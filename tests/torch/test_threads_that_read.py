"""Threads that read into one memory: where one fails, no other writes there after the error."""

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from probes.core.errors import CheckpointUnreadable
from probes.placement import checkpoint
from probes.placement.packing import staging
from probes.placement.packing.staging import HostBuffers, bytes_of
from probes.placement.packing.threads import run_all


class Unequal:
    """The first piece fails, once the second has begun, and the second takes longer."""

    def __init__(self):
        self.begun, self.failed, self.ended = threading.Event(), threading.Event(), []

    def __call__(self, number, *_):
        if number == 0:
            assert self.begun.wait(60)
            self.failed.set()
            raise OSError("broken")
        self.begun.set()
        assert self.failed.wait(60)
        time.sleep(0.2)
        self.ended.append(number)
        return number


def test_an_error_is_raised_when_no_thread_is_at_work_any_more():
    work = Unequal()
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(OSError, match="broken"):
            run_all(pool, work, range(100))
        ended = list(work.ended)
        assert 1 in ended  # the other thread may have begun one more, which takes as long
        assert len(ended) < 99  # what hadn't begun was left out
        assert run_all(pool, lambda number: number, range(5)) == [0, 1, 2, 3, 4]
    assert work.ended == ended


def test_buffers_of_a_failed_reading_are_not_written_to_any_more(monkeypatch):
    monkeypatch.setattr(staging, "PIECE_BYTES", 1)
    work, buffers = Unequal(), HostBuffers(2)
    with pytest.raises(OSError, match="broken"):
        buffers.each(2, work)
    assert work.ended == [1]
    buffers.release()


def test_a_file_that_fails_is_not_read_any_more(tmp_path, monkeypatch):
    """Its descriptor may be another file's soon, and the memory another tensor's."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4000))
    work = Unequal()
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 2000)
    monkeypatch.setattr(os, "preadv", lambda _descriptor, _views, offset: work(offset // 2000) and 2000)
    file = checkpoint.OpenFile(path)
    with checkpoint.reader_threads() as pool:
        with pytest.raises(CheckpointUnreadable, match="broken"):
            file.read_into(memoryview(bytearray(4000)), 0, pool)
        assert work.ended == [1]
    file.close()


def test_the_bytes_of_a_tensor_keep_its_memory():
    tensor = torch.arange(10)
    alive, view = weakref.ref(tensor), bytes_of(tensor)[8:16]
    del tensor
    gc.collect()
    assert alive() is not None
    assert view.tobytes() == (1).to_bytes(8, "little")
    del view
    gc.collect()
    assert alive() is None
