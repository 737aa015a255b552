"""The model in torch: `load` puts it onto its device and proves it, `TorchClassifier` runs it.

`load` first makes the model in float32 on the CPU, because every other device and type is compared with it.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from service.errors import DeviceFault, DeviceMissing, ModelUnreadable, RequestError, SettingsError
from service.inference import bert, checkpoint, hub
from service.inference.bert import CompiledBert
from service.inference.buckets import buckets
from service.inference.checkpoint import BertShape, parameter_count
from service.inference.classifier import Encoded, ModelInfo, Probabilities, Task, Text, Vector
from service.inference.cuda_graphs import CapturedGraphs, GraphRecorder, Recorder, capture
from service.inference.device import Device, Gpu, TorchBuild, check_cards, choose_device
from service.inference.mounted import read_weights
from service.inference.tokenizer import Tokenizer, hashing_tokenizer, load_tokenizer
from service.settings import Dtype, Settings, quota_cpus
from service.threads import require_threads

SEED = 0  # of the random weights, so that two starts answer alike
CANARIES = (
    "Shares rose after the company raised its outlook for the year.",
    "Losses widened.",
    "The board will meet on Tuesday.",
    "Revenue fell by a third while costs stayed where they were, and the dividend was cut to a cent.",
)
_PAD = 0  # any id: the mask hides it
_DRM = Path("/sys/class/drm")
_NODES = ("/dev/kfd", "/dev/dxg")  # AMD's compute device on Linux, and WSL's
_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CANARY_TOLERANCE = 0.01  # of a canary's probabilities: batches of other shapes round differently

log = logging.getLogger("service")


def torch_build() -> TorchBuild:
    """Return what `choose_device` decides on."""
    hip = getattr(torch.version, "hip", None)
    indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    return TorchBuild(
        version=torch.__version__,
        hip=hip,
        cuda=torch.version.cuda,
        gpus=tuple(_gpu(index, is_hip=bool(hip)) for index in indices),
        gfx_targets=tuple(torch.cuda.get_arch_list()) if hip and indices else (),
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


class Outputs(Protocol):
    """A model's pass over ids [rows, tokens], mask [rows, tokens] and types [rows, tokens] or None."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory that its weights take, besides torch's own allocator."""
        ...

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None, task: Task
    ) -> torch.Tensor:
        """Logits [rows, labels], or embeddings [rows, hidden]."""
        ...


@dataclass(frozen=True, eq=False)
class Resident:
    """A model with all weights on one device. `hidden_states`: plain or compiled."""

    weights: bert.Weights
    shape: BertShape
    hidden_states: Callable[..., torch.Tensor] = bert.hidden_states
    pinned_bytes: int = 0

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None, task: Task
    ) -> torch.Tensor:
        """See `Outputs`."""
        hidden = self.hidden_states(self.weights, self.shape, ids, mask, types)
        return bert.embedded(hidden, mask) if task == "embed" else bert.classified(self.weights, hidden)


@dataclass(frozen=True, eq=False)
class TorchClassifier:
    """A model on its device: a `Classifier`. `expected`: the first canary's probabilities."""

    info: ModelInfo
    outputs: Outputs
    tokenizer: Tokenizer
    device: Device
    expected: Probabilities = ()
    captured: CapturedGraphs = field(default_factory=CapturedGraphs)

    def encode(self, texts: Sequence[Text]) -> tuple[Encoded, ...]:
        """See `Classifier.encode`."""
        return tuple(map(self.tokenizer.encode, texts))

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        """See `Classifier.classify`."""
        return self._compute("classify", batch)

    def embed(self, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        """See `Classifier.embed`."""
        return self._compute("embed", batch)

    def prove(self) -> None:
        """See `Classifier.prove`."""
        (row,) = self.classify(self.encode(CANARIES[:1]))
        if not largest_difference([row], [self.expected]) <= _CANARY_TOLERANCE:  # also for NaN
            raise DeviceFault(f"a text whose probabilities were {self.expected} now has {row}")

    def memory(self) -> Mapping[str, int]:
        """See `Classifier.memory`. It is this process's, unless the kind begins with `device_`."""
        if self.device.torch_name == "cpu":
            return {}
        free, total = torch.cuda.mem_get_info(self.device.torch_name)
        memory = {
            "vram_allocated": torch.cuda.memory_allocated(self.device.torch_name),
            "vram_reserved": torch.cuda.memory_reserved(self.device.torch_name),
            "device_vram_free": free,
            "device_vram_total": total,
        }
        if hasattr(torch.cuda, "host_memory_stats"):  # torch 2.7 and later
            memory["pinned_by_torch"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        return memory | {"pinned_by_placement": self.outputs.pinned_bytes} | gtt_bytes(_DRM)

    def counts(self) -> Mapping[str, int]:
        """See `Classifier.counts`."""
        return {"captured_batches": self.captured.batches, "captured_padding_tokens": self.captured.padding}

    def _compute(self, task: Task, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        """Compute a batch; if memory runs out, its halves, so that only too large a row is refused."""
        try:
            with torch.inference_mode():
                return tuple(map(tuple, self._pass(task, batch).tolist()))  # waits for the device
        except RuntimeError as error:
            if not _is_short_of_memory(error):
                if self.device.torch_name == "cpu":
                    raise
                raise DeviceFault(first_line(error)) from error
            if len(batch) == 1:
                log.warning("no memory left on %s: %s", self.device.torch_name, first_line(error))
                raise RequestError(
                    503, f"no memory left on {self.device.torch_name} for this request", retry_after_s=1
                ) from error
        torch.cuda.empty_cache()
        half = len(batch) // 2
        return self._compute(task, batch[:half]) + self._compute(task, batch[half:])

    def _pass(self, task: Task, batch: Sequence[Encoded]) -> torch.Tensor:
        replayed = self.captured.run(batch, task)
        if replayed is not None:
            return replayed
        longest = max(len(row.ids) for row in batch)
        device = self.device.torch_name
        padded = [[*row.ids, *[_PAD] * (longest - len(row.ids))] for row in batch]
        ids = torch.tensor(padded, dtype=torch.int64, device=device)
        lengths = torch.tensor([len(row.ids) for row in batch], device=device)
        mask = torch.arange(longest, device=device)[None, :] < lengths[:, None]
        types = None
        if any(row.types for row in batch):
            kinds = [[*row.types, *[0] * (longest - len(row.types))] for row in batch]
            types = torch.tensor(kinds, dtype=torch.int64, device=device)
        outputs = self.outputs(ids, mask, types, task)
        return torch.softmax(outputs.float(), dim=-1) if task == "classify" else outputs


def _is_short_of_memory(error: RuntimeError) -> bool:
    """The CPU's allocator has no exception type of its own for it, only a message."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def gtt_bytes(drm: Path) -> dict[str, int]:
    """Return the system memory that AMD's driver has mapped for all cards together; empty without a card."""
    used: dict[str, int] = {}
    for path in drm.glob("card*/device/mem_info_gtt_used"):
        try:
            used["device_gtt_used"] = used.get("device_gtt_used", 0) + int(path.read_text())
        except (OSError, ValueError):
            continue
    return used


def largest_difference(some: Sequence[Vector], others: Sequence[Vector]) -> float:
    """Return the largest absolute difference between two lists of vectors; NaN if one holds NaN."""
    differences = [abs(a - b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def first_line(error: Exception) -> str:
    """Return the first line of torch's message, without its advice."""
    return str(error).strip().partition("\n")[0]


def load(settings: Settings, name: str, directory: Path) -> TorchClassifier:
    """Choose the device, load the model onto it and prove it with one inference.

    Raises DeviceMissing, ModelUnreadable or SettingsError, and ServiceError for too few processes.
    """
    started = time.perf_counter()
    check_cards(settings.device, os.environ)
    device = choose_device(settings.device, torch_build())
    threads = settings.threads or _cpus()
    torch.set_num_threads(threads)
    require_threads(2 * (threads - 1), name="torch")  # a team for this thread, and one for the device's
    _disable_cudnn_attention()
    plain = _load_plain(settings, name, directory)
    loaded = time.perf_counter()
    classifier = _on_device(plain, settings, device)
    info = classifier.info
    log.info(
        "ready weights=%s (%s) parameters=%d tokenizer=%s device=%s threads=%d load_s=%.2f canary_s=%.2f "
        "model=%s dtype=%s",
        info.weights,
        info.weights_source,
        info.parameters,
        info.tokenizer,
        info.device_description,
        torch.get_num_threads(),
        loaded - started,
        time.perf_counter() - loaded,
        name,
        info.dtype if info.accuracy is None else f"{info.dtype}, {_accuracy_text(info.accuracy)}",
    )
    return classifier


def _disable_cudnn_attention() -> None:
    """Disable cuDNN's attention, which in half precision is planned anew for each shape of a batch.

    On an H200, it made 113 mixed texts a second in bfloat16, against 816 in float32.
    """
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):  # torch 2.5 and later
        torch.backends.cuda.enable_cudnn_sdp(False)


def _accuracy_text(accuracy: float) -> str:
    return f"probabilities differ from float32 on the CPU by at most {accuracy:.2g} on {len(CANARIES)} texts"


def _cpus() -> int:
    """Return the CPUs that this container may use; torch counts the host's."""
    usable = len(os.sched_getaffinity(0))
    try:
        quota = quota_cpus(Path("/sys/fs/cgroup/cpu.max").read_text())
    except OSError:  # cgroup v1, or no cgroup file system at all
        quota = None
    return min(usable, quota or usable)


def _load_plain(settings: Settings, name: str, directory: Path) -> TorchClassifier:
    """Return the model in float32 on the CPU."""
    if settings.hub:
        directory = hub.fetch(settings.hub)
    has_files = settings.weights != "random" and checkpoint.is_present(directory)
    if settings.weights == "mounted" and not has_files:
        raise ModelUnreadable(
            f"{directory} holds no model, but one was asked for",
            "set WEIR_MODEL_DIR to a directory with config.json, model.safetensors and vocab.txt",
        )
    shape = checkpoint.read_shape(directory / "config.json") if has_files else BertShape()
    max_tokens = min(settings.limits.max_tokens, shape.max_position_embeddings)
    path = directory / "model.safetensors"
    if has_files:
        tokenizer = load_tokenizer(directory, shape.vocab_size, max_tokens)
        tensors = read_weights(shape, path)
        weights, source = ("hub", str(settings.hub)) if settings.hub else ("mounted", str(path))
    else:
        tokenizer = hashing_tokenizer(shape.vocab_size, max_tokens)
        tensors = bert.random_weights(shape, SEED)
        weights, source = "random", f"seed {SEED}, untrained"
    cpu = Device("cpu", "cpu", "cpu")
    info = ModelInfo(
        name=name,
        weights=weights,
        weights_source=source,
        tokenizer=tokenizer.name,
        device=cpu.label,
        device_description=cpu.description,
        labels=shape.labels,
        parameters=parameter_count(shape),
        vocab_size=shape.vocab_size,
        max_tokens=max_tokens,
        hidden_size=shape.hidden_size,
    )
    return TorchClassifier(info, Resident(tensors, shape), tokenizer, cpu)


def _on_device(plain: TorchClassifier, settings: Settings, device: Device) -> TorchClassifier:
    """Return the model on its device and in its type, proven, and compared with `plain`. See `load`."""
    as_is = device.torch_name == "cpu" and settings.dtype == "float32" and not settings.compile
    as_is = as_is and settings.placement is None
    rows = plain.encode(CANARIES)
    reference = [] if as_is else _first_inference(plain, rows)
    outputs, description = _outputs_on_device(plain, settings, device)
    classifier = replace(plain, outputs=outputs, device=device)
    probabilities = _first_inference(classifier, rows, compiled=settings.compile)
    if isinstance(outputs, Resident) and wants_capture(settings, device):
        captured = capture_passes(classifier, settings, GraphRecorder(device.torch_name))
        classifier = replace(classifier, captured=captured)
        probabilities = _first_inference(classifier, rows)
        description += f"; {len(captured.graphs)} shapes captured in {captured.n_bytes / 1e6:.0f} MB"
    info = replace(
        plain.info,
        device=device.label,
        device_description=description,
        dtype=settings.dtype,
        accuracy=None if as_is else largest_difference(probabilities, reference),
    )
    return replace(classifier, info=info, expected=probabilities[0])


def wants_capture(settings: Settings, device: Device) -> bool:
    """Return whether passes are captured: on a GPU unless the profile says no; on HIP if it says yes."""
    if device.torch_name == "cpu":
        return False
    is_hip = bool(getattr(torch.version, "hip", None))  # no AMD card has run this yet
    return settings.capture if settings.capture is not None else not is_hip


def capture_passes(classifier: TorchClassifier, settings: Settings, recorder: Recorder) -> CapturedGraphs:
    """Record the passes of a model that is resident on its device. See `cuda_graphs.capture`."""
    resident = classifier.outputs
    assert isinstance(resident, Resident)

    def compute(
        ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = resident.hidden_states(resident.weights, resident.shape, ids, mask, types)
        logits = bert.classified(resident.weights, hidden)
        return torch.softmax(logits.float(), dim=-1), bert.embedded(hidden, mask)

    positions = resident.shape.max_position_embeddings
    shapes = buckets(classifier.info.max_tokens, positions, settings.limits.max_batch_tokens)
    return capture(
        compute, shapes, recorder, place=classifier.device.torch_name, max_bytes=settings.capture_bytes
    )


def _outputs_on_device(plain: TorchClassifier, settings: Settings, device: Device) -> tuple[Outputs, str]:
    """Return the model's pass with its weights in place, and a description of where they are."""
    assert isinstance(plain.outputs, Resident)
    weights, shape, dtype = plain.outputs.weights, plain.outputs.shape, _DTYPES[settings.dtype]
    if settings.placement is None:
        run = CompiledBert() if settings.compile else bert.hidden_states
        return Resident(_moved(weights, device, dtype), shape, run), device.description
    # the planner and its tables, only where they are asked for
    from service.inference.placement import describe_plan, place_bert

    model, plan = place_bert(
        {name: tensor.to(dtype) for name, tensor in weights.items()},
        shape,
        settings.placement,
        device,
        max_batch_tokens=settings.limits.max_batch_tokens,
    )
    return model, f"{device.description}; {describe_plan(plan)}"


def _moved(tensors: bert.Weights, device: Device, dtype: torch.dtype) -> bert.Weights:
    try:
        return {name: tensor.to(device.torch_name, dtype) for name, tensor in tensors.items()}
    except torch.cuda.OutOfMemoryError as error:
        raise DeviceMissing(
            f"the model doesn't fit into the memory of {device.description}",
            "free the device, take a smaller model, or run on the CPU: APP_PROFILE=experiment1",
        ) from error


def _compile(classifier: TorchClassifier, rows: Sequence[Encoded]) -> None:
    """Compile for one row and for several now, so that no request waits for it. Raises SettingsError."""
    try:
        classifier.classify(rows)
        classifier.classify(rows[:1])
    except Exception as error:  # of the compiler, of loading its programs, of a full disk
        raise SettingsError(
            f"`compile: true` doesn't work here: {first_line(error)}",
            "it needs a C++ compiler (CPU) or Triton (GPU), and a TORCHINDUCTOR_CACHE_DIR whose programs "
            "may be run: add them, or remove the line",
        ) from error


def _first_inference(
    classifier: TorchClassifier, rows: Sequence[Encoded], *, compiled: bool = False
) -> list[Probabilities]:
    """Return the canaries' probabilities. Raises DeviceMissing and ModelUnreadable."""
    try:
        if compiled:
            _compile(classifier, rows)
        probabilities = [classifier.classify([row])[0] for row in rows]
    except (RuntimeError, DeviceFault) as error:  # torch raises the former when a kernel can't be launched
        raise DeviceMissing(
            f"{classifier.device.description} failed the first inference: {first_line(error)}",
            "the driver, the device and this torch build must fit together",
        ) from error
    for row in probabilities:
        if not all(map(math.isfinite, row)) or abs(sum(row) - 1) > 1e-3:
            raise ModelUnreadable(
                f"the first inference gave {row}, which are no probabilities",
                "the weights may be damaged, or too large for this dtype",
            )
    return probabilities
