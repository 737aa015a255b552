"""Every bit pattern comes back from packing, on any shape."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.core.codec import decode, encode
from probes.placement.packing import codecs, tensors
from probes.placement.packing.format import PackedForm, estimate
from probes.placement.packing.packed import (
    B10,
    B12,
    BF16,
    F28,
    H13,
    H13F32,
    LAYOUTS,
    Packed,
    form,
    packed_in,
    write_into,
)
from probes.placement.packing.tensors import pack, unpack, unpack_by_operations

WORD = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
DTYPES = tuple(WORD)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(WORD[tensor.dtype])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def bits_per_weight(packed: Packed) -> float:
    """Escapes and padding counted in, without alignment."""
    return 8 * packed.packed_bytes / packed.n_weights


def gaussian(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def forced(tensor: torch.Tensor, layout=None) -> Packed:
    """Packed even where it isn't worth it."""
    layout = layout or {torch.bfloat16: B12, torch.float16: H13, torch.float32: F28}[tensor.dtype]
    packed = pack(tensor, layout=layout)
    assert packed
    return packed


@pytest.mark.parametrize("layout", [B12, B10, H13], ids=lambda layout: layout.name)
def test_all_65536_patterns_come_back_though_nothing_is_saved(layout):
    words = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for order in (
        words,
        words.flip(0),
        words[torch.randperm(65536, generator=torch.Generator().manual_seed(1))],
    ):
        tensor = order.view(layout.dtype)
        assert pack(tensor) is None
        assert same(unpack(forced(tensor, layout)), tensor)
        assert same(unpack(forced(tensor.view(16, 4096), layout)), tensor.view(16, 4096))


@pytest.mark.parametrize("layout", [B12, B10, H13], ids=lambda layout: layout.name)
def test_all_65536_patterns_come_back_among_weights_that_pack(layout):
    odd = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(layout.dtype)
    around = gaussian(1 << 19, dtype=layout.dtype)
    tensor = torch.cat((around, odd, around))
    packed = pack(tensor, dense=layout is B10)
    assert packed is not None
    assert packed.layout is layout
    assert same(unpack(packed), tensor)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("escapes", [0.0, 0.002, 0.1])
def test_codes_and_escapes_are_what_the_layout_says(escapes, dense):
    """They are found by calculating with bytes, 8 at once where escapes are few; this says it one by one."""
    tensor = gaussian(65, 1024)
    drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(5))
    tensor[drawn < escapes] = 1e20
    tensor[drawn > 0.97] = -0.0
    found = pack(tensor, dense=dense)
    assert found
    words = [int(word) & 0xFFFF for word in bits(tensor)]
    fields = [word >> 7 & 255 for word in words]
    if dense:
        first, after = found.table[:3], found.table[3:]
        assert [first, after] == [tuple(sorted(first)), tuple(sorted(after))]
        assert found.parts["exponents"].tolist() == [field for field in fields if field not in found.table]
        starts = found.parts["starts"].view(2, -1).tolist()
        block = tensor.numel() // (len(starts[0]) - 1)
        stream = sum((word & 0xFFFF) << (16 * at) for at, word in enumerate(found.parts["stream"].tolist()))
        for number, at in enumerate(range(0, len(fields), block)):
            escaped = [field for field in fields[at : at + block] if field not in first]
            codes = [stream >> 3 * (16 * starts[0][number] + rank) & 7 for rank in range(len(escaped))]
            listed = [rank for rank, field in enumerate(escaped) if field not in after]
            assert starts[1][number + 1] - starts[1][number] == len(listed)
            assert [after[c] for r, c in enumerate(codes) if r not in listed] == [
                f for f in escaped if f in after
            ]
        assert found.parts["rest"].tolist() == [word >> 8 & 128 | word & 127 for word in words]
        return
    coded = [found.base < field <= found.base + 15 for field in fields]
    listed = [i for i, word in enumerate(words) if not coded[i] and word << 1 & 0xFFFF]
    assert found.parts["positions"].tolist() == [i % 1024 for i in listed]
    assert [value & 0xFFFF for value in found.parts["values"].tolist()] == [words[i] for i in listed]
    rest = [word >> 8 & 128 | word & 127 for word in words]
    for i in listed:
        rest[i] = 0
    assert found.parts["rest0"].tolist() == rest
    codes = torch.tensor([f - found.base if c else 0 for f, c in zip(fields, coded, strict=True)])
    pair = codes.view(65, 2, 512)
    assert torch.equal(found.parts["codes"].long(), (pair[:, 0] | pair[:, 1] << 4).view(-1))


