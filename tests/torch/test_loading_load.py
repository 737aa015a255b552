"""Models loaded by a plan compute what the models they come from compute."""

import errno
import gc
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from placement_plans import plan_of
from safetensors.torch import save_file
from tied_model import Model
from torch import nn

from probes.core.errors import CheckpointUnreadable, PlacementError, UsageError
from probes.placement import loading as placed_loading
from probes.placement.checkpoint import Checkpoint
from probes.placement.loading import _require_room, load
from probes.placement.models.modules import find_blocks
from probes.placement.packing import cache
from probes.placement.read_ahead import ReadAhead
from probes.placement.runtime.origins import ParameterOrigins
from probes.placement.types import DISK_BUFFERS, LOADING_BYTES, Tier

TIERS: tuple[Tier, ...] = ("resident", "packed", "streamed_packed", "streamed", "in_place", "cpu", "disk")


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Model().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return model, tmp_path


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_computes_what_the_saved_one_does(saved, tier, dtype):
    model, folder = saved

    def factory():
        return Model().to(dtype)

    model = model.to(dtype)
    ids = torch.randint(0, 50, (3, 7))
    plan = plan_of(model, {f"layers.{i}": tier for i in range(5)})
    placed = load(factory, folder, plan, device="cpu", cache=folder / "packed")
    with torch.inference_mode():
        want = model(ids)
        for _ in range(3):
            assert torch.equal(placed(ids), want)
    placed.placement.remove()
    with torch.inference_mode():
        assert torch.equal(placed(ids), want)
    for name, tensor in model.state_dict().items():
        assert torch.equal(placed.state_dict()[name], tensor), name


class Counting:
    """How often tensors are packed."""

    def __init__(self, monkeypatch):
        self.times = 0
        self.real = cache.pack_into
        monkeypatch.setattr(cache, "pack_into", self)

    def __call__(self, *args, **options):
        self.times += 1
        return self.real(*args, **options)


LARGE = {f"layers.{i}": "packed" for i in range(5)}


def wait_until_settled(file):
    """Nothing is noted of a file that was just written: it may change again within a tick of its times."""
    os.utime(file, (time.time() - 60, time.time() - 60))
    while time.time_ns() - file.stat().st_ctime_ns < 150_000_000:
        time.sleep(0.02)


def test_a_second_load_packs_nothing_and_reads_no_unpacked_weights_of_packed_blocks(
    saved, monkeypatch, tmp_path
):
    model, folder = saved
    wait_until_settled(folder / "model.safetensors")
    counting = Counting(monkeypatch)
    plan = plan_of(model, LARGE)
    load(Model, folder, plan, device="cpu", cache=tmp_path / "packed").placement.remove()
    first = counting.times
    assert first
    read = []
    real = Checkpoint.read_into
    monkeypatch.setattr(
        Checkpoint, "read_into", lambda self, name, *rest: (read.append(name), real(self, name, *rest))[1]
    )
    again = load(Model, folder, plan, device="cpu", cache=tmp_path / "packed")
    assert counting.times == first
    assert not [name for name in read if name.endswith(("up.weight", "down.weight"))]
    with torch.inference_mode():
        assert torch.equal(again(torch.arange(6)[None]), model(torch.arange(6)[None]))


