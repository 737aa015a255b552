"""The torch side: what torch can do here, loading a model onto a device, and running it."""

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from service.errors import DeviceMissing, ModelUnreadable, RequestError
from service.model import bert, checkpoint
from service.model.architecture import BertShape, parameter_count, parameter_shapes
from service.model.cards import check_cards
from service.model.classifier import Encoded, ModelInfo, Probabilities
from service.model.device import Device, Gpu, TorchBuild, choose
from service.model.tokenizer import Tokenizer, load_tokenizer, stand_in
from service.settings import Settings, quota_cpus

SEED = 0  # of the random weights, so that two starts answer alike
CANARY = "Shares rose after the company raised its outlook for the year."
_ROWS_PER_PASS = 8  # bounds the memory of one forward pass: 8 x 512 tokens
_PAD = 0  # any id does: the mask hides it
_NODES = ("/dev/kfd", "/dev/dxg")  # AMD's compute device on Linux, and WSL's

log = logging.getLogger("service")


def torch_build() -> TorchBuild:
    """The facts that `device.choose` decides on."""
    hip = getattr(torch.version, "hip", None)
    there = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    return TorchBuild(
        version=torch.__version__,
        hip=hip,
        cuda=torch.version.cuda,
        gpus=tuple(_gpu(index, is_hip=bool(hip)) for index in there),
        gfx_targets=tuple(torch.cuda.get_arch_list()) if hip and there else (),
        nodes={path: _node_state(Path(path)) for path in _NODES} if hip else {},
    )


def _gpu(index: int, *, is_hip: bool) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    gfx = getattr(properties, "gcnArchName", "").partition(":")[0] if is_hip else ""
    return Gpu(properties.name, gfx or None)


def _node_state(path: Path) -> str:
    if not path.exists():
        return "absent"
    return "open" if os.access(path, os.R_OK | os.W_OK) else "denied"


@dataclass(frozen=True)
class TorchClassifier:
    """A model on its device. Satisfies `classifier.Classifier`."""

    info: ModelInfo
    shape: BertShape
    weights: bert.Weights
    tokenizer: Tokenizer
    device: Device

    def encode(self, texts: Sequence[str]) -> tuple[Encoded, ...]:
        """See `Classifier.encode`."""
        return tuple(self.tokenizer.encode(text, self.info.max_tokens) for text in texts)

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        """See `Classifier.classify`."""
        starts = range(0, len(batch), _ROWS_PER_PASS)
        try:
            passes = [self._pass(batch[at : at + _ROWS_PER_PASS]) for at in starts]
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise RequestError(
                503, f"no memory left on {self.device.torch_name} for this request", retry_after_s=1
            ) from error
        return tuple(row for each in passes for row in each)

    def _pass(self, batch: Sequence[Encoded]) -> list[Probabilities]:
        longest = max(len(row.ids) for row in batch)
        padded = [[*row.ids, *[_PAD] * (longest - len(row.ids))] for row in batch]
        masks = [[at < len(row.ids) for at in range(longest)] for row in batch]
        with torch.inference_mode():
            ids = torch.tensor(padded, dtype=torch.int64, device=self.device.torch_name)
            mask = torch.tensor(masks, dtype=torch.bool, device=self.device.torch_name)
            logits = bert.forward(self.weights, self.shape, ids, mask)
            rows = torch.softmax(logits.float(), dim=-1).tolist()  # waits for the device
        return [tuple(row) for row in rows]


def load(settings: Settings, name: str) -> TorchClassifier:
    """Find the device, load the model onto it and prove it with one inference.

    Raises DeviceMissing, ModelUnreadable or SettingsError.
    """
    started = time.perf_counter()
    check_cards(settings.device, os.environ)
    device = choose(settings.device, torch_build())
    torch.set_num_threads(settings.threads or _cpus())
    classifier = _load_on(settings, name, device)
    loaded = time.perf_counter()
    _prove(classifier)
    log.info(
        "ready weights=%s (%s) parameters=%d tokenizer=%s device=%s threads=%d load_s=%.2f canary_s=%.2f",
        classifier.info.weights,
        classifier.info.weights_source,
        classifier.info.parameters,
        classifier.info.tokenizer,
        device.description,
        torch.get_num_threads(),
        loaded - started,
        time.perf_counter() - loaded,
    )
    return classifier


