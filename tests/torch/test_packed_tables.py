"""Packed tables, looked up and multiplied with while they are packed: embeddings, tied and not."""

import os
from dataclasses import replace

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

import pytest
import torch
import torch.nn.functional as F
from random_models import plan_of
from safetensors.torch import save_file
from torch import nn

from probes.core.errors import PlacementError
from probes.placement import load, place
from probes.placement.packing import format, launch
from probes.placement.packing.packed import Packed
from probes.placement.packing.products import rows
from probes.placement.packing.tensors import pack, unpack
from probes.placement.runtime import packed_tables
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights

torch.set_num_threads(1)
WORDS, WIDTH = 1500, 512
ODD = (0.0, -0.0, 1e-30, 30000.0, -2e-39, 1e-5, -7.0, float("nan"), float("inf"))
TABLE = "embed.weight"


class Model(nn.Module):
    """Words in, logits out; the table of words is the head's matrix too, or not."""

    def __init__(self, *, tied: bool = True, width: int = WIDTH, dtype=torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, width, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(3))
        self.head = nn.Linear(width, WORDS, bias=False, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.03)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def odd_table(n: int = 300) -> tuple[torch.Tensor, Packed, int]:
    """A table in which some rows have no escape, some one, and one row very many."""
    generator = torch.Generator().manual_seed(0)
    table = (torch.randn(n, WIDTH, generator=generator) * 0.02).bfloat16()
    table.view(-1)[:: 4 * WIDTH + 3] = 30000.0
    table[7] = torch.tensor(ODD).repeat(WIDTH // len(ODD) + 1)[:WIDTH].bfloat16()
    packed = pack(table)
    assert packed is not None
    starts = packed.parts["starts"]
    return table, packed, int((starts[1:] - starts[:-1]).max())


@pytest.fixture(params=["operations", "kernel"])
def way(request, monkeypatch):
    """By torch operations, and by the kernel in Triton's interpreter."""
    if request.param == "kernel":
        monkeypatch.setattr(launch, "usable", lambda device: True)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (0,), (), (40,)])
def test_rows_of_a_packed_table_have_the_same_bits(shape, dtype):
    table, packed, most = odd_table()
    ids = torch.randint(0, len(table), shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    if ids.numel() > 3:
        ids.view(-1)[:3] = torch.tensor([7, 0, len(table) - 1])
    found = rows(packed, ids, most_escapes=most)
    assert found.shape == (*shape, WIDTH)
    assert same(found, F.embedding(ids, table))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("wrong", [300, -1])
def test_an_id_out_of_range_is_refused_and_reads_no_other_memory(wrong):
    _, packed, most = odd_table()
    with pytest.raises(IndexError):
        rows(packed, torch.tensor([0, wrong]), most_escapes=most)


@pytest.mark.usefixtures("way")
def test_a_table_without_escapes_is_looked_up():
    table = torch.ones(40, WIDTH, dtype=torch.bfloat16)
    packed = pack(table)
    assert packed is not None
    assert not packed.parts["values"].numel()
    assert same(rows(packed, torch.tensor([3, 39]), most_escapes=0), table[:2])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("first", "last"), [(0, 300), (0, 7), (5, 9), (100, 300), (299, 300)])
def test_a_piece_of_a_table_is_unpacked_with_its_own_escapes(first, last):
    table, packed, _ = odd_table()
    starts = packed.parts["starts"]
    piece = packed.piece(first, last, slice(int(starts[first]), int(starts[last])))
    assert same(unpack(piece), table[first:last])


def table_plan(model, objective="fast", names=(TABLE,)):
    made = plan_of(model, dict.fromkeys(names, "packed"), objective=objective)
    return replace(made, blocks=tuple(replace(block, table=block.name in names) for block in made.blocks))


@torch.no_grad()
def test_a_tied_table_serves_lookups_and_products_and_goes_back_tied(monkeypatch):
    monkeypatch.setattr(format, "PIECE_BYTES", 512 * WIDTH * 2)
    model = Model().eval()
    before = dict(model.named_parameters(remove_duplicate=False))
    words = model.embed.weight.clone()
    ids = torch.randint(0, WORDS, (2, 20))
    want = model(ids)
    handle = place(model, table_plan(model))
    assert same(model.embed(ids), F.embedding(ids, words))
    x = torch.randn(2, 3, WIDTH).bfloat16()
    pieces = [F.linear(x, words[i : i + 512]) for i in range(0, WORDS, 512)]
    assert same(model.head(x), torch.cat(pieces, -1))
    assert torch.allclose(model(ids).float(), want.float(), atol=0.05)
    assert same(model.embed.weight + 0, words)  # whoever else reads it
    assert same(model.state_dict()["head.weight"], words)
    handle.remove()
    assert model.head.weight is model.embed.weight is before[TABLE]
    assert all(value is before[name] for name, value in model.named_parameters(remove_duplicate=False))
    assert same(model.embed.weight, words)
    assert same(model(ids), want)


