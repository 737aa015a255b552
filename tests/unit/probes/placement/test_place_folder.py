"""`weir probe place FOLDER`: what is refused before torch is imported, each with its exit code."""

import json
import os
import struct
import sys

import pytest

from probes.cli import program
from probes.core.errors import Exit

CONFIG = {"model_type": "bert", "architectures": ["BertModel"]}


def stored(dtype="F32", n_bytes=16, claimed=16):
    header = json.dumps({"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, claimed]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(n_bytes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(stored())
    return tmp_path


def refused(capsys, folder, *more):
    code = program.main(["place", str(folder), "--vram", "1GiB", *more])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return code, said


def test_a_folder_without_a_config_is_a_usage_error(folder, capsys):
    (folder / "config.json").unlink()
    code, said = refused(capsys, folder)
    assert code == Exit.USAGE
    assert "has no config.json" in said


def test_a_folder_without_safetensors_is_unreadable(folder, capsys):
    (folder / "model.safetensors").unlink()
    code, said = refused(capsys, folder)
    assert code == Exit.DATA
    assert "has no file *.safetensors" in said


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_a_folder_with_pickles_alone_says_so_and_how_to_convert_them(folder, name, capsys):
    (folder / "model.safetensors").rename(folder / name)
    code, said = refused(capsys, folder)
    assert code == Exit.DATA
    assert f"its weights are pickles ({name})" in said
    assert "save_pretrained" in said


@pytest.mark.parametrize(("n_bytes", "claimed"), [(8, 16), (24, 16), (16, 12)])
def test_a_header_that_contradicts_its_file_is_unreadable(folder, n_bytes, claimed, capsys):
    (folder / "model.safetensors").write_bytes(stored(n_bytes=n_bytes, claimed=claimed))
    code, said = refused(capsys, folder)
    assert code == Exit.DATA
    assert "model.safetensors" in said


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_is_refused_and_not_waited_for(folder, name, capsys):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    code, said = refused(capsys, folder)
    assert code == Exit.DATA
    assert "it is not a regular file" in said


@pytest.mark.parametrize("what", ["model.safetensors", "config.json", "gpt-5"])
def test_what_is_neither_a_folder_nor_a_known_name_is_a_usage_error(folder, what, capsys):
    code, said = refused(capsys, folder / what)
    assert code == Exit.USAGE
    assert "is neither a known model nor a folder" in said
    assert "known are mlp" in said


@pytest.mark.parametrize("text", ["{", "[]", "nonsense"])
def test_a_config_that_is_no_object_is_unreadable(folder, text, capsys):
    (folder / "config.json").write_text(text)
    assert refused(capsys, folder)[0] == Exit.DATA


def test_quantised_weights_are_refused(folder, capsys):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"bits": 4}}))
    code, said = refused(capsys, folder)
    assert code == Exit.USAGE
    assert "quantised" in said


def test_host_memory_is_limited_for_a_checkpoint_only(capsys):
    code, said = refused(capsys, "mlp", "--host", "1GiB")
    assert code == Exit.USAGE
    assert "--host limits a checkpoint" in said


def test_a_good_folder_without_torch_says_what_is_missing(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "probes.measure.placement_benchmark", raising=False)
    code, said = refused(capsys, folder)
    assert code == Exit.DEVICE
    assert "torch can't be imported" in said
    assert f"plan {folder}" in said
