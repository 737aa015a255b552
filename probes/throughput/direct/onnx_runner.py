"""Runs a model in ONNX Runtime, exported on the spot, with the provider that is there.

Inputs are NumPy arrays and outputs come back to the host, as its sessions take and give them; on a GPU the
provider copies within the timed part.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from probes.core.errors import LibraryMissing, ModelFails, OutOfMemory, ProbeError, Unsupported
from probes.core.unknown import Unknown
from probes.hardware.torch_build import first_line
from probes.throughput.ceilings import Device
from probes.throughput.direct.models import Spec, build_model
from probes.throughput.direct.results import Way, Work
from probes.throughput.direct.torch_runner import HostMemory, TorchRunner, cause, not_finite

OPSET = 17
# the first that is there; options keep TF32 for the way that asks for it
PROVIDERS: dict[Device, tuple[str, ...]] = {
    "cpu": ("CPUExecutionProvider",),
    "gpu": ("CUDAExecutionProvider", "MIGraphXExecutionProvider", "ROCMExecutionProvider"),
}
PACKAGES = {
    "cpu": "pip install onnxruntime",
    "gpu": "NVIDIA: pip install onnxruntime-gpu; AMD: pip install onnxruntime-rocm or onnxruntime-migraphx "
    "from the index of your ROCm release",
}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
REFUSALS = ("out of memory", "failed to allocate", "bad_alloc", "bad allocation")


def runtime() -> ModuleType:
    """Import ONNX Runtime. Raises LibraryMissing."""
    try:
        import onnxruntime
    except ImportError as error:
        raise LibraryMissing(f"onnxruntime can't be imported: {error}", PACKAGES["cpu"]) from error
    found: ModuleType = onnxruntime
    return found


def provider(device: Device) -> str:
    """The provider that serves a device here. Raises LibraryMissing."""
    available = runtime().get_available_providers()
    for name in PROVIDERS[device]:
        if name in available:
            return name
    raise LibraryMissing(
        f"this onnxruntime has no provider for the {device} (it has {', '.join(available)})", PACKAGES[device]
    )


def refuse(way: Way) -> None:
    """Raises Unsupported for what isn't ONNX Runtime's."""
    if way.precision == "autocast":
        raise Unsupported("autocast is torch's own")
    if way.precision == "bf16":
        raise Unsupported("NumPy, which holds ONNX Runtime's inputs, has no bfloat16")
    if way.device == "gpu" and way.inputs != "copied":
        raise Unsupported("sessions copy their inputs by themselves: only inputs copied")
    if way.precision == "tf32" and provider(way.device) != "CUDAExecutionProvider":
        raise Unsupported("TF32 is a form of NVIDIA's tensor cores")


def exported(spec: Spec, way: Way, seed: int) -> bytes:
    """The model as ONNX with a free batch dimension. Raises Unsupported where torch can't export it."""
    module = build_model(spec, seed=seed, dtype=DTYPES[way.precision], device="cpu")
    inputs = tuple(torch.randn(2, *shape).to(DTYPES[way.precision]) for shape in spec.inputs)
    names = [f"input{place}" for place in range(len(inputs))]
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own; what doesn't work is refused below
            torch.onnx.export(
                module,
                inputs,
                file,
                input_names=names,
                output_names=["output"],
                dynamic_axes={name: {0: "batch"} for name in (*names, "output")},
                opset_version=OPSET,
                dynamo=False,
            )
    except Exception as error:  # its exporters raise whatever their parts do
        raise Unsupported(f"{spec.name} can't be exported to ONNX: {cause(error)}") from error
    return file.getvalue()


class OnnxRunner:
    """A session. Counted work is that of the same model in torch."""

    def __init__(self, spec: Spec, way: Way, *, seed: int, threads: int, counted: TorchRunner) -> None:
        refuse(way)
        self._spec, self._way, self._counted = spec, way, counted
        self._drawn = torch.Generator().manual_seed(seed)
        self._session = self._open(exported(spec, way, seed), threads)
        self._host = HostMemory(Path("/"))

    def _open(self, model: bytes, threads: int) -> Any:  # noqa: ANN401 - a library without types
        library, name = runtime(), provider(self._way.device)
        options = library.SessionOptions()
        if threads:
            options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors
        given = {"use_tf32": int(self._way.precision == "tf32")} if name.startswith("CUDA") else {}
        try:
            session = library.InferenceSession(model, options, providers=[(name, given)])
        except Exception as error:  # the library's own classes have no common parent
            raise Unsupported(f"ONNX Runtime refuses the model: {first_line(error)}") from error
        if session.get_providers()[0] != name:  # it falls back to the CPU by itself
            raise Unsupported(f"{name} doesn't start here: its libraries are missing or don't fit")
        return session

    @contextmanager
    def at(self, batch: int) -> Iterator["OnnxBatch"]:
        """Memory for a batch size. Raises OutOfMemory, as everything within it may."""
        shapes = tuple((batch, *shape) for shape in self._spec.inputs)
        try:
            with self._host.batch(batch):
                yield OnnxBatch(
                    self._session,
                    shapes,
                    self._way,
                    drawn=self._drawn,
                    counted=self._counted,
                    host=self._host,
                )
        except ProbeError:
            raise
        except Exception as error:  # as above
            if any(words in str(error).lower() for words in REFUSALS):
                raise OutOfMemory(f"ONNX Runtime: {first_line(error)}") from error
            raise ModelFails(f"ONNX Runtime, at batch {batch}: {first_line(error)}") from error


class OnnxBatch:
    """One batch size: what `probes.throughput.direct.trials.Prepared` says."""

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - a library without types
        shapes: tuple[tuple[int, ...], ...],
        way: Way,
        *,
        drawn: torch.Generator,
        counted: TorchRunner,
        host: HostMemory,
    ) -> None:
        self._session, self._shapes, self._way = session, shapes, way
        self._drawn, self._counted, self._host = drawn, counted, host
        self._tensors = [torch.empty(shape, dtype=DTYPES[way.precision]) for shape in shapes]
        self._given = {f"input{place}": one.numpy() for place, one in enumerate(self._tensors)}
        self.fresh()

    def fresh(self) -> None:
        """Normal inputs, drawn again, in the same arrays."""
        for tensor in self._tensors:
            tensor.normal_(generator=self._drawn)

    def trial_s(self) -> float:
        """Seconds of one call of the session, which ends when its outputs are in host memory."""
        run, given = self._session.run, self._given
        began = perf_counter()
        found = run(None, given)
        took = perf_counter() - began
        del found
        return took

    def pass_s(self) -> float | Unknown:
        """Not readable through a session."""
        return Unknown("ONNX Runtime doesn't show the device's clock")

    def doubt(self) -> str:
        """What to doubt about its outputs."""
        return not_finite([torch.from_numpy(one) for one in self._session.run(None, self._given)])

    def work(self) -> Work | Unknown:
        """What one pass asks for, counted in torch."""
        return self._counted.count(self._shapes)

    def peak_bytes(self) -> int | Unknown:
        """Of the process on the CPU, the most so far."""
        if self._way.device == "cpu":
            return self._host.peak_bytes()
        return Unknown("ONNX Runtime doesn't report its device memory")
