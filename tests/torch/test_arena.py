"""Host memory of exact size: taken as asked, registered once, and pageable where the driver refuses."""

import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from late_lanes import LateLanes
from random_models import plan_of
from torch import nn

from probes.core.errors import PlacementError
from probes.core.unknown import Unknown
from probes.placement.models.modules import find_blocks
from probes.placement.runtime import buffers, host_memory
from probes.placement.runtime.host_memory import HostArena
from probes.placement.runtime.place import place, place_model
from probes.placement.runtime.streams import CudaStreams
from probes.placement.runtime.weight_sources import ModuleWeights

MIB = 2**20


class Driver:
    """Registers as CUDA's runtime does, or refuses."""

    def __init__(self, error=0):
        self.error, self.registered, self.released = error, [], []

    def cudaHostRegister(self, address, n_bytes, flags):
        self.registered.append((address, n_bytes))
        return self.error

    def cudaHostUnregister(self, address):
        self.released.append(address)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_taken_over_asked_is_within_two_percent_in_one_registration(driver):
    host = HostArena(64 * MIB, Unknown("one node"))
    pieces = [host.take(n) for n in (5 * MIB, 300_001, 7, 12 * MIB + 1)]
    host.pin(int)
    assert not host.why_pageable
    assert len(driver.registered) == 1
    assert sum(piece.numel() for piece in pieces) == host.asked
    assert host.asked <= host.pinned_bytes <= 1.02 * host.asked
    assert driver.registered[0] == (pieces[0].data_ptr(), host.pinned_bytes)
    for value, piece in enumerate(pieces):
        piece.fill_(value)
    assert [int(piece.max()) for piece in pieces] == [int(piece.min()) for piece in pieces] == [0, 1, 2, 3]
    host.release()
    host.release()
    assert len(driver.released) == 1


def test_room_that_is_not_used_takes_no_memory():
    def resident():
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    host = HostArena(512 * MIB, Unknown("one node"))
    host.take(8 * MIB).fill_(1)
    assert resident() - before < 64 * MIB


def test_room_that_was_not_known_is_registered_with_the_rest(driver):
    host = HostArena(MIB, Unknown("one node"))
    first = host.take(MIB)
    host.widen(2 * MIB)
    second = [host.take(MIB), host.take(1000)]
    host.pin(int)
    assert not host.why_pageable
    assert driver.registered == [(first.data_ptr(), MIB), (second[0].data_ptr(), MIB + 4096)]
    assert (host.asked, host.pinned_bytes) == (2 * MIB + 1000, 2 * MIB + 4096)
    host.release()
    host.release()
    assert sorted(driver.released) == sorted(address for address, _ in driver.registered)


def test_room_that_is_left_is_used_before_more_is_mapped(driver):
    host = HostArena(3 * MIB, Unknown("one node"))
    host.take(MIB)
    host.widen(2 * MIB)
    host.take(2 * MIB)
    host.pin(int)
    assert len(driver.registered) == 1
    host.release()


def test_where_a_part_cannot_be_registered_no_part_stays_so(driver):
    host = HostArena(MIB, Unknown("one node"))
    first = host.take(MIB)
    host.widen(MIB)
    host.take(MIB)
    register = driver.cudaHostRegister

    def refuse_the_second(*args):
        driver.error = len(driver.registered)
        return register(*args)

    driver.cudaHostRegister = refuse_the_second
    host.pin(int)
    assert "error 1" in host.why_pageable
    assert host.pinned_bytes == 0
    assert driver.released == [first.data_ptr()]


def test_more_than_was_planned_is_refused():
    with pytest.raises(PlacementError, match="were planned"):
        HostArena(MIB, Unknown("one node")).take(2 * MIB)


@pytest.mark.parametrize("refusal", ["error", "exception"])
def test_memory_that_cannot_be_registered_stays_pageable_with_the_reason(driver, monkeypatch, refusal):
    if refusal == "error":
        driver.error = 2
    else:
        monkeypatch.setattr(
            torch.cuda, "cudart", lambda: (_ for _ in ()).throw(RuntimeError("no driver here"))
        )
    host = HostArena(MIB, Unknown("one node"))
    host.take(1000)
    host.pin(int)
    assert host.pinned_bytes == 0
    assert ("error 2" if refusal == "error" else "no driver here") in host.why_pageable
    host.release()
    assert not driver.released


