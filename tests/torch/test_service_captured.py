"""Captured passes of the service, with a recorder that runs on the CPU: what is kept and answered."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "images"))

from service.inference import bert, cuda_graphs, model
from service.inference.buckets import Bucket, bucket_of, buckets
from service.inference.checkpoint import BertShape
from service.inference.classifier import Encoded, ModelInfo
from service.inference.device import Device
from service.inference.tokenizer import HashingTokenizer
from service.settings import Limits, Settings

torch.set_num_threads(1)
SHAPE = BertShape(
    num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=1200
)
SETTINGS = Settings("test", "cpu", Path("/models"), "random", "127.0.0.1", 0, Limits(max_batch_tokens=256))
CPU = Device("cpu", "cpu", "cpu")
BATCHES = (
    [Encoded((2, 4, 5, 6, 3))],
    [Encoded((2, 6, 3)), Encoded((2, 6, 3, 7, 8, 3), types=(0, 0, 0, 1, 1, 1))],
    [Encoded((2, 6, 3)), Encoded((2, 6, 3, 7, 8, 3))],  # types of the batch before are gone
    [Encoded(tuple(range(2, 42)))] * 5,
)


@dataclass
class Recorder:
    """Computes again into the memory that was returned, as a graph does."""

    replayed_s: Callable[[int], float] = lambda _number: 1.0
    broken: Callable[[int], bool] = lambda _number: False
    wrong: Callable[[int], bool] = lambda _number: False
    numbers: list[int] = field(default_factory=list)
    plain: bool = True

    def record(self, run: cuda_graphs.Run) -> tuple[tuple[torch.Tensor, torch.Tensor], Callable[[], None]]:
        number = len(self.numbers)
        self.numbers.append(number)
        if self.broken(number):
            raise RuntimeError("CUDA error: operation not permitted\nadvice of three lines")
        outputs = run()

        def replay() -> None:
            for old, new in zip(outputs, run(), strict=True):
                old.copy_(new + (1 if self.wrong(number) else 0))

        return outputs, replay

    def seconds(self, run: Callable[[], object]) -> float:
        run()
        self.plain, was_plain = not self.plain, self.plain
        return 2.0 if was_plain else self.replayed_s(self.numbers[-1])

    def held(self) -> int:
        return 1_000_000 * len(self.numbers)

    def needed(self, run: Callable[[], object]) -> int:
        return 500_000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing ends by its own rules, not because this machine is slow."""
    monkeypatch.setattr(cuda_graphs, "MAX_CAPTURE_S", 600.0)


@pytest.fixture(scope="module")
def eager() -> model.TorchClassifier:
    torch.manual_seed(1)
    weights = {
        name: each + 0.1 * torch.randn_like(each) for name, each in bert.random_weights(SHAPE, 1).items()
    }
    info = ModelInfo("x", "random", "", "", "cpu", "cpu", SHAPE.labels, 1, SHAPE.vocab_size, 512, 32)
    return model.TorchClassifier(info, model.Resident(weights, SHAPE), HashingTokenizer(1200, 512), CPU)


def recorded(eager: model.TorchClassifier, recorder: Recorder, **settings: object) -> model.TorchClassifier:
    made = model.capture_passes(eager, replace(SETTINGS, **settings), recorder)  # type: ignore[arg-type]
    return replace(eager, captured=made)


def test_replays_answer_as_passes_do_pairs_and_embeddings_too(eager: model.TorchClassifier) -> None:
    fast = recorded(eager, Recorder())
    for batch in BATCHES:
        for task in ("classify", "embed"):
            found, expected = getattr(fast, task)(batch), getattr(eager, task)(batch)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert fast.counts() == {
        "captured_batches": 2 * len(BATCHES),
        "captured_padding_tokens": 2 * (11 + 20 + 20 + 6 * 48 - 200),
    }


def test_a_batch_of_another_shape_is_computed_as_before(eager: model.TorchClassifier) -> None:
    fast = recorded(eager, Recorder())
    for batch in ([Encoded((2,) * 16)] * 65, [Encoded((2,) * 512)] * 2):
        torch.testing.assert_close(torch.tensor(fast.classify(batch)), torch.tensor(eager.classify(batch)))
    assert fast.captured.batches == 0


