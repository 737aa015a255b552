"""Packed tensors are kept on disk: a second load reads them, damage is noticed, room is limited."""

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from test_round_trip import gaussian, same

from probes.placement.packing import cache, staging, tensors
from probes.placement.packing.cache import (
    Cache,
    CachedTensor,
    Content,
    Origin,
    content_key,
    origin_key,
    usual_folder,
)
from probes.placement.packing.packed import Packed, form, packed_in
from probes.placement.packing.tensors import Values, unpack


class Reader:
    """Counts how often the unpacked tensor was asked for and packed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.reads, self.packs = tensor, 0, 0

    def read(self) -> Values:
        self.reads += 1
        return Values.of(self.tensor)


@dataclass(frozen=True)
class Counted(Content):
    """Of a reader."""

    reader: Reader | None = None

    def pack(self, put, values=None):
        self.reader.packs += 1
        return super().pack(put, values)


def packed(kept: Cache, reader, origin=None, *, dense=False) -> Packed | None:
    """The tensor of a reader, packed and brought to memory of its own."""
    reader = reader if isinstance(reader, Reader) else Reader(reader)
    found = kept.packed(Counted(reader.read, dense=dense, reader=reader), origin=origin)
    return written(found) if found else None


def written(found: CachedTensor) -> Packed:
    flat = torch.full((form(found.outline).n_bytes,), 99, dtype=torch.uint8)
    assert found.write([(found.outline, flat)])
    return packed_in(form(found.outline), flat)


@pytest.fixture
def origin(tmp_path) -> Origin:
    path = tmp_path / "weights"
    path.write_bytes(b"xy")
    time.sleep(0.12)  # until its times can distinguish a later change
    return Origin(path, 0, 1, "bfloat16", (64, 1024))


def test_a_second_load_neither_packs_nor_reads_the_unpacked_tensor(tmp_path, origin):
    reader, kept = Reader(gaussian(300, 515)), Cache(tmp_path / "packed")
    for _ in range(3):
        assert same(unpack(packed(kept, reader, origin)), reader.tensor)
    assert (reader.reads, reader.packs) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dense", [False, True])
def test_the_same_content_of_another_file_is_not_packed_again(tmp_path, dtype, dense):
    reader, kept = Reader(gaussian(300, 515, dtype=dtype)), Cache(tmp_path)
    first = packed(kept, reader, dense=dense)
    again = Reader(reader.tensor.clone())
    found = packed(kept, again, dense=dense)
    assert (again.reads, again.packs) == (1, 0)
    assert found.layout is first.layout
    assert same(unpack(found), reader.tensor)


def test_a_tensor_that_does_not_pack_is_not_tried_again(tmp_path, origin):
    reader = Reader(torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16))
    kept = Cache(tmp_path / "packed")
    assert packed(kept, reader, origin) is None
    assert packed(kept, reader, origin) is None
    assert (reader.reads, reader.packs) == (1, 1)


def test_a_changed_file_is_read_again(tmp_path, origin, monkeypatch):
    kept = Cache(tmp_path / "packed")
    old, new = Reader(gaussian(64, 1024)), Reader(gaussian(64, 1024, seed=1))
    packed(kept, old, origin)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_SETTLED_NS", 3600 * 10**9)  # it is young, however slow this machine is
        origin.path.write_bytes(b"y")
        assert same(unpack(packed(kept, new, origin)), new.tensor)
    time.sleep(0.12)
    assert same(unpack(packed(kept, new, origin)), new.tensor)
    assert new.reads == 2  # too young to be noted the first time


def rewritten_with_its_old_times(path: Path) -> None:
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a file system's clock ticks in milliseconds
        path.write_bytes(bytes(reversed(path.read_bytes())))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_a_file_rewritten_with_its_old_time_is_read_again(tmp_path, origin, monkeypatch):
    monkeypatch.setattr(cache, "_SETTLED_NS", 0)
    kept = Cache(tmp_path / "packed")
    old, new = Reader(gaussian(64, 1024)), Reader(gaussian(64, 1024, seed=1))
    packed(kept, old, origin)
    rewritten_with_its_old_times(origin.path)
    assert same(unpack(packed(kept, new, origin)), new.tensor)
    assert new.reads == 1


def test_a_file_just_rewritten_with_an_old_time_is_not_noted(tmp_path, origin, monkeypatch):
    """It may be written to again within the same tick of its times."""
    monkeypatch.setattr(cache, "_SETTLED_NS", 1800 * 10**9)
    an_hour_ago = time.time_ns() - 3600 * 10**9
    os.utime(origin.path, ns=(an_hour_ago, an_hour_ago))
    reader, kept = Reader(gaussian(64, 1024)), Cache(tmp_path / "packed")
    for _ in range(2):
        packed(kept, reader, origin)
    assert reader.reads == 2


def test_a_file_that_changes_while_it_is_read_is_not_noted(tmp_path, origin):
    kept = Cache(tmp_path / "packed")
    old, new = gaussian(64, 1024), gaussian(64, 1024, seed=1)

    class Changing(Reader):
        def read(self):
            origin.path.write_bytes(b"yy")
            return super().read()

    packed(kept, Changing(old), origin)
    time.sleep(0.12)
    assert same(unpack(packed(kept, new, origin)), new)


def test_dtype_shape_and_layout_are_part_of_the_content():
    tensor = gaussian(64, 1024)
    keys = {
        key(tensor),
        key(tensor, dense=True),
        key(tensor.view(1024, 64)),
        key(tensor.view(torch.float16)),
        key(tensor.view(torch.int16)),
    }
    assert len(keys) == 5
    assert key(tensor.T.contiguous().T) == key(tensor)
    assert key(torch.empty(0)) != key(torch.empty(0, 1))


def key(tensor: torch.Tensor, *, dense: bool = False) -> str:
    return content_key(Values.of(tensor), dense=dense)


def entry(folder: Path) -> Path:
    return next(folder.glob("*.packed"))


@pytest.mark.parametrize("spoil", ["cut", "flip", "form", "empty", "longer", "other", "header", "deep"])
def test_a_damaged_entry_is_made_again(tmp_path, spoil):
    reader, kept = Reader(gaussian(64, 1024)), Cache(tmp_path)
    packed(kept, reader)
    path = entry(tmp_path)
    whole = bytearray(path.read_bytes())
    if spoil == "cut":
        spoilt = whole[:-100]
    elif spoil == "flip":
        whole[-5000] ^= 4
        spoilt = whole
    elif spoil == "form":
        spoilt = bytearray(bytes(whole).replace(b'"base": 10', b'"base": 11'))
        assert spoilt != whole
    elif spoil == "deep":
        spoilt = bytearray(b"[" * 65_535 + b"\n")
    elif spoil == "longer":
        spoilt = whole + b"x"
    elif spoil == "other":
        spoilt = bytearray(b"[]" + b" " * 2045 + b"\n")
    elif spoil == "header":
        spoilt = bytearray(b"{" * 100_000)
    else:
        spoilt = bytearray()
    path.write_bytes(spoilt)
    assert same(unpack(packed(kept, reader)), reader.tensor)
    assert reader.packs == 2
    assert path.read_bytes() != spoilt
    packed(kept, reader)
    assert reader.packs == 2


@pytest.mark.parametrize("shape", [(64, 1024), (1024, 64), (300, 515)])
def test_an_entry_under_the_name_of_another_is_made_again(tmp_path, origin, shape):
    """Two entries of one shape that were swapped were read as each other's weights."""
    one, other = Reader(gaussian(64, 1024)), Reader(gaussian(*shape, seed=1))
    beside, kept = replace(origin, start=1, end=2, shape=shape), Cache(tmp_path / "packed")
    packed(kept, one, origin)
    packed(kept, other, beside)
    first, second = (kept.folder / (key(reader.tensor) + ".packed") for reader in (one, other))
    swapped = first.read_bytes(), second.read_bytes()
    second.write_bytes(swapped[0])
    first.write_bytes(swapped[1])
    for _ in range(2):
        assert same(unpack(packed(kept, one, origin)), one.tensor)
        assert same(unpack(packed(kept, other, beside)), other.tensor)
    assert (one.packs, other.packs) == (2, 2)
    assert (first.read_bytes(), second.read_bytes()) == swapped