def _cpus() -> int:
    """CPUs that this container may use: torch counts the host's and would crowd a smaller quota."""
    usable = len(os.sched_getaffinity(0))
    try:
        quota = quota_cpus(Path("/sys/fs/cgroup/cpu.max").read_text())
    except OSError:  # cgroup v1, or no cgroup file system at all
        quota = None
    return min(usable, quota or usable)


def _load_on(settings: Settings, name: str, device: Device) -> TorchClassifier:
    directory = settings.model_dir
    mounted = settings.weights != "random" and checkpoint.is_present(directory)
    if settings.weights == "mounted" and not mounted:
        raise ModelUnreadable(
            f"{directory} holds no model, but one was asked for",
            "set WEIR_MODEL_DIR to a directory with config.json, model.safetensors and vocab.txt",
        )
    shape = checkpoint.read_shape(directory / "config.json") if mounted else BertShape()
    tokenizer = load_tokenizer(directory, shape.vocab_size) if mounted else stand_in(shape.vocab_size)
    weights = _mounted(shape, directory, device) if mounted else _random(shape, device)
    info = ModelInfo(
        name=name,
        weights="mounted" if mounted else "random",
        weights_source=str(directory / "model.safetensors") if mounted else f"seed {SEED}, untrained",
        tokenizer=tokenizer.name,
        device=device.label,
        device_description=device.description,
        labels=shape.labels,
        parameters=parameter_count(shape),
        vocab_size=shape.vocab_size,
        max_tokens=min(settings.limits.max_tokens, shape.max_position_embeddings),
    )
    return TorchClassifier(info, shape, weights, tokenizer, device)


def _random(shape: BertShape, device: Device) -> bert.Weights:
    return _placed(bert.random_weights(shape, SEED), device)


def _mounted(shape: BertShape, directory: Path, device: Device) -> bert.Weights:
    """The file's weights as float32 copies: a mapped file that is replaced while we run would kill us."""
    path = directory / "model.safetensors"
    checkpoint.check(shape, checkpoint.read_header(path), path)
    try:
        with safe_open(path, framework="pt") as file:
            return _placed(
                {name: file.get_tensor(name) for name in parameter_shapes(shape)}, device, copy=True
            )
    except (SafetensorError, OSError) as error:
        raise ModelUnreadable(f"{path} can't be read: {error}") from error


def _placed(tensors: bert.Weights, device: Device, *, copy: bool = False) -> bert.Weights:
    try:
        return {
            name: tensor.to(device.torch_name, torch.float32, copy=copy) for name, tensor in tensors.items()
        }
    except torch.cuda.OutOfMemoryError as error:
        raise DeviceMissing(
            f"the model doesn't fit into the memory of {device.description}",
            "free the device, take a smaller model, or run on the CPU: APP_PROFILE=experiment1",
        ) from error


def _prove(classifier: TorchClassifier) -> None:
    """One inference, end to end: a device or weights that can't do it must not be called ready."""
    try:
        (row,) = classifier.classify(classifier.encode([CANARY]))
    except RuntimeError as error:  # what torch raises when a kernel can't be launched
        first = str(error).strip().partition("\n")[0]
        raise DeviceMissing(
            f"{classifier.device.description} failed the first inference: {first}",
            "the driver, the device and this torch build must fit together",
        ) from error
    if not all(map(math.isfinite, row)) or abs(sum(row) - 1) > 1e-3:
        raise ModelUnreadable(
            f"the first inference gave {row}, which are no probabilities", "the weights may be damaged"
        )
