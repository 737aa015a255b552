"""`compile: true` in the service, really compiled: the same answers, few programs, clear refusals."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else torch starts processes that compile
os.environ.setdefault(
    "TORCHINDUCTOR_VEC_ISA_OK", "1"
)  # else it compiles a program for each set of instructions

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "images"))

from service.inference import bert, model
from service.inference.checkpoint import BertShape
from service.inference.classifier import Encoded, ModelInfo
from service.inference.device import Device
from service.inference.tokenizer import HashingTokenizer
from service.settings import Limits, Settings

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own
SHAPE = BertShape(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=64,
    vocab_size=1200,
    max_position_embeddings=64,
)
SETTINGS = Settings(
    "test", "cpu", Path("/models"), "random", "127.0.0.1", 0, Limits(), threads=1, compile=True
)
CPU = Device("cpu", "cpu", "cpu")


def plain() -> model.TorchClassifier:
    weights = {name: each * 3 for name, each in bert.random_weights(SHAPE, 1).items()}
    info = ModelInfo("x", "random", "", "", "cpu", "cpu", SHAPE.labels, 1, SHAPE.vocab_size, 64, 32)
    return model.TorchClassifier(info, model.Resident(weights, SHAPE), HashingTokenizer(1200, 64), CPU)


@pytest.fixture(scope="module")
def before() -> int:
    """Programs that other tests have had compiled."""
    return programs()


@pytest.fixture(scope="module")
def compiled(before: int) -> model.TorchClassifier:
    return model._on_device(plain(), SETTINGS, CPU)


def programs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def rows(count: int, tokens: int) -> list[Encoded]:
    return [Encoded(tuple(2 + (at + number) % 90 for at in range(tokens))) for number in range(count)]


def test_every_shape_is_answered_as_without_it_by_two_programs(
    before: int, compiled: model.TorchClassifier
) -> None:
    """From a thread that didn't compile them, as in the service."""
    made, after, eager = programs(), [], plain()
    pair = Encoded((2, 6, 3, 7, 8, 3), types=(0, 0, 0, 1, 1, 1))

    def ask() -> None:
        for batch in (
            *(rows(count, tokens) for count in (1, 2, 3, 8, 17) for tokens in (1, 2, 5, 16, 31, 63, 64)),
            [pair],
            [pair, *rows(2, 9)],
            [*rows(1, 30), *rows(1, 1)],
        ):
            for task in ("classify", "embed"):
                found, expected = getattr(compiled, task)(batch), getattr(eager, task)(batch)
                torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        after.append(programs())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert after == [made]
    assert made - before == 2


def test_the_accuracy_is_measured_and_said(
    compiled: model.TorchClassifier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled.info.accuracy is not None
    assert compiled.info.accuracy < 1e-4
    compiled.prove()
    monkeypatch.setattr(model, "_load_plain", lambda *_args: plain())
    monkeypatch.setattr(model, "_on_device", lambda *_args: compiled)
    with caplog.at_level(logging.INFO):
        model.load(SETTINGS, "x", Path("/models"))
    assert "float32, probabilities differ from float32 on the CPU by at most" in caplog.text


WITHOUT = """
import os, sys
import torch._inductor.compile_fx
import test_service_compiled as here
from service.errors import SettingsError
from service.inference import model

def refuse(path, cache):
    os.environ.update(PATH=path, TORCHINDUCTOR_CACHE_DIR=cache)
    try:
        model._on_device(here.plain(), here.SETTINGS, here.CPU)
    except SettingsError as error:
        print(error, flush=True)

for number in range(1, len(sys.argv), 2):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        refuse(*sys.argv[number:number + 2])
        os._exit(0)
"""


def test_where_it_can_not_work_the_service_says_so_and_does_not_start(tmp_path: Path) -> None:
    """Without a compiler, and without a place for programs. In processes of their own, whose program can't be
    in any cache.
    """
    cache = tmp_path / "cache"
    cache.write_text("no folder")
    env = {"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "/nonexistent", str(tmp_path / "made"), "/usr/bin:/bin", str(cache)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    before, no_compiler, no_folder = done.stdout.split("`compile: true` doesn't work here: ")
    assert before == ""
    assert "it needs a C++ compiler" in no_compiler
    assert "it needs a C++ compiler" in no_folder
    assert str(cache) in no_folder