def test_an_entry_put_in_the_place_of_another_after_its_outline_was_read_is_made_again(tmp_path):
    one, other = Reader(gaussian(64, 1024)), Reader(gaussian(64, 1024))
    other.tensor[:, 7] += 2**-9  # of the same form: only the digest tells them apart
    kept = Cache(tmp_path)
    packed(kept, other)
    found = kept.packed(Counted(one.read, reader=one))
    (tmp_path / (key(one.tensor) + ".packed")).write_bytes(
        (tmp_path / (key(other.tensor) + ".packed")).read_bytes()
    )
    assert same(unpack(written(found)), one.tensor)
    assert one.packs == 2


def test_a_note_under_the_name_of_another_origin_only_costs_reading_again(tmp_path, origin):
    one, other = Reader(gaussian(64, 1024)), Reader(gaussian(64, 1024, seed=1))
    beside, kept = replace(origin, start=1, end=2), Cache(tmp_path / "packed")
    packed(kept, one, origin)
    (note,) = kept.folder.glob("*.origin")
    packed(kept, other, beside)
    (later,) = set(kept.folder.glob("*.origin")) - {note}
    later.write_bytes(note.read_bytes())
    for _ in range(2):
        assert same(unpack(packed(kept, other, beside)), other.tensor)
    assert (other.reads, other.packs) == (2, 1)