def convolutions():
    """Two in channels_last, whose outputs have the file's order, and one in which they haven't."""
    made = nn.Sequential(
        nn.Conv2d(16, 64, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        nn.Conv2d(64, 96, (3, 5), dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        nn.Conv2d(96, 32, 1, dtype=torch.bfloat16),
    )
    flipped = made[2].weight.detach().permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    made[2].weight = nn.Parameter(flipped)
    return made.eval()


@pytest.mark.parametrize("tier", ["packed", "streamed_packed", "streamed", "resident", "disk"])
@pytest.mark.parametrize("kept", [True, False])
def test_tensors_of_another_order_in_memory_come_to_any_tier(tier, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(placed_loading, "REORDERED", 3000)
    torch.manual_seed(0)
    model = convolutions()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    wait_until_settled(tmp_path / "model.safetensors")
    x = torch.randn(2, 16, 9, 11, dtype=torch.bfloat16)
    with torch.inference_mode():
        want = model(x)
    plan = plan_of(model, {str(i): tier for i in range(3)})
    read, real = [], Checkpoint.read_into
    monkeypatch.setattr(
        Checkpoint, "read_into", lambda self, name, *rest: (read.append(name), real(self, name, *rest))[1]
    )
    for nth in range(2):
        read.clear()
        cache = tmp_path / "packed" if kept else False
        placed = load(convolutions, tmp_path, plan, device="cpu", cache=cache)
        if nth and kept and "packed" in tier:
            assert not [name for name in read if name.endswith("weight")]
        with torch.inference_mode():
            assert torch.equal(placed(x), want)
        placed.placement.remove()
        assert [p.stride() for p in placed.parameters()] == [p.stride() for p in model.parameters()]


def test_a_changed_checkpoint_of_the_same_size_is_packed_again(saved, tmp_path):
    model, folder = saved
    wait_until_settled(folder / "model.safetensors")
    plan = plan_of(model, LARGE)
    load(Model, folder, plan, device="cpu", cache=tmp_path / "packed").placement.remove()
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, folder / "model.safetensors")
    again = load(Model, folder, plan, device="cpu", cache=tmp_path / "packed")
    with torch.inference_mode():
        assert torch.equal(again(torch.arange(6)[None]), model(torch.arange(6)[None]))


def test_a_checkpoint_loaded_in_two_dtypes_is_not_mixed_up_in_the_cache(saved, tmp_path):
    model, folder = saved
    wait_until_settled(folder / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        same = Model().to(dtype).eval()
        same.load_state_dict(model.state_dict())
        placed = load(
            lambda dtype=dtype: Model().to(dtype),
            folder,
            plan_of(same, LARGE),
            device="cpu",
            cache=tmp_path / "p",
        )
        with torch.inference_mode():
            assert torch.equal(placed(torch.arange(6)[None]), same(torch.arange(6)[None]))
        placed.placement.remove()


def test_a_cache_that_cannot_be_written_only_costs_time(saved, tmp_path, monkeypatch):
    model, folder = saved

    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "replacing", full)
    placed = load(Model, folder, plan_of(model, LARGE), device="cpu", cache=tmp_path / "packed")
    with torch.inference_mode():
        assert torch.equal(placed(torch.arange(6)[None]), model(torch.arange(6)[None]))


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def passes(model, ids):
    for _ in range(4):
        model(ids)


def failing(monkeypatch, after):
    """Reading fails after some tensors, as when the disk is gone."""
    real, left = Checkpoint.read_into, iter(range(after))

    def read(self, name, *rest):
        if next(left, None) is None:
            raise CheckpointUnreadable("model.safetensors can't be read: Input/output error")
        return real(self, name, *rest)

    monkeypatch.setattr(Checkpoint, "read_into", read)


# blocks on disk are read in a pass, so only the rest can fail while loading
@pytest.mark.sampled(7)
@pytest.mark.parametrize(("tier", "after"), [("disk", 0), *((t, n) for t in TIERS[:-1] for n in (0, 5, 14))])
def test_a_load_that_fails_midway_leaves_no_descriptor_and_no_thread(saved, monkeypatch, tier, after):
    model, folder = saved
    plan = plan_of(model, {f"layers.{i}": tier for i in range(5)})
    files, threads = descriptors(), threading.active_count()
    with monkeypatch.context() as patch:
        failing(patch, after)
        with pytest.raises(CheckpointUnreadable, match="Input/output error"):
            load(Model, folder, plan, device="cpu", cache=False)
    gc.collect()
    assert descriptors() <= files
    assert threading.active_count() <= threads
    with torch.inference_mode():
        placed = load(Model, folder, plan, device="cpu", cache=False)
        assert torch.equal(placed(torch.arange(6)[None]), model(torch.arange(6)[None]))


def test_blocks_on_disk_are_read_whole_where_a_plan_by_hand_says_nothing_of_their_bytes(saved):
    model, folder = saved
    plan = plan_of(model, {block.name: "disk" for block in find_blocks(model)})
    blocks = sorted((replace(block, wire_bytes=0) for block in plan.blocks), key=lambda b: b.weight_bytes)
    placed = load(Model, folder, replace(plan, blocks=tuple(blocks)), device="cpu")
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        assert torch.equal(placed(ids), model(ids))


def test_a_block_on_disk_whose_file_is_cut_is_an_error_of_the_pass_and_the_model_stays_usable(saved):
    model, folder = saved
    file = folder / "model.safetensors"
    placed = load(Model, folder, plan_of(model, {f"layers.{i}": "disk" for i in range(5)}), device="cpu")
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        want = placed(ids)
        whole = file.read_bytes()
        with file.open("r+b") as opened:
            opened.truncate(1000)
        with pytest.raises(CheckpointUnreadable, match=r"(cut|changed) while it was read"):
            passes(placed, ids)
        with file.open("r+b") as opened:
            opened.write(whole)
        with pytest.raises(CheckpointUnreadable, match="changed while it was read"):
            passes(placed, ids)
    assert torch.equal(want, model(ids))


def test_reading_ahead_that_is_interrupted_as_often_as_there_are_buffers_begins_again(saved, monkeypatch):
    """Each interruption cost a buffer; without any, every later pass ended in a KeyError."""
    model, folder = saved
    placed = load(Model, folder, plan_of(model, {f"layers.{i}": "disk" for i in range(5)}), device="cpu")
    ids = torch.arange(6)[None]

    def interrupted(*_):
        raise KeyboardInterrupt

    with torch.inference_mode():
        want = model(ids)
        for _ in range(2 * DISK_BUFFERS):
            with monkeypatch.context() as patch:
                patch.setattr(ReadAhead, "_begin", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    placed(ids)
        assert torch.equal(placed(ids), want)
    placed.placement.remove()


@pytest.mark.parametrize(("pinned", "pageable"), [(3 << 20, 0), (0, 3 << 20), (1 << 20, 2 << 20)])
def test_what_a_plan_keeps_in_host_memory_leaves_room_for_loading(saved, pinned, pageable):
    made = plan_of(saved[0], {})
    made = replace(made, host=replace(made.host, pinned=pinned, pageable=pageable))
    budget = (3 << 20) + LOADING_BYTES
    _require_room(made)  # a plan by hand, without budgets
    _require_room(replace(made, host_budget=budget))
    for tight in (replace(made, host_budget=budget - 1), replace(made, vram_budget=1 << 40)):
        with pytest.raises(PlacementError, match=r"keeps 3\.00 MiB in .* and loading takes 64\.00 MiB"):
            _require_room(tight)


@pytest.mark.parametrize("bad", [None, 5, b"x", "", "a\0b", "\ud800"], ids=repr)
def test_what_is_no_path_is_refused_before_anything_is_built(saved, bad):
    model, folder = saved
    plan = plan_of(model, LARGE)

    def factory():
        raise AssertionError("it was built")

    for paths, what in (((bad, True), "the checkpoint is "), ((folder, bad), "the cache is ")):
        with pytest.raises(UsageError, match=what):
            load(factory, paths[0], plan, device="cpu", cache=paths[1])


def test_a_plan_of_another_model_is_refused(saved):
    _, folder = saved
    with pytest.raises(PlacementError, match="isn't the model that was planned"):
        load(Model, folder, plan_of(Model(32), {}), device="cpu")


def test_what_is_no_plan_is_refused(saved):
    _, folder = saved
    with pytest.raises(PlacementError, match="by a Plan, not by a str"):
        load(Model, folder, "plan.json", device="cpu")


def test_where_a_changed_file_cannot_give_a_block_back_all_others_come_back(saved):
    model, folder = saved
    file = folder / "model.safetensors"
    tiers = {"layers.0": "disk", "layers.1": "packed", "layers.2": "streamed", "layers.3": "streamed_packed"}
    placed = load(Model, folder, plan_of(model, tiers), device="cpu", cache=False)
    os.truncate(file, 1000)
    for _ in range(2):
        with pytest.raises(CheckpointUnreadable, match=r"cut|changed"):
            placed.placement.remove()
    for name, tensor in model.state_dict().items():
        if not name.startswith("layers.0."):
            assert torch.equal(placed.state_dict()[name], tensor), name


@torch.no_grad()
def test_values_that_are_lost_keep_no_others_from_coming_back(saved):
    """A GPU's blocks stayed without values once one of a changed file had failed."""
    model, _ = saved
    entries = [entry for block in find_blocks(model) for entry in block.entries]
    want = [entry.parameter.clone() for entry in entries]
    homes, broken = ParameterOrigins(), [True]

    def lost():
        if broken:
            raise CheckpointUnreadable("the file changed")
        return want[0]

    homes.fetch_with(entries[0], lost)
    for entry, values in zip(entries[1:], want[1:], strict=True):
        homes.fetch_with(entry, values.clone)
    for _ in range(2):
        with pytest.raises(CheckpointUnreadable, match="the file changed"):
            homes.restore()
        assert all(torch.equal(e.parameter, v) for e, v in zip(entries[1:], want[1:], strict=True))
    broken.clear()
    homes.restore()
    assert torch.equal(entries[0].parameter, want[0])