@pytest.mark.parametrize("dense", [False, True])
def test_an_outline_is_found_without_the_bytes(dense):
    values, put = tensors.Values.of(gaussian(300, 1024)), []
    whole = tensors.pack_into(lambda start, piece: put.append((start, piece)), values, dense=dense)
    alone = tensors.pack_into(None, values, dense=dense)
    assert whole
    assert alone
    assert put
    assert form(alone) == form(whole)
    assert torch.equal(alone.parts["starts"], whole.parts["starts"])


def test_float32_of_every_exponent_and_random_bits_come_back():
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31, (70_001,), generator=generator, dtype=torch.int64).to(torch.int32)
    words[:512] = (torch.arange(512) << 23).to(torch.int32)
    words[512:516] = torch.tensor([0x7FC00001, 0x7F800001, -1, 1], dtype=torch.int32)
    tensor = words.view(torch.float32)
    assert pack(tensor) is None
    assert same(unpack(forced(tensor)), tensor)
    among = torch.cat((gaussian(3_000_000, dtype=torch.float32), tensor))
    assert same(unpack(pack(among)), among)


SHAPES = [
    (4096,),
    (70_001,),
    (1, 8193),
    (33, 515),
    (7, 9, 11, 13),
    (64, 64),
    (300, 258),
    (3, 5, 256),
    (5, 70_000),
    (128, 128, 3, 3),
    (16_385,),
    (131_071,),
    (131_073,),
    (257, 257),
    (2, 65_536),
    (4, 0, 3),
    (),
    (1,),
    (7,),
    (100, 1000, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_comes_back(shape, dtype):
    tensor = gaussian(*shape, dtype=dtype)
    packed = pack(tensor)
    if tensor.numel() >= 16_384:
        assert packed is not None
        assert bits_per_weight(packed) < 8 * dtype.itemsize * 0.95
    if packed is not None:
        assert same(unpack(packed), tensor)
    if tensor.numel():
        assert same(unpack(forced(tensor)), tensor)
        for layout in LAYOUTS.values():
            if layout.dtype is layout.via is dtype and layout is not BF16:  # which packs nothing
                assert same(unpack(forced(tensor, layout)), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_that_are_no_block_of_memory_come_back(dtype):
    whole = gaussian(300, 600, dtype=dtype)
    for tensor in (whole.T, whole[::2, 1::3], whole[3:, 5:], whole.expand(2, 300, 600), whole.T[1:]):
        assert same(unpack(pack(tensor)), tensor)
    out = torch.empty(600, 300, dtype=dtype).T
    assert unpack(pack(whole), out) is out
    assert same(out, whole)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_mixture_of_exponents_comes_back(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    n = data.draw(st.integers(1, 20_000))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    width = 8 * dtype.itemsize
    random = torch.randint(
        -(2 ** (width - 1)), 2 ** (width - 1), (n,), generator=generator, dtype=torch.int64
    )
    words = torch.where(
        torch.rand(n, generator=generator) < data.draw(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0])),
        random.to(WORD[dtype]),
        bits(torch.randn(n, generator=generator).mul(10.0 ** data.draw(st.integers(-44, 38))).to(dtype)),
    )
    words[torch.rand(n, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 0.99]))] = 0
    tensor = words.view(dtype)
    packed = pack(tensor, dense=data.draw(st.booleans()))
    if packed is not None:
        assert same(unpack(packed), tensor)
        assert form(packed).n_bytes < 0.97 * tensor.nbytes
    assert same(unpack(forced(tensor)), tensor)


@pytest.mark.parametrize(("narrow", "layout"), [(torch.bfloat16, "b12f32"), (torch.float16, "h13f32")])
def test_float32_weights_that_were_16_bits_wide_take_half(narrow, layout):
    tensor = gaussian(512, 512, dtype=narrow)
    tensor[0, :4] = torch.tensor([0.0, -0.0, math.inf, -math.inf], dtype=narrow)
    packed = pack(tensor.float())
    assert packed.layout.name == layout
    assert bits_per_weight(packed) < 14.4
    assert same(unpack(packed), tensor.float())


def test_one_weight_that_was_not_16_bits_wide_keeps_the_others_whole():
    tensor = gaussian(512, 512, dtype=torch.float16).float()
    tensor[511, 511] += 1e-7
    assert pack(tensor).layout is F28
    assert same(unpack(pack(tensor)), tensor)


def test_nan_of_a_float16_once_is_kept_to_the_bit():
    tensor = gaussian(512, 512, dtype=torch.float16).float()
    tensor.view(torch.int32)[3, 3] = 0x7FC02000
    assert same(unpack(pack(tensor)), tensor)


