"""Descriptions from names, configs and safetensors files, and what is refused with a way out."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from probes.core.errors import CheckpointUnreadable, ModelUnknown, UsageError
from probes.placement.models.description import ModelDescription
from probes.placement.models.reading import describe, known_configs

BERT = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
    "torch_dtype": "bfloat16",
}


def config(folder: Path, values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


def weights(
    path: Path, model: ModelDescription, *, dtype: str = "BF16", more: dict[str, list[int]] | None = None
) -> str:
    """A safetensors file with a model's tensors, all zeros, in the order of their names."""
    shapes = {t.name: list(t.shape) for block in model.blocks for t in block.tensors} | (more or {})
    header, at = {}, 0
    for name in sorted(shapes):
        size = 2
        for length in shapes[name]:
            size *= length
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return str(path)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-3b", 3.086),
        ("qwen2.5-7b", 7.616),
        ("Qwen2.5-14B", 14.770),  # names are found whatever their case
        ("qwen2.5-32b", 32.764),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("mixtral-8x7b", 46.703),
        ("gpt2-xl", 1.558),
        ("bert-base", 0.109),
    ],
)
def test_known_models_have_their_published_size(name: str, billions: float) -> None:
    numbers = sum(tensor.numbers for block in describe(name).blocks for tensor in block.tensors)
    assert numbers / 1e9 == pytest.approx(billions, abs=6e-4)


def test_every_known_model_is_described_with_names_of_its_own() -> None:
    for name in known_configs():
        model = describe(name)
        blocks = [block.name for block in model.blocks]
        assert len(set(blocks)) == len(blocks)
        tensors = [tensor.name for block in model.blocks for tensor in block.tensors]
        assert len(set(tensors)) == len(tensors)


def test_tied_embeddings_are_one_block_that_is_fetched_twice() -> None:
    first = describe("qwen2.5-3b").blocks[0]
    assert first.name == "model.embed_tokens.weight"
    assert first.fetches == 2
    assert first.tensors[0].products == 151936 * 2048


def test_of_a_mixture_each_row_needs_the_chosen_experts_alone() -> None:
    layer = describe("mixtral-8x7b").blocks[1]
    experts = [tensor for tensor in layer.tensors if "experts" in tensor.name]
    assert [tensor.active for tensor in experts] == [0.25, 0.25]


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_more_chosen_experts_than_there_are_is_refused(kind: str, tmp_path: Path) -> None:
    """The share of weights that a row needs was above 1, and a power of what is left a traceback."""
    values = {**known_configs()["qwen2.5-3b"], "model_type": kind, "num_experts": 8, "num_local_experts": 8}
    with pytest.raises(CheckpointUnreadable, match="num_experts_per_tok is 9, and there are 8 experts"):
        describe(config(tmp_path, {**values, "num_experts_per_tok": 9}))
    one = {**values, "num_experts": 1, "num_local_experts": 1}
    assert describe(config(tmp_path, one)).blocks  # without the key, both of two are chosen, or the only one


def test_a_folder_with_files_and_config_is_described_by_both(tmp_path: Path) -> None:
    config(tmp_path, LLAMA)
    weights(tmp_path / "model.safetensors", describe(str(tmp_path)), dtype="F16")
    both = describe(str(tmp_path))
    assert both.source == "safetensors headers and its config.json"
    assert {tensor.dtype for block in both.blocks for tensor in block.tensors} == {"float16"}
    assert both.blocks[1].attention is not None
    assert both.blocks[0].tensors[0].use == "lookup"


def test_files_that_differ_from_the_config_are_described_by_their_names(tmp_path: Path) -> None:
    config(tmp_path, LLAMA)
    weights(tmp_path / "model.safetensors", describe(str(tmp_path)), more={"model.adapter.weight": [4, 4]})
    alone = describe(str(tmp_path))
    assert alone.source == "safetensors headers"
    assert [block.name for block in alone.blocks] == [
        "model.embed_tokens",
        "model.adapter",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    assert "guessed" in alone.notes[0]


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    config(tmp_path, {**LLAMA, "num_hidden_layers": 12})
    model = describe(str(tmp_path))
    (tmp_path / "config.json").unlink()
    found = describe(weights(tmp_path / "m.safetensors", model))
    assert [b.name for b in found.blocks if "layers" in b.name] == [f"model.layers.{i}" for i in range(12)]


def test_a_table_without_a_head_is_the_output_too(tmp_path: Path) -> None:
    config(tmp_path, {**LLAMA, "tie_word_embeddings": True})
    model = describe(str(tmp_path))
    (tmp_path / "config.json").unlink()
    found = describe(weights(tmp_path / "m.safetensors", model))
    assert found.blocks[0].name == "model.embed_tokens.weight"
    assert found.blocks[0].looked_up
    assert "taken for the output" in found.notes[1]


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({**LLAMA, "model_type": "abacus"}, ModelUnknown, "'abacus' has no rule"),
        ({}, ModelUnknown, "has no rule"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, ModelUnknown, "quantised"),
        ({**LLAMA, "hidden_size": -1}, CheckpointUnreadable, "hidden_size is '-1'"),
        ({**LLAMA, "hidden_size": "8"}, CheckpointUnreadable, "hidden_size"),
        ({**LLAMA, "hidden_size": True}, CheckpointUnreadable, "hidden_size"),
        ({**LLAMA, "vocab_size": 10**30}, CheckpointUnreadable, "vocab_size"),
        ({**LLAMA, "num_hidden_layers": 10**9}, CheckpointUnreadable, "layers"),
        ({**LLAMA, "torch_dtype": "int7"}, CheckpointUnreadable, "'int7'"),
        (
            {key: value for key, value in LLAMA.items() if key != "vocab_size"},
            CheckpointUnreadable,
            "vocab_size",
        ),
        ([LLAMA], CheckpointUnreadable, "not a JSON object"),
    ],
)
def test_a_config_that_says_nothing_usable_is_refused(
    values: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        describe(config(tmp_path, values))
    assert said in str(caught.value)


def test_an_unknown_architecture_says_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(ModelUnknown) as caught:
        describe(config(tmp_path, {"model_type": "abacus"}))
    assert "safetensors" in caught.value.hint


def test_a_name_that_is_neither_known_nor_a_file_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"qwen2\.5-3b"):
        describe("qwen9")


def test_a_config_without_a_dtype_says_what_was_assumed(tmp_path: Path) -> None:
    model = describe(config(tmp_path, BERT))
    assert model.notes == ("the config names no dtype: float32",)
    assert model.blocks[0].tensors[0].dtype == "float32"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("torch_dtype", 5, "torch_dtype is '5', not a text"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no', not true or false"),
        ("model_type", ["llama"], "not a text"),
    ],
)
def test_a_value_of_another_kind_is_refused_and_not_guessed(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    with pytest.raises(CheckpointUnreadable, match=said) as refused:
        describe(config(tmp_path, {**LLAMA, field: value}))
    assert refused.value.hint, "what to do about it"


@pytest.mark.parametrize("text", ['{"model_type": "llama", "hidden_size": NaN}', '{"a": 1, "a": 2}'])
def test_a_config_that_only_python_takes_for_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointUnreadable, match="is not JSON") as refused:
        describe(str(path))
    assert refused.value.hint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str, whole: bool) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointUnreadable, match="not a regular file"):
        describe(str(tmp_path if whole else tmp_path / name))


def test_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointUnreadable, match="not a regular file"):
        describe(str(tmp_path))
