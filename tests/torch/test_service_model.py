"""The service's torch side on the CPU: a small BERT, compared with transformers' own."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "images"))

from service.errors import (
    DeviceFault,
    DeviceMissing,
    ModelUnreadable,
    RequestError,
    ServiceError,
    SettingsError,
)
from service.inference import bert
from service.inference import model as inference
from service.inference import placement as placing
from service.inference.checkpoint import BertShape
from service.inference.classifier import Encoded
from service.inference.device import Device
from service.settings import Hub, Limits, Placement, Settings

torch.set_num_threads(1)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "profit", "##s", "rose", "fell", ".", "and"]


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, transformers.BertForSequenceClassification]:
    """A small BERT as transformers saves one, with weights of which none is 0 or 1."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        id2label={0: "up", 1: "down", 2: "flat"},
        label2id={"up": 0, "down": 1, "flat": 2},
    )
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.05)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder, model


def settings(folder: Path, **more: object) -> Settings:
    plain = Settings("test", "cpu", folder, "mounted", "127.0.0.1", 0, Limits(), threads=1)
    return replace(plain, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(saved: tuple[Path, object]) -> inference.TorchClassifier:
    return inference.load(settings(saved[0]), "tiny", saved[0])


def test_a_model_of_a_hub_is_loaded_from_the_files_that_were_fetched(
    saved: tuple[Path, object],
    made: inference.TorchClassifier,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    wanted = Hub("someone/tiny", "a" * 40)
    monkeypatch.setattr(inference.hub, "fetch", lambda asked: saved[0] if asked == wanted else tmp_path)
    found = inference.load(settings(tmp_path, weights="auto", hub=wanted), "finbert", tmp_path)
    assert (found.info.weights, found.info.weights_source) == ("hub", f"someone/tiny at {'a' * 40}")
    assert found.classify(ROWS) == made.classify(ROWS)


def with_outputs(made: inference.TorchClassifier, **changes: object) -> inference.TorchClassifier:
    assert isinstance(made.outputs, inference.Resident)
    return replace(made, outputs=replace(made.outputs, **changes))  # type: ignore[arg-type]


ROWS = (
    Encoded((2, 4, 5, 6, 3)),
    Encoded((2, 6, 3)),
    Encoded((2, 6, 3, 7, 8, 3), types=(0, 0, 0, 1, 1, 1)),
)


def by_transformers(
    model: transformers.BertForSequenceClassification, row: Encoded
) -> tuple[torch.Tensor, torch.Tensor]:
    types = torch.tensor([row.types or (0,) * len(row.ids)])
    with torch.no_grad():
        out = model(torch.tensor([row.ids]), token_type_ids=types, output_hidden_states=True)
    mean = out.hidden_states[-1][0].mean(0)
    return torch.softmax(out.logits[0], -1), mean / mean.norm()


def test_probabilities_and_embeddings_are_those_of_transformers_in_one_padded_batch(
    made: inference.TorchClassifier, saved: tuple[Path, transformers.BertForSequenceClassification]
) -> None:
    probabilities, embeddings = made.classify(ROWS), made.embed(ROWS)
    for row, found, embedding in zip(ROWS, probabilities, embeddings, strict=True):
        expected, mean = by_transformers(saved[1], row)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(embedding), mean, rtol=1e-4, atol=1e-5)


def test_texts_are_encoded_as_transformers_encodes_them(
    made: inference.TorchClassifier, saved: tuple[Path, object]
) -> None:
    theirs = transformers.BertTokenizer.from_pretrained(saved[0])
    for ours, (first, second) in zip(
        made.encode(["Profits rose.", ("Profits rose", "and fell.")]),
        [("Profits rose.", None), ("Profits rose", "and fell.")],
        strict=True,
    ):
        expected = theirs(first, second)
        assert list(ours.ids) == expected["input_ids"]
        assert list(ours.types or (0,) * len(ours.ids)) == expected["token_type_ids"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_smaller_type_says_how_far_it_is_from_float32(
    saved: tuple[Path, object], made: inference.TorchClassifier, dtype: str
) -> None:
    small = inference.load(settings(saved[0], dtype=dtype), "tiny", saved[0])
    assert made.info.accuracy is None
    assert small.info.dtype == dtype
    rows = made.encode(inference.CANARIES)
    apart = [
        abs(a - b)
        for row in rows
        for a, b in zip(made.classify([row])[0], small.classify([row])[0], strict=True)
    ]
    assert small.info.accuracy == pytest.approx(max(apart))
    assert 0 < max(apart) < 0.2


def fails_on_a_gpu() -> None:
    raise torch.cuda.OutOfMemoryError("no memory")


def fails_on_the_cpu() -> None:
    torch.empty(1 << 50)  # a RuntimeError there, as of torch 2.13


@pytest.mark.parametrize("fails", [fails_on_a_gpu, fails_on_the_cpu])
def test_a_batch_that_needs_too_much_memory_is_halved_and_only_a_row_too_many_is_refused(
    made: inference.TorchClassifier, fails: Callable[[], None]
) -> None:
    passes: list[int] = []
    room = 1

    def scarce(weights: object, shape: object, ids: torch.Tensor, *more: object) -> torch.Tensor:
        passes.append(len(ids))
        if len(ids) > room:
            fails()
        return bert.hidden_states(weights, shape, ids, *more)  # type: ignore[arg-type]

    poor = with_outputs(made, hidden_states=scarce)
    torch.testing.assert_close(torch.tensor(poor.classify(ROWS)), torch.tensor(made.classify(ROWS)))
    assert passes == [3, 1, 2, 1, 1]
    room = 0
    with pytest.raises(RequestError, match="no memory left") as caught:
        poor.classify(ROWS[:1])
    assert caught.value.status == 503


def test_a_canary_that_answers_otherwise_than_at_the_start_is_a_fault(
    made: inference.TorchClassifier,
) -> None:
    made.prove()
    assert isinstance(made.outputs, inference.Resident)
    broken = dict(made.outputs.weights)
    broken["classifier.bias"] = broken["classifier.bias"] + torch.tensor([5.0, 0.0, 0.0])
    with pytest.raises(DeviceFault, match="now has"):
        with_outputs(made, weights=broken).prove()
    broken["classifier.bias"] = torch.full((3,), float("nan"))
    with pytest.raises(DeviceFault):
        with_outputs(made, weights=broken).prove()


def test_attention_is_not_planned_for_each_shape(made: inference.TorchClassifier) -> None:
    """Mixed lengths in half precision ran at a tenth of the speed on an H200."""
    assert made
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_what_a_gpu_raises_is_a_fault_of_the_device(made: inference.TorchClassifier) -> None:
    def broken(*_args: object) -> torch.Tensor:
        raise RuntimeError("HIP error: unspecified launch failure\nadvice of three lines")

    gpu = replace(with_outputs(made, hidden_states=broken), device=replace(made.device, torch_name="meta"))
    with pytest.raises(DeviceFault, match=r"^HIP error: unspecified launch failure$"):
        gpu.classify(ROWS)


def test_a_model_whose_file_is_cut_short_is_refused(saved: tuple[Path, object], tmp_path: Path) -> None:
    for name in ("config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((saved[0] / name).read_bytes())
    whole = (saved[0] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4])
    with pytest.raises(ModelUnreadable, match="it is cut"):
        inference.load(settings(tmp_path), "tiny", tmp_path)


SWAP = """
import os, sys
sys.path[:0] = [{images!r}, {root!r}]
from pathlib import Path
from service.errors import ModelUnreadable
from service.inference import mounted
from service.inference.model import load
from service.settings import Limits, Settings

folder = Path({folder!r})
file = folder / "model.safetensors"
there = mounted.parameter_shapes

def swapping(shape):
    names = list(there(shape))
    yield from names[:3]
    {swap}
    yield from names[3:]

mounted.parameter_shapes = swapping
try:
    settings = Settings("test", "cpu", folder, "mounted", "127.0.0.1", 0, Limits(), threads=1)
    load(settings, "tiny", folder)
except ModelUnreadable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("swap", "said"),
    [
        ("os.truncate(file, 4096)", "it was cut while it was read"),
        ("file.write_bytes(file.read_bytes()[:-1] + b'x')", "changed while it was read"),
        ("new = folder / 'new'; new.write_bytes(b'other'); new.replace(file)", ""),
    ],
)
def test_a_model_that_is_swapped_while_it_is_loaded_does_not_kill_the_service(
    saved: tuple[Path, object], tmp_path: Path, swap: str, said: str
) -> None:
    """A mapped file that is cut ends the process with SIGBUS; one that was renamed away stays readable."""
    for name in ("config.json", "vocab.txt", "model.safetensors"):
        (tmp_path / name).write_bytes((saved[0] / name).read_bytes())
    root = Path(__file__).parents[2]
    program = SWAP.format(images=str(root / "images"), root=str(root), folder=str(tmp_path), swap=swap)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert said in done.stdout
    assert bool(said) == bool(done.stdout)


def test_gtt_is_the_sum_of_the_cards_and_absent_without_one(tmp_path: Path) -> None:
    assert inference.gtt_bytes(tmp_path) == {}
    for number, text in enumerate(("4096\n", "8192\n", "nonsense")):
        folder = tmp_path / f"card{number}" / "device"
        folder.mkdir(parents=True)
        (folder / "mem_info_gtt_used").write_text(text)
    assert inference.gtt_bytes(tmp_path) == {"device_gtt_used": 12288}


def test_a_gpus_memory_is_told_by_kind_and_placements_pinned_memory_with_it(
    made: inference.TorchClassifier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (3, 10))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 2)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 4})
    monkeypatch.setattr(inference, "_DRM", tmp_path)
    gpu = replace(with_outputs(made, pinned_bytes=5), device=replace(made.device, torch_name="cuda:0"))
    assert gpu.memory() == {
        "vram_allocated": 1,
        "vram_reserved": 2,
        "device_vram_free": 3,
        "device_vram_total": 10,
        "pinned_by_torch": 4,
        "pinned_by_placement": 5,
    }
    assert made.memory() == {}


# ---- placed weights ----------------------------------------------------------------------------------


def test_a_placed_model_answers_as_one_that_is_not(
    saved: tuple[Path, object], made: inference.TorchClassifier
) -> None:
    """On the CPU, where every block computes: the plan is that of the 4 GB card."""
    wanted = Placement("wx4100", 400_000_000)
    placed = inference.load(settings(saved[0], placement=wanted), "tiny", saved[0])
    assert placed.info.accuracy == pytest.approx(0, abs=1e-6)
    assert "blocks: 4 resident" in placed.info.device_description
    assert placed.outputs.pinned_bytes == 0  # the CPU pins nothing
    torch.testing.assert_close(torch.tensor(placed.classify(ROWS)), torch.tensor(made.classify(ROWS)))
    torch.testing.assert_close(torch.tensor(placed.embed(ROWS)), torch.tensor(made.embed(ROWS)))
    placed.prove()


def test_a_model_larger_than_its_budget_streams_and_answers_alike() -> None:
    shape = BertShape(num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    weights = bert.random_weights(shape, 1)
    plain = inference.Resident(weights, shape)
    ids, mask = (
        torch.tensor([[101, 2054, 102], [101, 102, 0]]),
        torch.tensor([[True] * 3, [True, True, False]]),
    )
    with torch.inference_mode():
        expected = [plain(ids, mask, None, task) for task in ("classify", "embed")]
    cpu = Device("cpu", "cpu", "cpu")
    model, made = placing.place_bert(weights, shape, smallest(weights, shape), cpu, max_batch_tokens=64)
    assert {block.tier for block in made.blocks} - {"resident"}
    with torch.inference_mode():
        found = [model(ids, mask, None, task) for task in ("classify", "embed")]
    torch.testing.assert_close(found, expected)
    assert "of " in placing.describe_plan(made)


def smallest(weights: bert.Weights, shape: BertShape) -> Placement:
    """A budget in which not all of the weights fit, and just enough for the rest."""
    whole = Placement("wx4100", 4_000_000_000)
    _, made = placing.place_bert(weights, shape, whole, Device("cpu", "cpu", "cpu"), max_batch_tokens=64)
    return Placement("wx4100", made.vram.total - made.vram.context - made.vram.weights // 4)


def test_a_placement_does_not_count_on_memory_that_the_container_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A profile of a card doesn't say how much memory its host has; the planner would assume 64 GiB."""
    shape = BertShape(num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    weights = bert.random_weights(shape, 1)
    wanted, cpu = smallest(weights, shape), Device("cpu", "cpu", "cpu")
    held = sum(weight.nbytes for weight in weights.values())
    monkeypatch.setattr(placing, "available_bytes", lambda _root: 80 << 20)
    _, made = placing.place_bert(weights, shape, wanted, cpu, max_batch_tokens=64)
    assert made.host_budget == held + (80 << 20)
    monkeypatch.setattr(placing, "available_bytes", lambda _root: -held)
    with pytest.raises(DeviceMissing, match="host memory") as caught:
        placing.place_bert(weights, shape, wanted, cpu, max_batch_tokens=64)
    assert "give the container more memory" in caught.value.hint


@pytest.mark.parametrize(
    ("wanted", "error", "said"),
    [
        (Placement("wx4100", 1000), DeviceMissing, "can't be placed in 1000 B of VRAM"),
        (Placement("wx41", 10**9), SettingsError, "wx41"),
        (Placement("wx4100"), SettingsError, "needs a vram_budget on the CPU"),
    ],
)
def test_a_placement_that_can_not_be_says_why(
    saved: tuple[Path, object], wanted: Placement, error: type[ServiceError], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        inference.load(settings(saved[0], placement=wanted), "tiny", saved[0])
    assert caught.value.hint


class Card:
    """A card of 8 GB, as far as a limit for torch's allocator goes; models are placed on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits: list[int] = []
        self.emptied = 0
        place = placing.place
        monkeypatch.setattr(placing, "place", lambda model, plan, **_: place(model, plan, device="cpu"))
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.limit)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (6 * 10**9, 8 * 10**9))
        properties = SimpleNamespace(total_memory=8 * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: properties)

    def limit(self, share: float, place: str) -> None:
        assert place == "cuda:0"
        self.limits.append(round(share * 8 * 10**9))

    def empty(self) -> None:
        self.emptied += 1

    def placed(self, budget: int | None) -> placing.PlacedBert:
        shape = BertShape(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=256)
        device = Device("cuda:0", "cuda:0", "a stand-in")
        wanted = Placement("wx4100", budget)
        return placing.place_bert(bert.random_weights(shape, 1), shape, wanted, device, max_batch_tokens=64)[
            0
        ]


def test_a_budget_limits_torchs_allocator_for_as_long_as_the_model_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(monkeypatch)
    gc.disable()
    try:
        first = card.placed(10**9)
        assert card.limits == [10**9]
        second = card.placed(10**9)  # replaces the first one, which answers meanwhile
        assert card.limits == [10**9, 2 * 10**9]
        gone = weakref.ref(first._model)
        del first
        assert gone() is None  # its memory was released before the limit
        assert card.limits == [10**9, 2 * 10**9, 10**9]
        del second
        assert card.limits[-1] == 8 * 10**9
        assert card.emptied == 2
    finally:
        gc.enable()


def test_a_placement_that_fails_limits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    with pytest.raises(DeviceMissing):
        card.placed(1000)
    assert card.limits == [1000, 8 * 10**9]


def test_without_a_budget_torchs_allocator_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    model = card.placed(None)
    del model
    assert card.limits == []
    assert card.emptied == 0


def test_a_row_for_which_memory_is_short_is_refused_and_logged_with_torchs_reason(
    made: inference.TorchClassifier, caplog: pytest.LogCaptureFixture
) -> None:
    def short(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("tried to allocate 20.00 MiB. 1.86 GiB allowed")

    with pytest.raises(RequestError, match="no memory left"):
        with_outputs(made, hidden_states=short).classify(ROWS[:1])
    assert "1.86 GiB allowed" in caplog.text