@pytest.mark.parametrize("nan", [0x7FC00000, 0x7FC02000, -0x400000])
def test_nan_is_never_kept_as_half(nan):
    """Its bits depend on who converts it: a GPU may give others than the CPU on which it was packed."""
    tensor = gaussian(512, 512, dtype=torch.float16).float()
    assert pack(tensor).layout is H13F32
    tensor.view(torch.int32)[511, 511] = nan
    assert same(tensor.half().float(), tensor)  # by this CPU it comes back
    assert pack(tensor).layout is F28


def test_gaussian_weights_take_the_bits_they_should():
    for dtype, dense, most in (
        (torch.bfloat16, False, 12.1),
        (torch.bfloat16, True, 10.9),
        (torch.float16, False, 13.9),
        (torch.float32, False, 28.1),
    ):
        assert bits_per_weight(pack(gaussian(1024, 1024, dtype=dtype), dense=dense)) <= most


def test_zeros_take_a_code_and_no_escape():
    tensor = gaussian(512, 512)
    tensor[torch.rand(512, 512, generator=torch.Generator().manual_seed(5)) < 0.3] = -0.0
    packed = pack(tensor)
    assert bits_per_weight(packed) < 12.1
    assert same(unpack(packed), tensor)


def test_a_sample_that_misleads_costs_no_tensor_its_packing():
    tensor = gaussian(1 << 22)
    sampled = tensor.view(torch.int16)[:: (tensor.numel() // tensors._SAMPLE) | 1]
    sampled[:] = (torch.arange(sampled.numel(), dtype=torch.int32) % 30_000).to(torch.int16)
    assert pack(tensor) is None  # a fifth of all weights is as odd as the sample
    monkeyed = gaussian(1 << 16)
    monkeyed.view(torch.int16)[::65] = (torch.arange(1009, dtype=torch.int32) * 30).to(torch.int16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_SAMPLE", 1009)  # the sample is every 65th weight
        packed = pack(monkeyed)
    assert packed is not None
    assert same(unpack(packed), monkeyed)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.float64, torch.bool])
def test_dtypes_without_a_layout_stay_as_they_are(dtype):
    assert pack(torch.zeros(64, 4096).to(dtype)) is None


def test_subclasses_and_meta_tensors_stay_as_they_are():
    class Quantised(torch.Tensor):
        pass

    assert pack(gaussian(64, 4096).as_subclass(Quantised)) is None
    assert pack(gaussian(64, 4096).to("meta")) is None
    assert pack(torch.nn.Parameter(gaussian(64, 4096))) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flat_buffer_and_json_hold_all_there_is(dtype):
    tensor = gaussian(300, 515, dtype=dtype)
    packed = pack(tensor)
    of = decode(PackedForm, json.loads(json.dumps(encode(form(packed)))))
    assert of == form(packed)
    assert of.n_bytes % 256 == 0
    flat = torch.full((of.n_bytes + 100,), 171, dtype=torch.uint8)
    write_into(packed, flat)
    assert (flat[of.n_bytes :] == 171).all()
    again = torch.zeros(of.n_bytes, dtype=torch.uint8)
    write_into(packed, again)
    assert torch.equal(again, flat[: of.n_bytes])
    view = packed_in(of, flat)
    assert all(part.untyped_storage().data_ptr() == flat.data_ptr() for part in view.parts.values())
    assert same(unpack(view), tensor)


def test_a_buffer_that_is_too_short_or_a_layout_that_is_unknown_is_refused():
    packed = pack(gaussian(300, 515))
    of = form(packed)
    with pytest.raises(ValueError, match="needs a flat uint8 buffer"):
        packed_in(of, torch.zeros(of.n_bytes - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="needs a flat uint8 buffer"):
        write_into(packed, torch.zeros(of.n_bytes, dtype=torch.int8))
    with pytest.raises(ValueError, match="no layout 'b99'"):
        packed_in(PackedForm("b99", of.shape, 0, (), of.parts), torch.zeros(of.n_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
def test_values_are_converted_for_a_gpu_without_bfloat16_units(wide):
    tensor = gaussian(300, 515)
    tensor[0, :3] = torch.tensor([0.0, 1e-30, 3.0])
    out = unpack(pack(tensor), torch.empty(300, 515, dtype=wide))
    assert torch.equal(out, tensor.to(wide))


def test_unpacking_into_another_shape_is_refused():
    with pytest.raises(ValueError, match="can't be unpacked"):
        unpack(pack(gaussian(64, 512)), torch.empty(512, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_large_tensors_are_handled_in_pieces(monkeypatch, dtype, dense):
    tensor = gaussian(64, 1024, dtype=dtype)
    tensor[::7, ::5] = 1e-4
    whole = pack(tensor, dense=dense)
    monkeypatch.setattr(codecs, "CPU_CHUNK", 5000)
    pieces = pack(tensor, dense=dense)
    assert form(pieces) == form(whole)
    assert all(torch.equal(pieces.parts[name], part) for name, part in whole.parts.items())
    out = torch.empty_like(tensor)
    unpack_by_operations(whole, out)
    assert same(out, tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1024, 10_000, 4_000_000])
def test_the_estimate_is_within_one_percent(dtype, n):
    packed = pack(gaussian(n, dtype=dtype))
    taken = form(packed).n_bytes if packed else n * dtype.itemsize
    predicted = estimate(str(dtype).removeprefix("torch."), n)
    assert abs(predicted - taken) <= max(0.01 * taken, 512)


def test_the_estimate_of_dense_bfloat16_is_within_one_percent():
    taken = form(pack(gaussian(4_000_000), dense=True)).n_bytes
    assert abs(estimate("bfloat16", 4_000_000, dense=True) - taken) <= 0.01 * taken
    assert estimate("int8", 1000) == 1000
    with pytest.raises(KeyError):
        estimate("float99", 1000)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("octave", [i / 6 for i in range(6)])
@pytest.mark.parametrize(
    ("dtype", "dense"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False), (torch.float32, False)],
    ids=str,
)
def test_gaussian_weights_of_any_width_take_no_more_than_estimated(dtype, dense, octave):
    """A plan for weights of 0.05 took 16 MiB more than it counted: they fill the exponents otherwise."""
    weights = torch.randn(1 << 21, generator=torch.Generator().manual_seed(3)) * (0.0175 * 2**octave)
    taken = form(pack(weights.to(dtype), dense=dense)).n_bytes
    estimated = estimate(str(dtype).removeprefix("torch."), 1 << 21, dense=dense)
    assert 0.985 * estimated <= taken <= estimated


def test_packing_keeps_the_bits_of_a_negative_view():
    tensor = torch.complex(gaussian(64, 512).float(), gaussian(64, 512, seed=2).float()).conj().imag
    assert tensor.is_neg()
    assert same(unpack(pack(tensor)), tensor.resolve_neg())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norms_weights_stay_as_they_are_because_each_pass_would_pay_a_kernel_for_256_bytes(dtype):
    name = str(dtype).removeprefix("torch.")
    assert pack(gaussian(2048, dtype=dtype)) is None
    assert estimate(name, 2048) == 2048 * dtype.itemsize
    assert pack(gaussian(256 * 256, dtype=dtype)) is not None
    assert estimate(name, 256 * 256) < 256 * 256 * dtype.itemsize


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(333, 300), (40, 30, 64), (100_096,)])
def test_parts_of_a_packed_tensor_give_the_bits_of_the_whole(shape, dtype, dense):
    weights = gaussian(*shape, dtype=dtype)
    weights.view(-1)[::97] *= 1e4  # escapes
    packed = pack(weights, dense=dense)
    most = form(packed).n_bytes // 3
    parts = packed.cut(most)
    assert len(parts) > 2
    found = torch.zeros_like(weights).view(-1)
    for first, part in parts:
        flat = torch.zeros(form(part).n_bytes, dtype=torch.uint8)
        assert flat.numel() <= most
        write_into(part, flat)
        there = packed_in(form(part), flat)
        unpack(there, found[first : first + part.n_weights].view(part.shape))
    assert same(found.view(shape), weights)


def test_a_tensor_whose_last_row_is_filled_up_stays_whole():
    packed = pack(gaussian(40_001))
    assert packed.cut(1000) == [(0, packed)]


def test_escapes_are_collected_in_time_that_grows_with_their_number():
    """A tensor of very many escapes took the square: what there was was copied for each piece."""
    grown, rooms, pieces = (
        codecs.Grown(torch.int64, torch.device("cpu")),
        set(),
        torch.arange(3000).split(3),
    )
    for piece in pieces:
        grown.append(piece)
        rooms.add((grown._room.data_ptr(), grown._room.numel()))
    assert torch.equal(grown.whole(), torch.arange(3000))
    assert len(rooms) < 15


def test_a_tensor_with_many_escapes_in_many_pieces_comes_back():
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(3000, 1024, generator=generator) * 0.02
    weights[torch.rand(weights.shape, generator=generator) < 0.1] *= 1e-9
    weights = weights.bfloat16()
    for dense in (False, True):
        packed = pack(weights, dense=dense)
        assert packed is not None
        assert torch.equal(unpack(packed).view(torch.int16), weights.view(torch.int16))
