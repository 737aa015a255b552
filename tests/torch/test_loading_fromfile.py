"""What a model is filled with from a checkpoint, on the CPU."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from probes.core.errors import CheckpointUnreadable, PlacementError
from probes.placement import checkpoint, read_into
from probes.placement.checkpoint import Checkpoint, open_checkpoint
from probes.placement.loading import CheckpointValues, build_skeleton, model_tensors
from probes.placement.models.headers import read_checkpoint
from probes.placement.packing.staging import host_buffer


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer(
            "inverse", 1.0 / (10_000 ** (torch.arange(0, width, 2) / width)), persistent=False
        )
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.plain = torch.arange(4)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight


def values_of(model: nn.Module, checkpoint: Checkpoint, **options) -> dict[str, torch.Tensor]:
    source = CheckpointValues(model, checkpoint, **options)
    source.fill_buffers()
    found = {}
    for target in model_tensors(model):
        if target.is_parameter:
            into = torch.empty(target.tensor.shape, dtype=target.tensor.dtype)
            source.bring(target.tensor, into)
            found |= dict.fromkeys(target.names, into)
    return found | dict(model.named_buffers())


def saved(model: nn.Module, path: Path, **changed: torch.Tensor | None) -> Path:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} | changed
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    return path


def test_parameters_are_on_meta_and_everything_else_is_real():
    model = build_skeleton(Tied)
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert torch.equal(model.blocks[0].inverse, Tied().blocks[0].inverse)
    assert torch.equal(model.blocks[0].plain, torch.arange(4))
    assert not model.training


def test_a_tie_made_before_registration_is_kept():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Parameter(torch.randn(4, 4))
            self.a, self.b = shared, shared

    model = build_skeleton(Twice)
    assert model.a is model.b
    assert model.a.is_meta


def test_another_thread_builds_real_models_meanwhile():
    made = []

    def factory():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    assert build_skeleton(factory).weight.is_meta
    assert not made[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_every_value_of_a_checkpoint_arrives(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    model.blocks[1].steps += 7
    path = saved(model, tmp_path / "model.safetensors")
    with open_checkpoint(path) as checkpoint:
        found = values_of(build_skeleton(Tied), checkpoint)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["blocks.0.inverse"], model.blocks[0].inverse)


@pytest.mark.parametrize("dropped", ["head.weight", "embed.weight"])
def test_a_tied_tensor_may_be_saved_under_either_name(tmp_path, dropped):
    model = Tied()
    path = saved(model, tmp_path / "model.safetensors", **{dropped: None})
    with open_checkpoint(path) as checkpoint:
        found = values_of(build_skeleton(Tied), checkpoint)
    assert torch.equal(found["head.weight"], model.embed.weight)


def test_different_values_for_a_tied_tensor_are_refused(tmp_path):
    path = saved(Tied(), tmp_path / "model.safetensors", **{"head.weight": torch.zeros(10, 8)})
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(PlacementError, match=r"embed\.weight and head\.weight"),
    ):
        values_of(build_skeleton(Tied), checkpoint)


def test_a_shared_module_is_filled_by_either_of_its_names(tmp_path):
    def shared():
        one = nn.Linear(4, 4)
        return nn.ModuleList([one, nn.Linear(4, 4), one])

    model = shared()
    path = saved(model, tmp_path / "model.safetensors", **{"0.weight": None, "2.bias": None})
    with open_checkpoint(path) as checkpoint:
        found = values_of(build_skeleton(shared), checkpoint)
    assert torch.equal(found["0.weight"], model[2].weight)
    assert torch.equal(found["2.bias"], model[0].bias)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"blocks.0.up.bias": None}, r"1 missing: blocks\.0\.up\.bias"),
        ({"blocks.0.steps": None}, r"1 missing: blocks\.0\.steps"),
        ({"extra": torch.zeros(1)}, "1 not part of this model: extra"),
        ({"blocks.1.scale": torch.zeros(3)}, r"1 of another shape: blocks\.1\.scale \[3\] instead of \[8\]"),
        ({"blocks.1.scale": torch.zeros(8, dtype=torch.int32)}, r"blocks\.1\.scale I32 instead of float32"),
        ({"blocks.1.scale": torch.zeros(8, dtype=torch.bool)}, r"blocks\.1\.scale BOOL instead of float32"),
        ({"blocks.1.steps": torch.zeros(3, dtype=torch.uint64)}, r"blocks\.1\.steps U64 instead of int64"),
        ({"blocks.1.steps": torch.zeros(3, dtype=torch.complex64)}, r"blocks\.1\.steps C64 instead of int64"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changed, said):
    path = saved(Tied(), tmp_path / "model.safetensors", **changed)
    with open_checkpoint(path) as checkpoint, pytest.raises(PlacementError, match=said):
        values_of(build_skeleton(Tied), checkpoint)


def test_stored_buffers_that_a_state_dict_leaves_out_and_ignored_tensors_are_no_complaint(tmp_path):
    more = {"blocks.0.inverse": torch.zeros(4), "pooler.weight": torch.zeros(2)}
    path = saved(Tied(), tmp_path / "model.safetensors", **more)
    with open_checkpoint(path) as checkpoint:
        found = values_of(build_skeleton(Tied), checkpoint, ignored=["pooler.*"])
    assert torch.equal(found["blocks.0.inverse"], Tied().blocks[0].inverse)  # the model's own, not the file's


def of_dtype(path: Path, dtype: str, shape: list[int], n_bytes: int) -> Path:
    """A file with one tensor, of zeros."""
    header = json.dumps({"weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, n_bytes]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(n_bytes))
    return path


@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize(("stored", "n_bytes"), [("F4", 8), ("F8_E4M3", 16), ("F8_E8M0", 16), ("BF16", 32)])
def test_a_number_of_few_bits_becomes_a_larger_one_or_is_refused_by_name(tmp_path, stored, n_bytes, wanted):
    """Those of 4 bits, and any into another of 8, were tracebacks of torch: not implemented."""
    path = of_dtype(tmp_path / "m.safetensors", stored, [4, 4], n_bytes)
    with open_checkpoint(path) as checkpoint:
        if stored == "F4" or wanted.itemsize == 1:
            with pytest.raises(PlacementError, match=f"weight {stored} instead of float"):
                values_of(build_skeleton(lambda: nn.Linear(4, 4, bias=False).to(wanted)), checkpoint)
        else:
            found = values_of(build_skeleton(lambda: nn.Linear(4, 4, bias=False).to(wanted)), checkpoint)
            assert found["weight"].dtype is wanted


def test_a_dtype_that_an_older_torch_lacks_is_refused_by_name(tmp_path, monkeypatch):
    path = of_dtype(tmp_path / "m.safetensors", "F8_E8M0", [4, 4], 16)
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(PlacementError, match="weight F8_E8M0 instead of float32"),
    ):
        values_of(build_skeleton(lambda: nn.Linear(4, 4, bias=False)), checkpoint)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_another_dtype_is_converted_as_torch_does(tmp_path, monkeypatch, stored, wanted):
    weights = torch.randn(100, 70).to(stored)
    save_file({"weight": weights}, tmp_path / "m.safetensors")
    monkeypatch.setattr("probes.placement.packing.staging.PIECE_BYTES", 4096)
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        found = values_of(build_skeleton(lambda: nn.Linear(70, 100, bias=False, dtype=wanted)), checkpoint)
    assert torch.equal(found["weight"], weights.to(wanted))


def test_a_parameter_that_is_not_contiguous_gets_its_values_in_their_places(tmp_path):
    def factory():
        return nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)

    weights = torch.randn(4, 3, 3, 3)
    save_file({"weight": weights}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        model = build_skeleton(factory)
        into = torch.empty(4, 3, 3, 3).to(memory_format=torch.channels_last)
        CheckpointValues(model, checkpoint).bring(model.weight, into)
    assert torch.equal(into, weights)


@pytest.mark.parametrize("piece", [4, 20, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_for_any_strides_come_piece_by_piece(piece, dtype, tmp_path, monkeypatch):
    weights = torch.randn(5, 3, 2, 7)
    save_file({"weight": weights}, tmp_path / "m.safetensors")
    monkeypatch.setattr("probes.placement.packing.staging.PIECE_BYTES", piece)
    order = (2, 0, 3, 1)
    into = torch.empty([weights.shape[d] for d in order], dtype=dtype).permute(
        [order.index(d) for d in range(4)]
    )
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.empty(5, 3, 2, 7, device="meta")))
        CheckpointValues(model, checkpoint).bring(model.weight, into)
    assert torch.equal(into, weights.to(dtype))


def test_a_folder_of_several_files_is_one_checkpoint(tmp_path):
    model = Tied()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(state)
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: state[name] for name in names if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with open_checkpoint(tmp_path) as checkpoint:
        found = values_of(build_skeleton(Tied), checkpoint)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_file_cut_while_it_is_read_is_an_error_and_not_a_crash(tmp_path):
    path = saved(Tied(), tmp_path / "model.safetensors")
    with open_checkpoint(path) as checkpoint:
        model = build_skeleton(Tied)
        source = CheckpointValues(model, checkpoint)
        with path.open("r+b") as file:
            file.truncate(8)
        with pytest.raises(CheckpointUnreadable, match="cut while it was read"):
            source.bring(model.head.weight, torch.empty(10, 8))


def test_a_file_written_to_while_it_is_read_is_an_error(tmp_path):
    path = saved(Tied(), tmp_path / "model.safetensors")
    with open_checkpoint(path) as checkpoint:
        model = build_skeleton(Tied)
        source = CheckpointValues(model, checkpoint)
        with path.open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"oops")
        with pytest.raises(CheckpointUnreadable, match="changed while it was read"):
            source.bring(model.embed.weight, torch.empty(10, 8))


def test_a_file_written_to_whose_old_time_is_set_again_is_an_error(tmp_path):
    """Its weights were taken for those of the checkpoint that was opened."""
    path = saved(Tied(), tmp_path / "model.safetensors")
    with open_checkpoint(path) as checkpoint:
        source = CheckpointValues(model := build_skeleton(Tied), checkpoint)
        before = path.stat()
        while path.stat().st_ctime_ns == before.st_ctime_ns:  # a file system's clock ticks in milliseconds
            with path.open("r+b") as file:
                file.seek(-4, 2)
                file.write(b"oops")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        with pytest.raises(CheckpointUnreadable, match="changed while it was read"):
            source.bring(model.embed.weight, torch.empty(10, 8))


def test_a_file_that_another_replaces_is_read_on(tmp_path):
    path = saved(Tied(), tmp_path / "model.safetensors")
    with open_checkpoint(path) as checkpoint:
        source = CheckpointValues(model := build_skeleton(Tied), checkpoint)
        before = path.stat()
        descriptor = os.open(path, os.O_RDONLY)
        while os.fstat(descriptor).st_ctime_ns == before.st_ctime_ns:
            (tmp_path / "link").unlink(missing_ok=True)
            (tmp_path / "link").hardlink_to(path)
            (tmp_path / "link").unlink()
        os.close(descriptor)
        with pytest.raises(CheckpointUnreadable, match="changed while it was read"):
            source.bring(model.embed.weight, torch.empty(10, 8))
        (tmp_path / "other").write_bytes(b"other")
        (tmp_path / "other").replace(path)
        source.bring(model.embed.weight, torch.empty(10, 8))


def test_pieces_of_a_large_tensor_are_put_together_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    weights = torch.randn(301, 77)
    save_file({"weight": weights}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as opened_file:
        found = values_of(build_skeleton(lambda: nn.Linear(77, 301, bias=False)), opened_file)
    assert torch.equal(found["weight"], weights)


def test_an_empty_tensor_and_a_scalar_are_read(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.none, self.one = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.tensor(0.0))

    save_file({"none": torch.empty(0, 4), "one": torch.tensor(3.0)}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert values_of(build_skeleton(Odd), checkpoint)["one"].item() == 3.0


def test_a_factory_that_gives_no_module_is_refused():
    with pytest.raises(PlacementError, match="returned int"):
        build_skeleton(lambda: 3)


@pytest.mark.parametrize(
    "read",
    [
        nn.utils.parametrizations.orthogonal,
        lambda linear: linear.weight.tolist(),
        lambda linear: linear.weight.detach().numpy(),
        lambda linear: linear.weight + torch.ones(4, 4),
    ],
)
def test_a_factory_that_reads_weights_is_refused(read):
    def factory():
        linear = nn.Linear(4, 4)
        read(linear)
        return linear

    with pytest.raises(PlacementError, match="the factory reads values of parameters"):
        build_skeleton(factory)


def test_an_error_of_the_factory_is_its_own():
    with pytest.raises(TypeError, match="can only concatenate"):
        build_skeleton(lambda: [] + ())


def test_a_buffer_left_on_meta_must_come_from_the_checkpoint(tmp_path):
    def factory():
        with torch.device("meta"):
            return Block()

    save_file(dict(Block().state_dict()), tmp_path / "m.safetensors")
    with (
        open_checkpoint(tmp_path / "m.safetensors") as checkpoint,
        pytest.raises(PlacementError, match="1 missing: inverse"),
    ):
        values_of(build_skeleton(factory), checkpoint)


def test_where_memory_cannot_be_pinned_it_stays_pageable():
    # this torch has no GPU to pin memory for, and refuses as a driver does that is out of it
    assert not host_buffer(64, pinned=True).is_pinned()
    assert host_buffer(64, pinned=True).numel() == 64


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_numbers_beyond_float16_are_refused_by_name_instead_of_becoming_infinite(tmp_path, stored):
    """A card without bfloat16 units computes in float16 or float32."""
    model = nn.Linear(4, 3, dtype=stored)
    weight = torch.tensor([[1.0, -2.0, float("inf"), 65_280.0]] * 3, dtype=stored)
    path = saved(model, tmp_path / "fits.safetensors", weight=weight)
    with open_checkpoint(path) as checkpoint:
        found = values_of(build_skeleton(lambda: nn.Linear(4, 3, dtype=torch.float16)), checkpoint)
    assert torch.equal(found["weight"], weight.half())
    weight[1, 1] = -999_424.0  # which bfloat16 has
    path = saved(model, tmp_path / "beyond.safetensors", weight=weight)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(
            PlacementError, match=r"weight can't be converted: 1 of its numbers .*float16, up to 9\.994e\+05"
        ),
    ):
        values_of(build_skeleton(lambda: nn.Linear(4, 3, dtype=torch.float16)), checkpoint)
    with open_checkpoint(path) as checkpoint:
        wide = values_of(build_skeleton(lambda: nn.Linear(4, 3, dtype=torch.float32)), checkpoint)
    assert torch.equal(wide["weight"], weight.float())


@pytest.mark.parametrize("by", ["another file", "another content", "a pipe"])
def test_a_file_exchanged_after_its_header_was_read_is_refused(tmp_path, monkeypatch, by):
    """One of the same size was read by the header of the one before: other weights, without a word."""
    path, other = tmp_path / "m.safetensors", tmp_path / "other"
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    save_file({"b": torch.zeros(4), "a": torch.ones(4)}, other)
    assert path.stat().st_size == other.stat().st_size

    def read_then_exchanged(where):
        found = read_checkpoint(where)
        if by == "a pipe":
            path.unlink()
            os.mkfifo(path)
        elif by == "another file":
            other.replace(path)
        else:
            path.write_bytes(other.read_bytes())
        return found

    monkeypatch.setattr(checkpoint, "read_checkpoint", read_then_exchanged)
    with pytest.raises(CheckpointUnreadable, match="changed while it was opened"), open_checkpoint(path):
        pass


def test_tensors_are_filled_from_a_checkpoint_in_their_own_dtypes(tmp_path):
    half = torch.randn(40, 30, dtype=torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_file({"half": half, "large": torch.full((3,), 70_000.0)}, path)
    with open_checkpoint(path) as file:
        wide, turned = torch.empty(40, 30), torch.empty(30, 40, dtype=torch.bfloat16).T
        read_into(file, {"half": wide})
        read_into(file, {"half": turned})
        assert torch.equal(wide, half.float())
        assert torch.equal(turned, half)
        with pytest.raises(OverflowError, match=r"don't fit into torch\.float16"):
            read_into(file, {"large": torch.empty(3, dtype=torch.float16)})
        with pytest.raises(KeyError):
            read_into(file, {"none": wide})
