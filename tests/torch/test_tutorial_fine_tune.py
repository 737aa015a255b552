"""The tutorial on fine-tuning: every command runs, those that train with a model and sizes for a test."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "shown"))

import shown  # noqa: E402

HOST = ROOT / ".venv" / "bin" / "python"
PAGE = ROOT / "docs" / "tutorial" / "fine-tune.md"
TRAINS = re.compile(r"probe epochs (?!--from)|probes\.training\.worker")
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
    "tie_word_embeddings": True,
}
SMALLER = {
    "qwen2.5-3b": "tiny.json",
    "--tokens": "16",
    "--accumulate": "2",
    "--samples": "16",
    "--epochs": "2",
}


def smaller(command: str) -> list[str]:
    """The words of a command that trains, with a small model and small sizes."""
    words = shlex.split(command)
    if not TRAINS.search(command):
        return words
    words = [SMALLER.get(word, word) if word.startswith("qwen") else word for word in words]
    for at, word in enumerate(words[:-1]):
        if word.startswith("--") and word in SMALLER:
            words[at + 1] = SMALLER[word]
    return [*words, "--device", "cpu", *(("--repetitions", "1") if "epochs" in words[:3] else ())]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    import torch
    import transformers

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG))
    made.save_pretrained(tmp_path / "my-checkpoint")
    torch.save(torch.randint(500, (32, 16)), tmp_path / "my-tokens.pt")
    (python,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "mytrain.py").write_text(python)
    return tmp_path


@pytest.mark.sampled(0)  # 40 s of a processor: for `make thorough`
@pytest.mark.parametrize("page", [PAGE], ids=["fine-tune"])
def test_every_command_of_the_tutorial_runs(page, folder):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ran = []
    for command in shown.commands(page):
        words = smaller(command.text)
        if words[0] == "weir":
            python = HOST if "html" in words else sys.executable  # matplotlib isn't beside torch here
            words[0:1] = [str(python), "-m", "buildtool"]
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        may_end = (0, 1) if "fits" in words else (0,)  # 1: it doesn't fit as it is
        assert done.returncode in may_end, (command.text, done.stdout[-800:], done.stderr[-800:])
        assert "Traceback" not in done.stderr
        ran.append(command.text)
    assert len(ran) == 9

    page = (folder / "job.html").read_text()
    for word in ("loss", "samples/s", "peak", "unused of it", "J per epoch", "exchange"):
        assert word in page
    watched = json.loads((folder / "watch.json").read_text())
    assert watched["ended"]["exit_code"] == 0
    assert {"checkpoint.pt", "rank-0.json", "watch-here.jsonl"} <= {
        path.name for path in (folder / "job").iterdir()
    }