@torch.no_grad()
def test_few_rows_are_multiplied_straight_from_the_packed_table():
    model = Model().eval()
    words, used = model.embed.weight.clone(), []

    def linear(x, packed, bias):
        used.append(tuple(packed.shape))
        return F.linear(x, unpack(packed), bias)

    handle = place_model(
        model, table_plan(model), ModuleWeights(), Streams(), work=PackedOperations(linear=linear)
    )
    x = torch.randn(1, WIDTH).bfloat16()
    assert same(model.head(x), F.linear(x, words))
    assert used == [(WORDS, WIDTH)]
    handle.remove()


@torch.no_grad()
def test_what_a_table_takes_is_its_packed_bytes_and_one_piece_and_no_scratch_buffer():
    model = Model().eval()
    packed = pack(model.embed.weight)
    assert packed is not None
    others = sum(p.nbytes for name, p in model.named_parameters() if name != TABLE)
    handle = place(model, table_plan(model))
    report = handle.report()
    room = format.piece_bytes((WORDS, WIDTH))
    assert report.vram_taken <= packed.packed_bytes + room + others + 4096
    assert report.vram_asked >= packed.packed_bytes + room + others
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("objective", ["exact", "fast"])
def test_a_table_that_is_only_looked_up_needs_no_room_and_keeps_its_bits(objective):
    model = Model(tied=False).eval()
    ids = torch.randint(0, WORDS, (2, 20))
    want = model(ids)
    handle = place(model, table_plan(model, objective, ("embed",)))
    assert same(model(ids), want)
    assert handle.report().vram_asked < sum(p.nbytes for p in model.parameters())
    handle.remove()
    assert same(model(ids), want)


@torch.no_grad()
def test_a_table_with_a_largest_norm_is_refused_before_anything_has_changed():
    model = Model(tied=False).eval()
    model.embed.max_norm = 0.5  # each call writes to the weight, which a packed table would lose
    ids = torch.randint(0, WORDS, (3,))
    want = F.embedding(ids, model.embed.weight.clone(), max_norm=0.5)
    with pytest.raises(PlacementError, match=r"calls of embed write to embed\.weight"):
        place(model, table_plan(model, names=("embed",)))
    assert same(model.embed(ids), want)