def test_one_range_of_a_file_read_as_two_dtypes_or_shapes_has_two_notes(origin):
    """Where a file's header is rewritten within one tick of its times, or two models see it differently."""
    changed = [replace(origin, dtype="float16"), replace(origin, shape=(1024, 64)), replace(origin, end=2)]
    changed += [replace(origin, order=(1, 0)), replace(origin, start=1)]
    assert len({origin_key(one, dense=False) for one in (origin, *changed)} - {None}) == 6


@pytest.mark.parametrize("noted", [b"\0" * 64, b"../../" + b"a" * 58, b"", b"\xff" * 64, b"a" * 70])
def test_a_damaged_note_of_an_origin_only_costs_reading_again(tmp_path, origin, noted):
    reader, kept = Reader(gaussian(300, 515)), Cache(tmp_path / "packed")
    packed(kept, reader, origin)
    (note,) = kept.folder.glob("*.origin")
    note.write_bytes(noted)
    assert same(unpack(packed(kept, reader, origin)), reader.tensor)
    assert (reader.reads, reader.packs) == (2, 1)


def test_what_was_unused_the_longest_makes_room(tmp_path):
    tensors = [gaussian(64, 1024, seed=seed) for seed in range(4)]
    kept = Cache(tmp_path)
    packed(kept, tensors[0])
    size = entry(tmp_path).stat().st_size
    kept = Cache(tmp_path, most_bytes=3 * size + 100)
    for age, tensor in enumerate(tensors[:3]):
        packed(kept, tensor)
        os.utime(tmp_path / (key(tensor) + ".packed"), (age, age))
    packed(kept, tensors[0])  # used again, so 1 is the oldest
    packed(kept, tensors[3])
    there = {path.stem for path in tmp_path.glob("*.packed")}
    assert there == {key(tensors[i]) for i in (0, 2, 3)}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= kept.most_bytes


