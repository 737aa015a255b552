"""Headers of safetensors files: what they hold is read, what they lie about is an error that names it."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.core.errors import CheckpointUnreadable
from probes.placement.models import headers

TWO = {
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "__metadata__": {"format": "pt"},
}


def written(path: Path, header: Any, data: int = 20, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


def test_tensors_come_in_the_order_of_their_data_with_places_in_the_file(tmp_path: Path) -> None:
    stored = headers.read_header(written(tmp_path / "m.safetensors", TWO))
    begin = stored.n_bytes - 20
    assert [(t.name, t.dtype, t.shape, t.offset - begin, t.n_bytes) for t in stored.tensors] == [
        ("a", "F32", (2,), 0, 8),
        ("b", "BF16", (2, 3), 8, 12),
    ]


def changed(**fields: Any) -> dict[str, Any]:
    return {**TWO, "b": {**TWO["b"], **fields}}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (TWO, 19, "it is cut"),
        (TWO, 21, "followed by other bytes"),
        (changed(data_offsets=[4, 16]), 16, "overlaps"),
        (changed(data_offsets=[9, 21]), 21, "gap"),
        (changed(data_offsets=[8, 2**62]), 20, "by its offsets"),
        (changed(data_offsets=[20, 8]), 20, "data_offsets"),
        (changed(data_offsets=[-8, 4]), 20, "data_offsets"),
        (changed(data_offsets=[8.0, 20.0]), 20, "data_offsets"),
        (changed(shape=[2, -3]), 20, "shape"),
        (changed(shape=[True, 6]), 20, "shape"),
        (changed(shape=[2, 10**40]), 20, "shape"),
        (changed(shape=[1] * 65), 20, "shape"),
        (changed(shape="23"), 20, "shape"),
        (changed(dtype="INT7"), 20, "'INT7'"),
        (changed(dtype="F4", shape=[3]), 20, "12 bits by its shape, which aren't whole bytes"),
        (changed(dtype="F4", shape=[2**40]), 20, "takes 549,755,813,888 bytes by its shape and 12"),
        (changed(dtype=None), 20, "dtype"),
        ({**TWO, "b": 7}, 20, "not described by an object"),
        ([], 0, "not a JSON object"),
        (b'{"a": 1, "a": 1}', 0, "'a' twice"),
        (b'{"b":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0, "'dtype' twice"),
        (b"[" * 100_000, 0, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", 0, "not described by an object"),
        (b'{"a": NaN}', 0, "not JSON"),
        (b'{"\xff": 1}', 0, "not JSON"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, header: Any, data: int, said: str
) -> None:
    with pytest.raises(CheckpointUnreadable, match="can't read") as caught:
        headers.read_header(written(tmp_path / "m.safetensors", header, data))
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("length", "said"),
    [(2**64 - 1, "it is cut"), (10**8, "it is cut"), (3, "not JSON")],
)
def test_a_length_that_lies_is_refused_before_anything_of_it_is_read(
    tmp_path: Path, length: int, said: str
) -> None:
    with pytest.raises(CheckpointUnreadable) as caught:
        headers.read_header(written(tmp_path / "m.safetensors", TWO, length=length))
    assert said in caught.value.message


def test_a_header_of_100_MB_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 10**8))
    with path.open("r+b") as file:
        file.truncate(10**8 + 8)  # a hole: takes no disk
    with pytest.raises(CheckpointUnreadable, match="more than the"):
        headers.read_header(path)


@pytest.mark.thorough
def test_a_header_of_endless_small_values_is_refused_before_memory_is_taken_for_them(tmp_path: Path) -> None:
    header = b'{"a":[' + b",".join([b"{}"] * 3_000_000) + b"]}"  # 9 MB of text, 200 MB once parsed
    with pytest.raises(CheckpointUnreadable, match="more than 5,000,000 values"):
        headers.read_header(written(tmp_path / "m.safetensors", header, 0))


@pytest.mark.parametrize("content", [b"", b"\x01\x02"])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointUnreadable, match="fewer than"):
        headers.read_header(tmp_path / "m.safetensors")


@given(cut=st.integers(0, 10**6), flip=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_cut_or_flipped_bit_is_read_or_refused_and_never_anything_else(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("spoilt") / "m.safetensors"
    whole = bytearray(written(path, TWO).read_bytes())
    whole[flip % len(whole)] ^= 1 << bit
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    with suppress(CheckpointUnreadable):
        headers.read_header(path)


def indexed(folder: Path, places: Any) -> Path:
    written(folder / "one.safetensors", {"a": TWO["a"]}, 8)
    written(folder / "two.safetensors", {"b": {**TWO["b"], "data_offsets": [0, 12]}}, 12)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


@pytest.mark.parametrize("whole", [False, True])
def test_an_index_gathers_the_tensors_of_its_files(tmp_path: Path, whole: bool) -> None:
    index = indexed(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    stored = headers.read_checkpoint(tmp_path if whole else index)
    assert [(s.path.name, [t.name for t in s.tensors]) for s in stored] == [
        ("one.safetensors", ["a"]),
        ("two.safetensors", ["b"]),
    ]


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"a": "../one.safetensors"}, "not a file beside it"),
        ({"a": "/etc/passwd"}, "not a file beside it"),
        ({"a": 3}, "not a file beside it"),
        ({"b": "one.safetensors"}, "and it doesn't"),
        ({"a": "three.safetensors"}, "No such file"),
        ({}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, places: Any, said: str) -> None:
    with pytest.raises(CheckpointUnreadable) as caught:
        headers.read_checkpoint(indexed(tmp_path, places))
    assert said in caught.value.message


def test_two_files_with_one_tensor_are_refused_and_an_empty_folder_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="has no file"):
        headers.read_checkpoint(tmp_path)
    for name in ("x", "y"):
        written(tmp_path / f"{name}.safetensors", TWO)
    with pytest.raises(CheckpointUnreadable, match="'a' too"):
        headers.read_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["a\0.safetensors", "\x1b[2J.safetensors", "\ud800.safetensors"])
def test_an_index_that_names_an_impossible_file_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(CheckpointUnreadable, match="not a file beside it"):
        headers.read_checkpoint(indexed(tmp_path, {"a": place}))


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_numbers_of_six_bits_are_counted(tmp_path: Path, dtype: str) -> None:
    header = {"a": {"dtype": dtype, "shape": [4, 4], "data_offsets": [0, 12]}}
    (tensor,) = headers.read_header(written(tmp_path / "m.safetensors", header, 12)).tensors
    assert (tensor.dtype, tensor.n_bytes) == (dtype, 12)


def test_an_unknown_dtype_is_no_reason_to_copy_the_file_again(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable) as failed:
        headers.read_header(written(tmp_path / "m.safetensors", changed(dtype="INT7")))
    assert "config.json" in str(failed.value.hint)


def test_a_shape_beyond_every_float_is_refused(tmp_path: Path) -> None:
    """It was a traceback: its bytes were divided as a float."""
    huge = {"a": {"dtype": "F32", "shape": [2**62] * 64, "data_offsets": [0, 8]}}
    with pytest.raises(
        CheckpointUnreadable, match=r"more than 2\^63 bytes by its shape and 8 by its offsets"
    ):
        headers.read_header(written(tmp_path / "m.safetensors", huge, 8))
