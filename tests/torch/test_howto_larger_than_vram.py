"""The Python of the how-to page runs as it is printed, on the CPU."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "larger-than-vram.md"
MODEL = """
import torch
from torch import nn


def build():
    made = nn.Sequential(nn.Embedding(100, 64), *(nn.Linear(64, 64) for _ in range(6)))
    return made.eval().requires_grad_(False)


prompt = torch.arange(16)[None]
"""


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIR_STATE", str(tmp_path / "state"))
    (tmp_path / "mymodel.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    import mymodel

    (tmp_path / "checkpoint").mkdir()
    model = mymodel.build()
    save_file(dict(model.state_dict()), tmp_path / "checkpoint" / "model.safetensors")
    yield model
    del sys.modules["mymodel"]


def test_the_examples_run_and_compute_the_same(example, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    known: dict[str, object] = {}
    for block in blocks:
        exec(block, known)
    assert "VRAM" in capsys.readouterr().out
    with torch.inference_mode():
        assert torch.equal(known["wide"], known["half"].float()(known["prompt"]))
        want = known["module"](known["prompt"])
        loaded = known["model"](known["prompt"])
    assert torch.equal(known["same"], want)
    assert torch.equal(known["output"], want)
    assert torch.equal(known["refined"], want)
    assert torch.equal(loaded, example(known["prompt"]))
