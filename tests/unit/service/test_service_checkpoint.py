"""A mounted model is judged by its config and its file's header, before torch sees it."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service.errors import Exit, ModelUnreadable
from service.inference.checkpoint import (
    IGNORED,
    BertShape,
    Stored,
    check_tensors,
    is_present,
    open_weights,
    parameter_count,
    parameter_shapes,
    read_shape,
    stored_tensors,
)

CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
    "id2label": {"0": "up", "1": "down"},
}
TINY = BertShape(2, 8, 2, 16, 50, 12, 2, 1e-12, ("up", "down"))
FITTING = {name: Stored("F32", shape) for name, shape in parameter_shapes(TINY).items()}
FILE = Path("model.safetensors")


def test_finbert_has_109_484_547_parameters() -> None:
    assert parameter_count(BertShape()) == 109_484_547


def test_parameters_have_hugging_faces_names() -> None:
    shapes = parameter_shapes(BertShape())
    assert len(shapes) == 5 + 12 * 16 + 4
    assert shapes["bert.embeddings.word_embeddings.weight"] == (30522, 768)
    assert shapes["bert.encoder.layer.11.intermediate.dense.weight"] == (3072, 768)
    assert shapes["bert.encoder.layer.0.attention.output.LayerNorm.bias"] == (768,)
    assert shapes["classifier.weight"] == (3, 768)


def write_config(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({key: v for key, v in (CONFIG | changes).items() if v is not None}))
    return path


def test_a_config_gives_sizes_and_labels_in_class_order(tmp_path: Path) -> None:
    path = write_config(tmp_path, id2label={"1": "down", "0": "up"})
    assert read_shape(path) == TINY


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": "768"}, "hidden_size is '768'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is"),
        ({"num_hidden_layers": 1 << 20}, "a whole number from 1 to 1024 is needed"),  # 16 million tensors
        ({"num_attention_heads": 3}, "isn't a multiple"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
        ({"id2label": None}, "id2label is missing"),
        ({"id2label": {"0": "up", "2": "down"}}, "must name the classes 0 to 1"),
        ({"id2label": {"0": "up", "1": 1}}, "must name the classes"),
        ({"id2label": {"0": "up", "1": "up"}}, "names two classes 'up'"),
        ({"id2label": {"0": "up", "1": "\ud800"}}, "of class 1 is no text"),
        ({"id2label": {"0": "up", "1": "x" * 1001}}, "of class 1 has 1001 characters"),
    ],
)
def test_a_config_of_something_else_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelUnreadable, match=said) as caught:
        read_shape(write_config(tmp_path, **changes))
    assert caught.value.exit_code == Exit.DATA


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelUnreadable, match=r"config\.json"):
        read_shape(path)


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], *, spare: int = 0) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end + spare))
    return path


def read_header(path: Path) -> dict[str, Stored]:
    with open_weights(path) as file:
        return stored_tensors(file)


def test_a_header_gives_every_tensors_type_and_shape(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m", {"a": (2, 3), "b": ()})
    assert read_header(path) == {"a": Stored("F32", (2, 3)), "b": Stored("F32", ())}


@pytest.mark.parametrize("spare", [-1, 1])
def test_a_file_of_another_length_than_its_header_says_is_refused(tmp_path: Path, spare: int) -> None:
    with pytest.raises(ModelUnreadable, match=r"it is (cut|followed by other bytes)") as caught:
        read_header(write_safetensors(tmp_path / "m", {"a": (2, 3)}, spare=spare))
    assert "copy or download the file again" in caught.value.hint


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        bytes(8),
        (1 << 63).to_bytes(8, "little") + b"{}",
        framed(b"[]"),
        framed(b"{"),
        framed(b"\xff\xff"),
        framed(b'{"a": 1}'),
        framed(b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}'),
        framed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}'),
        framed(b"[" * 100_000),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelUnreadable, match=r"model\.safetensors"):
        read_header(path)


def test_a_file_that_may_not_be_read_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write_safetensors(tmp_path / "model.safetensors", {})
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelUnreadable, match="Permission denied") as caught:
        read_header(path)
    assert "10001" in caught.value.hint


def test_a_closed_directory_is_an_error_and_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ModelUnreadable, match="Permission denied") as caught:
        is_present(tmp_path)
    assert "chmod" in caught.value.hint


def test_weights_that_fit_pass_with_or_without_the_position_buffer() -> None:
    check_tensors(TINY, FITTING, FILE)
    check_tensors(TINY, FITTING | {name: Stored("I64", (1, 12)) for name in IGNORED}, FILE)


def test_differences_are_named_by_kind() -> None:
    odd = dict(FITTING)
    odd["classifier.weight"] = Stored("F32", (3, 8))
    odd["classifier.bias"] = Stored("I64", (2,))
    odd["lm_head.weight"] = Stored("F32", (1,))
    for number in range(2):
        for kind in ("weight", "bias"):
            for part in ("query", "key"):
                del odd[f"bert.encoder.layer.{number}.attention.self.{part}.{kind}"]
    with pytest.raises(ModelUnreadable) as caught:
        check_tensors(TINY, odd, FILE)
    message = caught.value.message
    assert "8 missing: bert.encoder.layer.0.attention.self.query.weight" in message
    assert "and 4 more" in message
    assert "1 not part of this model: lm_head.weight" in message
    assert "1 of another shape: classifier.weight [3, 8] instead of [2, 8]" in message
    assert "1 of an unsupported type: classifier.bias I64" in message


def test_a_config_with_more_layers_than_the_file_is_refused() -> None:
    with pytest.raises(ModelUnreadable, match="16 missing"):
        check_tensors(replace(TINY, num_hidden_layers=3), FITTING, FILE)


def test_an_absent_or_empty_directory_holds_no_model(tmp_path: Path) -> None:
    assert not is_present(tmp_path)
    assert not is_present(tmp_path / "nowhere")


def test_a_whole_model_is_present(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {})
    assert is_present(tmp_path)


@pytest.mark.parametrize("only", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_part_of_a_model_is_an_error_and_not_a_random_one(tmp_path: Path, only: str) -> None:
    (tmp_path / only).touch()
    with pytest.raises(ModelUnreadable, match=f"has {only} but not") as caught:
        is_present(tmp_path)
    assert "safetensors" in caught.value.hint


def odd(path: Path, kind: str) -> Path:
    """Something at `path` that isn't a file that can be read."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if kind == "loop" else "../../blobs/0123")
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "dangling"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_file_is_not_taken_for_an_absent_model(tmp_path: Path, kind: str, name: str) -> None:
    """Random weights instead of a model whose links lead nowhere would be misleading."""
    odd(tmp_path / name, kind)
    with pytest.raises(ModelUnreadable, match=f"{name} is not a regular file") as caught:
        is_present(tmp_path)
    assert ("leads nowhere" in str(caught.value)) == (kind in ("loop", "dangling"))


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "dangling"])
def test_a_file_that_was_swapped_after_it_was_seen_is_refused_and_not_waited_for(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(ModelUnreadable, match=r"config\.json can't be read"):
        read_shape(odd(tmp_path / "config.json", kind))
    with pytest.raises(ModelUnreadable, match=r"model\.safetensors"):
        read_header(odd(tmp_path / "model.safetensors", kind))


def test_a_pipe_that_comes_between_a_look_and_the_open_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_safetensors(tmp_path / "m", {"a": (2, 3)})

    def swapping(seen: Path) -> None:
        odd(seen, "pipe")

    monkeypatch.setattr("probes.placement.models.headers.require_regular", swapping)
    with pytest.raises(ModelUnreadable, match="fewer than a header's length takes"):
        read_header(path)


def test_a_config_or_a_header_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.inference.checkpoint.MAX_TEXT_BYTES", 1000)
    (tmp_path / "config.json").write_text(" " * 1001)
    with pytest.raises(ModelUnreadable, match="it has more than 1,000 bytes"):
        read_shape(tmp_path / "config.json")
    huge = tmp_path / "model.safetensors"
    with huge.open("wb") as file:
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(100_000_000)
    with pytest.raises(ModelUnreadable, match="its header has 90"):
        read_header(huge)
