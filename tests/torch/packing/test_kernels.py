"""Triton's kernels in its interpreter: the same bits as torch operations, and products as float64 has them.

The interpreter runs the plain text of the kernels. `test_ptx` and tests/device run the PTX.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before anything imports one

import pytest
import torch
from test_round_trip import forced, gaussian, same

from probes.placement.packing import codecs, launch, products, tensors
from probes.placement.packing.format import fused
from probes.placement.packing.packed import B10, Packed
from probes.placement.packing.products import linear
from probes.placement.packing.tensors import pack, unpack
from probes.placement.planner.machine import profile, profile_names, table


@pytest.fixture
def _interpreted(monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda device: True)
    monkeypatch.setattr(codecs, "DENSE_FROM", 0)  # blocks as large as the kernel's

    def never(packed, out):
        raise AssertionError("torch operations unpacked")

    monkeypatch.setattr(tensors, "unpack_by_operations", never)


def odd_weights(*shape: int) -> torch.Tensor:
    """Gaussian weights among which are zeros of both signs, subnormal and large ones."""
    tensor = gaussian(*shape)
    flat = tensor.view(-1)
    flat[::977] = (
        torch.tensor([0.0, -0.0, 1e-30, 30000.0, -2e-39, 1e-5, -7.0])
        .repeat(len(flat[::977]))[: len(flat[::977])]
        .bfloat16()
    )
    return tensor


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    "shape", [(16, 512), (5, 1030), (40, 300), (70_001,), (33, 256), (2, 9000), (7, 11, 13)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_window_kernels_give_the_same_bits(shape, dtype):
    tensor = odd_weights(*shape).to(dtype)
    if dtype is torch.float32:
        tensor += torch.randn(shape, generator=torch.Generator().manual_seed(9)) * 1e-4
    assert same(unpack(forced(tensor)), tensor)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("n", [8192, 8193, 20_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_two_planes_gives_the_same_bits(n, dtype):
    tensor = odd_weights(n).to(dtype)
    assert same(unpack(forced(tensor, B10 if dtype is torch.bfloat16 else None)), tensor)


@pytest.mark.usefixtures("_interpreted")
def test_all_65536_patterns_come_back_from_the_kernels():
    words = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for dtype, layout in ((torch.bfloat16, None), (torch.bfloat16, B10), (torch.float16, None)):
        tensor = words.view(dtype)
        assert same(unpack(forced(tensor, layout)), tensor)


@pytest.mark.parametrize("out", [torch.float32, torch.float16])
def test_conversions_are_left_to_torch_operations(monkeypatch, out):
    monkeypatch.setattr(launch, "usable", lambda device: True)
    tensor = gaussian(64, 512)
    assert torch.equal(unpack(pack(tensor), torch.empty(64, 512, dtype=out)), tensor.to(out))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("shape", [(64, 512), (37, 1152), (6, 1922)])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_float64_rounded(shape, rows, with_bias):
    n, k = shape
    weights = odd_weights(n, k)
    weights[3, 7:27] = 11.0  # more escapes in one row than are handled at once
    x = gaussian(rows, k, seed=4) * 50
    bias = gaussian(n, seed=5) if with_bias else None
    found = linear(x, forced(weights), bias)
    wanted = x.double() @ weights.double().T + (bias.double() if with_bias else 0.0)
    assert found.dtype is torch.bfloat16
    size = x.double().abs() @ weights.double().abs().T  # the interpreter cuts bits off where a GPU rounds
    assert ((found.double() - wanted).abs() <= 2.0**-7 * wanted.abs() + 1e-6 * size).all()


@pytest.mark.usefixtures("_interpreted")
def test_an_escape_is_seen_in_the_product():
    weights = torch.zeros(32, 512, dtype=torch.bfloat16) + 0.5
    weights[9, 300] = 1e30
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    found = linear(x, forced(weights))
    assert found[0, 9] == torch.tensor(1e30).bfloat16()
    assert found[0, 8] == 256


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("rows", [1, 3])
def test_not_a_number_spoils_its_own_row_only(rows):
    weights = gaussian(32, 512)
    weights[9, 300] = float("nan")
    weights[4, 1] = float("inf")
    found = linear(torch.ones(rows, 512, dtype=torch.bfloat16), forced(weights))
    assert found[:, 9].isnan().all()
    assert found[:, 4].isinf().all()
    rest = [i for i in range(32) if i not in (4, 9)]
    assert found[:, rest].isfinite().all()


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("size", [1e-18, 1e15])
def test_inputs_of_any_usual_size_are_multiplied(size):
    weights, x = gaussian(32, 512), (gaussian(1, 512, seed=3) * 50 * size).bfloat16()
    assert relative(linear(x, forced(weights)), x.double() @ weights.double().T) < 6e-3


@pytest.mark.usefixtures("_interpreted")
def test_the_shape_of_the_input_is_kept():
    weights = gaussian(64, 512)
    x = gaussian(2, 3, 512, seed=2)
    found = linear(x.transpose(0, 1), pack(weights))
    assert found.shape == (3, 2, 64)
    assert relative(found, x.transpose(0, 1).double() @ weights.double().T) < 6e-3


@pytest.mark.usefixtures("_interpreted")
def test_what_the_kernels_do_not_do_is_left_to_the_library():
    packed = forced(gaussian(64, 512))
    x = gaussian(1, 512)
    assert linear(x, packed) is not None
    assert linear(x.float(), packed) is None
    assert linear(gaussian(17, 512), packed) is None
    assert linear(gaussian(0, 512), packed) is None
    assert linear(x[:, :256], packed) is None
    assert linear(x, packed, gaussian(64).float()) is None
    assert linear(x.clone().requires_grad_(), packed) is None
    assert linear(x, pack(gaussian(64, 512), dense=True)) is None
    assert linear(gaussian(1, 256), forced(gaussian(64, 256))) is None
    assert linear(gaussian(1, 512), forced(gaussian(2, 32, 512))) is None


def test_without_triton_there_is_no_fused_product_and_unpacking_goes_on():
    tensor = gaussian(64, 512)
    packed = pack(tensor)
    assert not launch.usable(torch.device("cpu"))
    assert linear(gaussian(1, 512), packed) is None
    assert same(unpack(packed), tensor)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("n", [1, 40, 256, 2048, 8192, 151_936])
def test_tiles_are_for_few_input_rows_and_matrices(n, narrow):
    for rows in (1, 2, 16):
        tile = fused(rows, (n, 8192), narrow=narrow)
        assert tile.rows in (2, 4, 8, 16, 32)
        assert tile.columns in (32, 128, 256)
        assert n < 1024 or n // tile.rows >= 64
    assert fused(1, (8192, 8192)).rows == 16  # as measured: decision 25
    assert fused(16, (8192, 8192)).rows == 32
    assert fused(17, (n, 8192)) is None
    assert fused(0, (n, 8192)) is None
    assert fused(1, (n, 8193)) is None
    assert fused(1, (n, 256)) is None


@pytest.mark.parametrize(
    ("version", "name", "major", "usable"),
    [
        (None, "", 9, True),
        (None, "", 8, True),
        (None, "", 7, False),
        ("6.4", "gfx803", 8, False),
        ("6.4", "gfx906:sramecc+:xnack-", 9, False),
        ("6.4", "gfx90a:sramecc+:xnack-", 9, True),
        ("6.4", "gfx942", 9, True),
        ("6.4", "gfx1030", 10, False),
        ("6.4", "gfx1100", 11, True),
        ("6.4", "gfx1151", 11, True),
    ],
)
def test_old_gpus_have_no_kernels(monkeypatch, version, name, major, usable):
    class Properties:
        gcnArchName = name
        warp_size = 32 if name.startswith("gfx1") else 64

    Properties.major = major
    monkeypatch.setattr(torch.version, "hip", version)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    launch.usable.cache_clear()
    assert launch.usable(torch.device("cuda", 0)) is usable
    assert launch.has_narrow_wavefronts(torch.device("cuda", 0)) is name.startswith("gfx1")
    launch.usable.cache_clear()


def test_a_profile_has_triton_where_kernels_run():
    targets = {name: table()["machines"][name]["target"] for name in profile_names()}
    amd = {name: target for name, target in targets.items() if target.startswith("gfx")}
    assert len(amd) > 5
    assert {n: profile(n).triton for n in amd} == {n: bool(launch._AMD.match(t)) for n, t in amd.items()}


def test_ptx_is_for_nvidia_alone(monkeypatch):
    assert not launch._has_ptx(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch._has_ptx(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not launch._has_ptx(torch.device("cuda"))


def test_packed_weights_move_between_devices():
    packed = pack(gaussian(64, 512))
    assert isinstance(packed.to("cpu"), Packed)
    assert products.linear(gaussian(1, 512), packed.to("cpu")) is None