@torch.no_grad()
def test_a_tied_table_is_loaded_from_a_checkpoint(tmp_path):
    model = Model().eval()
    ids = torch.randint(0, WORDS, (1, 4))
    save_file(
        {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"},
        tmp_path / "model.safetensors",
    )
    for _ in range(2):  # the second time it is read from the cache
        loaded = load(Model, tmp_path, table_plan(model), cache=tmp_path / "cache")
        assert same(loaded.embed(ids), model.embed(ids))
        assert torch.allclose(loaded(ids).float(), model(ids).float(), atol=0.05)
        loaded.placement.remove()
        assert loaded.head.weight is loaded.embed.weight
        assert same(loaded.embed.weight, model.embed.weight)


@pytest.mark.parametrize("other", [{"width": 64}, {"dtype": torch.float32}])
def test_a_table_whose_rows_cannot_be_unpacked_one_by_one_is_refused(other):
    model = Model(**other).eval()
    before = model.embed.weight
    with pytest.raises(PlacementError, match="isn't one bfloat16 matrix"):
        place(model, table_plan(model))
    assert model.embed.weight is before


@torch.no_grad()
def test_a_table_that_packing_does_not_make_smaller_stays_as_it_is():
    model = Model().eval()
    model.embed.weight.view(torch.int16).random_()  # any bits: no exponent occurs more often than another
    model.embed.weight.nan_to_num_(0, 0, 0)
    ids = torch.randint(0, WORDS, (4,))
    want = model(ids)
    handle = place(model, table_plan(model))
    assert same(model(ids), want)
    handle.remove()


@torch.no_grad()
def test_an_exact_tied_table_gives_the_librarys_bits_and_is_compared_once_for_a_shape(monkeypatch):
    monkeypatch.setattr(format, "PIECE_BYTES", 512 * WIDTH * 2)
    model = Model().eval()
    words, sizes = model.embed.weight.clone(), []
    own = F.linear

    def linear(x, weight, bias=None):
        sizes.append(len(weight))
        return own(x, weight, bias)

    handle = place(model, table_plan(model, "exact"))
    monkeypatch.setattr(packed_tables.F, "linear", linear)
    for rows_of_input in (1, 7, 40):
        for _ in range(2):
            x = torch.randn(rows_of_input, WIDTH).bfloat16()
            assert same(model.head(x), own(x, words))
    monkeypatch.undo()
    assert sizes.count(WORDS) >= 3
    handle.remove()
    assert model.head.weight is model.embed.weight
    assert same(model.embed.weight, words)


@torch.no_grad()
def test_where_pieces_round_otherwise_an_exact_product_is_that_of_the_whole_table(monkeypatch):
    monkeypatch.setattr(format, "PIECE_BYTES", 512 * WIDTH * 2)
    model = Model().eval()
    words, unpacked = model.embed.weight.clone(), []

    def unpack_otherwise(packed, out):
        unpacked.append(packed)
        return unpack(packed, out).mul_(1.01)

    work = PackedOperations(unpack=unpack_otherwise)
    handle = place_model(model, table_plan(model, "exact"), ModuleWeights(), Streams(), work=work)
    for _ in range(3):
        x = torch.randn(2, WIDTH).bfloat16()
        assert same(model.head(x), F.linear(x, words))
    assert len(unpacked) == 1  # the first piece showed it, once
    handle.remove()


def plainly(product, x, bias=None):
    return product(x, bias)


def with_autocast(product, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return product(x, None)


@torch.no_grad()
@pytest.mark.parametrize(
    ("is_otherwise", "before", "after"),
    [
        (
            lambda x, _: not x.is_contiguous(),
            plainly,
            lambda product, x: plainly(product, x.T.contiguous().T),
        ),
        (lambda *_: torch.is_autocast_enabled("cpu"), plainly, with_autocast),
        (
            lambda x, _: x.dtype is torch.float32,
            with_autocast,
            lambda product, x: with_autocast(product, x.float()),
        ),
        (
            lambda _, bias: bias is not None,
            plainly,
            lambda product, x: plainly(product, x, torch.ones(WORDS, dtype=x.dtype)),
        ),
    ],
    ids=["strides", "autocast", "dtype", "bias"],
)
def test_pieces_that_gave_the_wholes_bits_are_compared_again_for_another_kind_of_input(
    monkeypatch, is_otherwise, before, after
):
    """Of the same shape; the library that rounds pieces of that kind otherwise is a stand-in."""
    monkeypatch.setattr(format, "PIECE_BYTES", 512 * WIDTH * 2)
    words, own = Model().embed.weight.detach(), F.linear

    def linear(x, weight, bias=None):
        found = own(x, weight, bias)
        return found * 1.01 if len(weight) < WORDS and is_otherwise(x, bias) else found

    monkeypatch.setattr(packed_tables.F, "linear", linear)
    room = torch.empty(format.piece_bytes((WORDS, WIDTH)), dtype=torch.uint8)
    table = packed_tables.PackedTable(
        pack(words), room, unpack=unpack, fused=lambda *_: None, fast=False, whole=words
    )
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    before(table.product, x)
    assert list(table._same.values()) == [True]
    assert same(after(table.product, x), after(lambda x, bias: own(x, words, bias), x))


@torch.no_grad()
def test_an_exact_tied_table_counts_its_original_as_host_memory_and_is_loaded(tmp_path):
    model = Model().eval()
    ids = torch.randint(0, WORDS, (2, 4))
    want = model(ids)
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    handle = place(model, table_plan(model, "exact"))
    assert same(model(ids), want)
    assert handle._builder.host.asked >= model.embed.weight.nbytes
    handle.remove()
    assert same(model(ids), want)
    loaded = load(Model, tmp_path, table_plan(model, "exact"), cache=False)
    assert same(loaded(ids), want)
    loaded.placement.remove()
    assert loaded.head.weight is loaded.embed.weight