def test_a_fault_in_capturing_leaves_what_was_captured_and_a_service_that_answers(
    eager: model.TorchClassifier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fast = recorded(eager, Recorder(broken=lambda number: number == 3))
    assert len(fast.captured.graphs) == 3
    assert "operation not permitted; other shapes are computed uncaptured" in caplog.text
    assert "advice" not in caplog.text
    for batch in BATCHES:
        torch.testing.assert_close(torch.tensor(fast.classify(batch)), torch.tensor(eager.classify(batch)))


@pytest.mark.parametrize("first", [0, 2])
def test_a_replay_that_differs_is_not_used(
    eager: model.TorchClassifier, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    fast = recorded(eager, Recorder(wrong=lambda number: number >= first))
    assert len(fast.captured.graphs) == first
    assert "differs by 1" in caplog.text
    torch.testing.assert_close(
        torch.tensor(fast.classify(BATCHES[0])), torch.tensor(eager.classify(BATCHES[0]))
    )


def test_shapes_that_are_not_quicker_than_a_smaller_pass_are_left_out(
    eager: model.TorchClassifier,
) -> None:
    recorder = Recorder(replayed_s=lambda number: 1.0 if number < 4 else 3.0)
    few = recorded(eager, recorder)
    assert len(few.captured.graphs) == 4
    assert len(recorder.numbers) == 16  # no larger one is tried after twelve


def test_capturing_ends_at_its_bound_of_memory(eager: model.TorchClassifier) -> None:
    recorder = Recorder()
    fast = recorded(eager, recorder, capture_bytes=14_000_000)
    assert len(recorder.numbers) == len(fast.captured.graphs) == 6  # after 5 MB there is room for one more
    assert fast.captured.n_bytes == 6_000_000 <= 14_000_000


def test_a_model_on_a_gpu_is_captured_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, eager: model.TorchClassifier
) -> None:
    """The GPU is the CPU under another name; the rest is what loading does."""
    monkeypatch.setattr(model, "wants_capture", lambda settings, device: settings.capture is not False)
    monkeypatch.setattr(model, "GraphRecorder", lambda place: Recorder())
    gpu = Device("cpu", "cuda:0", "a GPU")
    fast = model._on_device(eager, SETTINGS, gpu)
    assert f"a GPU; {len(fast.captured.graphs)} shapes captured" in fast.info.device_description
    fast.prove()
    assert fast.captured.batches == len(model.CANARIES) + 1
    slow = model._on_device(eager, replace(SETTINGS, capture=False), gpu)
    assert not slow.captured.graphs
    torch.testing.assert_close(torch.tensor(fast.expected), torch.tensor(slow.expected))


def test_the_cpu_and_amds_cards_are_not_captured_unless_the_profile_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, wanted, unwanted = (
        Device("cuda:0", "x", "x"),
        replace(SETTINGS, capture=True),
        replace(SETTINGS, capture=False),
    )
    assert not model.wants_capture(wanted, CPU)
    monkeypatch.setattr(torch.version, "hip", None)
    assert [model.wants_capture(each, gpu) for each in (SETTINGS, wanted, unwanted)] == [True, True, False]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert [model.wants_capture(each, gpu) for each in (SETTINGS, wanted, unwanted)] == [False, True, False]


def test_every_batch_takes_the_smallest_shape_that_holds_it() -> None:
    for rows in range(1, 65):
        for tokens in range(1, 513, 5):
            found = bucket_of(rows, tokens)
            assert found is not None
            assert found.rows >= rows
            assert found.tokens >= tokens
    assert bucket_of(1, 12) == Bucket(1, 16)
    assert bucket_of(65, 12) is bucket_of(1, 513) is None


def test_shapes_are_those_that_batches_can_have() -> None:
    found = list(buckets(512, 512, 512))
    assert found == sorted(found, key=lambda each: each.padded)
    assert Bucket(1, 512) in found
    assert Bucket(64, 16) in found  # 49 rows of 1 token
    assert Bucket(16, 128) not in found  # 13 rows of 97 tokens are more than 512
    assert max(each.tokens for each in buckets(40, 512, 512)) == 48
    assert max(each.tokens for each in buckets(40, 40, 512)) == 32  # positions end there