def test_pages_are_provided_on_the_processors_of_the_gpus_node(monkeypatch):
    mine = sorted(os.sched_getaffinity(0))
    seen = []
    nodes = (SimpleNamespace(node=0, cpus=str(mine[0])), SimpleNamespace(node=1, cpus="99999"))
    monkeypatch.setattr(host_memory.numa, "nodes", lambda _root: nodes)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: seen.append(set(cpus)))
    HostArena(MIB, 0).take(MIB)
    assert seen == ([{mine[0]}, set(mine)] if len(mine) > 1 else [])
    seen.clear()
    HostArena(MIB, 1).take(MIB)  # a node of which this process may use no processor
    HostArena(MIB, Unknown("the firmware doesn't say")).take(MIB)
    assert seen == []


@torch.no_grad()
@pytest.mark.parametrize("tier", ["streamed", "streamed_packed", "in_place", "packed"])
def test_without_a_gpu_or_with_pinning_switched_off_the_results_are_the_same(tier):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    x = torch.randn(3, 64)
    want = model(x)
    plan = plan_of(model, {block.name: tier for block in find_blocks(model)})
    for options in ({}, {"pinned": False}, {"device": "cpu"}, {"capture": True}):
        handle = place(model, plan, **options)
        assert all(torch.equal(model(x), want) for _ in range(4))
        if options.get("pinned") is False:
            assert handle.report().why_pageable == "pinning was switched off"
        handle.remove()


def test_a_device_that_nothing_can_be_placed_on_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(PlacementError, match="not on mps"):
        place(model, plan_of(model), device="mps")


@torch.no_grad()
def test_a_model_dropped_without_remove_leaves_nothing_registered(driver):
    model = nn.Linear(64, 64).eval()
    handle = place(model, plan_of(model, {"": "streamed"}))
    handle._builder.host.pin(lambda: driver.released.append("waited"))
    del handle
    gc.collect()
    model(torch.ones(1, 64))
    assert len(driver.registered) == 1
    assert not driver.released  # copies still read it
    del model
    gc.collect()
    assert driver.released == ["waited", *(address for address, _ in driver.registered)]


@torch.no_grad()
@pytest.mark.parametrize("tier", ["streamed", "streamed_packed", "packed"])
def test_remove_frees_vram_at_once_and_not_when_garbage_is_collected(tier, monkeypatch):
    """A handle that is kept, and blocks and buffers that refer to each other, would hold it until then."""
    arenas = []

    def traced(self, n_bytes, device):
        pages = host_memory._Pages(-1, max(n_bytes, 1))
        arenas.append(weakref.ref(pages))
        self._bytes, self.used = torch.frombuffer(pages, dtype=torch.uint8)[:n_bytes], 0

    monkeypatch.setattr(buffers.DeviceArena, "__init__", traced)
    layers = (nn.Linear(64, 64, bias=False) for _ in range(4))
    model = nn.Sequential(*layers).eval().requires_grad_(False)
    handle = place(model, plan_of(model, {f"{i}": tier for i in range(4)}), device="cpu")
    model(torch.ones(1, 64))
    assert all(one() is not None for one in arenas)
    gc.disable()
    try:
        handle.remove()
        assert [one() for one in arenas] == [None]
    finally:
        gc.enable()


@torch.no_grad()
def test_memory_of_a_model_that_is_dropped_while_it_copies_ahead_is_given_to_nobody_before():
    """The allocator knows only of the stream that asked for it, unless it is told."""
    model, lanes = nn.Linear(64, 64).eval(), LateLanes(1)
    handle = place_model(model, plan_of(model, {"": "streamed"}), ModuleWeights(), lanes)
    arena_bytes, slot = handle._builder.vram.whole, handle._engine.moving[0].staging[0].memory
    assert lanes.used is arena_bytes
    assert arena_bytes.data_ptr() <= slot.data_ptr() < arena_bytes.data_ptr() + arena_bytes.numel()


def test_the_allocator_is_told_of_both_streams_of_a_gpus_lanes():
    streams = []
    gpu = object.__new__(CudaStreams)
    gpu.forked = SimpleNamespace(stream="copies"), SimpleNamespace(stream="unpacks")
    gpu.use(SimpleNamespace(record_stream=streams.append))
    assert streams == ["copies", "unpacks"]