def test_a_folder_with_room_is_not_looked_through_for_each_entry(tmp_path, monkeypatch):
    """With 250 entries that took half a second of a load."""
    looked, real = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or real(path))
    kept = Cache(tmp_path)
    monkeypatch.setattr(cache, "sweep_partials", lambda _folder: None)  # which looks, too
    for seed in range(4):
        packed(kept, gaussian(64, 1024, seed=seed))
    assert looked == [tmp_path]
    assert len(list(tmp_path.glob("*.packed"))) == 4


def test_an_entry_larger_than_the_bound_is_not_stored(tmp_path):
    assert packed(Cache(tmp_path, most_bytes=1000), gaussian(64, 1024)) is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_a_full_or_forbidden_disk_only_costs_packing_again(tmp_path, monkeypatch, error):
    def refuse(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(cache, "_complete", refuse)
    monkeypatch.setattr(cache, "write_text", refuse)
    tensor = gaussian(64, 1024)
    assert same(unpack(packed(Cache(tmp_path), tensor)), tensor)
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_folders_place_only_costs_packing_again(tmp_path):
    (tmp_path / "packed").write_text("")
    tensor = gaussian(64, 1024)
    assert same(unpack(packed(Cache(tmp_path / "packed"), tensor)), tensor)


def _many(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    kept = Cache(folder, most_bytes=400_000)
    for i in range(12):
        tensor = gaussian(64, 1024, seed=(seed + i) % 6)
        assert same(unpack(packed(kept, tensor)), tensor)


def test_several_processes_use_one_folder(tmp_path):
    # forks of a process that has only imported this module: here, threads of other tests may hold a lock
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload([__name__])
    processes = [spawn.Process(target=_many, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not list(tmp_path.glob(".weir-*"))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 400_000


def test_digests_in_pieces_are_those_of_the_whole(monkeypatch):
    tensor = gaussian(64, 1024)
    other = tensor.clone()
    other[63, 1023] = 1.0
    monkeypatch.setattr(staging, "PIECE_BYTES", 1 << 12)
    flat = tensor.view(torch.uint8).view(-1)
    pieces = b"".join(hashlib.sha256(piece.numpy().tobytes()).digest() for piece in flat.split(1 << 12))
    about = json.dumps([cache._VERSION, "torch.bfloat16", [64, 1024], False]).encode()
    assert key(tensor) == hashlib.sha256(about + pieces).hexdigest() != key(other)


def test_threads_and_buffers_serve_many_tensors_and_go_when_they_are_released():
    buffers = staging.HostBuffers(3)
    threads = set()
    for _ in range(4):
        threads |= set(buffers.each(9 << 20, lambda _start, _memory: threading.current_thread()))
    assert 1 <= len(threads) <= 3
    buffers.release()
    assert not any(thread.is_alive() for thread in threads)
    assert buffers.each(5 << 20, lambda start, memory: (start, memory.numel()))[-1] == (4 << 20, 1 << 20)
    buffers.release()


def test_the_folder_is_where_other_caches_are():
    assert usual_folder({"WEIR_STATE": "/s", "XDG_CACHE_HOME": "/x"}) == Path("/s/packed")
    assert usual_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/weir/packed")
    assert usual_folder({"HOME": "/h"}) == Path("/h/.cache/weir/packed")


@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_a_pipe_or_folder_in_the_place_of_an_entry_only_costs_packing_again(tmp_path, origin, what):
    """Opening a pipe as a file would wait for somebody who writes into it."""
    reader, kept = Reader(gaussian(300, 515)), Cache(tmp_path / "packed")
    packed(kept, reader, origin)
    for path in list(kept.folder.iterdir()):
        path.unlink()
        os.mkfifo(path) if what == "fifo" else path.mkdir()
    for _ in range(2):
        assert same(unpack(packed(kept, reader, origin)), reader.tensor)
    # a pipe is removed; a folder isn't ours, so it is packed for its outline and again into its place
    assert reader.packs == (2 if what == "fifo" else 1 + 2 * 2)


def test_a_disk_that_is_really_full_only_costs_packing_again(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a small file system needs rights that this user lacks")
    try:
        reader, kept = Reader(gaussian(300, 515)), Cache(folder)
        for times in (1, 2):
            assert same(unpack(packed(kept, reader)), reader.tensor)
            assert reader.packs == 3 * times  # until the disk is full, for the outline, into its place
            assert [path.name for path in folder.iterdir() if path.suffix == ".packed"] == []
        small = Reader(gaussian(16, 512))
        for _ in range(2):
            assert same(unpack(packed(kept, small)), small.tensor)
        assert small.packs == 1  # what fits is kept: nothing of the failed ones is left behind
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_an_entrys_bytes_are_read_once(tmp_path, origin, monkeypatch):
    """They were read and digested to learn the form, and again to be brought to their place."""
    reader, kept = Reader(gaussian(300, 515)), Cache(tmp_path / "packed")
    packed(kept, reader, origin)
    read, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: (read.append(real(fd, views, at)), read[-1])[1])
    found = kept.packed(Counted(reader.read, reader=reader), origin=origin)
    starts = found.outline.parts["starts"].nbytes
    assert sum(read) == starts
    written(found)
    assert sum(read) == starts + form(found.outline).n_bytes


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_an_entry_damaged_after_its_outline_was_read_is_packed_into_the_same_place(
    tmp_path, monkeypatch, damage
):
    monkeypatch.setattr(staging, "PIECE_BYTES", 1 << 12)
    reader, kept = Reader(gaussian(64, 1024)), Cache(tmp_path)
    found = kept.packed(Counted(reader.read, reader=reader))
    whole = bytearray(entry(tmp_path).read_bytes())
    if damage == "gone":
        entry(tmp_path).unlink()
    else:
        half = len(whole) // 2
        whole[half] ^= 1
        entry(tmp_path).write_bytes(whole if damage == "flip" else whole[:half])
    assert same(unpack(written(found)), reader.tensor)
    assert reader.packs == 2
    assert same(unpack(packed(kept, reader)), reader.tensor)
    assert reader.packs == 2  # the entry was made again as well


def test_an_entry_made_again_in_another_form_is_not_read_by_the_outline_of_before(tmp_path, monkeypatch):
    """Of two bases, both give the weights, but bytes of the one decode to other weights with the other."""
    reader, kept = Reader(gaussian(64, 1024)), Cache(tmp_path)
    found = kept.packed(Counted(reader.read, reader=reader))
    entry(tmp_path).unlink()
    with monkeypatch.context() as patch:
        own = tensors._code
        patch.setattr(tensors, "_code", lambda *of, **how: (own(*of, **how)[0] - 1, ()))
        other = Cache(tmp_path).packed(Counted(reader.read, reader=reader))
    assert form(other.outline).base == form(found.outline).base - 1
    assert same(unpack(written(found)), reader.tensor)


def test_an_outline_whose_content_is_another_by_now_is_not_written(tmp_path):
    reader, kept = Reader(gaussian(64, 1024)), Cache(tmp_path)
    found = kept.packed(Counted(reader.read, reader=reader))
    entry(tmp_path).unlink()
    reader.tensor = gaussian(64, 1024, seed=1).mul_(2**20)
    flat = torch.empty(form(found.outline).n_bytes, dtype=torch.uint8)
    assert not found.write([(found.outline, flat)])
    assert not list(tmp_path.glob("*.packed"))


def _killed(folder: Path) -> None:
    cache._complete = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    packed(Cache(folder), gaussian(64, 1024))


def test_a_process_killed_while_it_stores_leaves_no_entry_and_its_file_is_swept(tmp_path):
    process = multiprocessing.get_context("forkserver").Process(target=_killed, args=(tmp_path,))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    assert same(unpack(packed(Cache(tmp_path), gaussian(64, 1024))), gaussian(64, 1024))
    assert [path.suffix for path in tmp_path.iterdir()] == [".packed"]
