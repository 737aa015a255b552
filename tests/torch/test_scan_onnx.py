"""ONNX Runtime as a backend of scans: every precision of a CPU; the providers of GPUs by a stand-in."""

import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from probes.core.errors import LibraryMissing, Unsupported
from probes.core.unknown import Unknown
from probes.measure.architectures import Block, Linear
from probes.measure.device import TorchWorkbench
from probes.throughput.direct import onnx_runner
from probes.throughput.direct.models import SPECS, Spec
from probes.throughput.direct.onnx_runner import OnnxRunner
from probes.throughput.direct.results import BatchRow, Mode, Way, latest
from probes.throughput.direct.torch_runner import TorchRunner
from probes.throughput.direct.trials import Repeats, SeriesEnd, rows

SMALL = Spec("small", ((16,),), lambda: torch.nn.Linear(16, 4))
# as `mlp` and `encoder`, which take a minute to export on a busy machine
FEW_LAYERS = Spec("few layers", ((64,),), lambda: torch.nn.Sequential(*(Linear(64) for _ in range(2))))
FEW_BLOCKS = Spec("few blocks", ((16, 64),), lambda: torch.nn.Sequential(*(Block(64, 4) for _ in range(2))))
GPU = {
    "CUDAExecutionProvider": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "MIGraphXExecutionProvider": (
        "MIGraphXExecutionProvider",
        "ROCMExecutionProvider",
        "CPUExecutionProvider",
    ),
    "ROCMExecutionProvider": ("ROCMExecutionProvider", "CPUExecutionProvider"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_cpu(precision: Mode) -> Way:
    return Way("cpu", "onnxruntime", precision, "resident")


def runner(spec: Spec, way: Way) -> OnnxRunner:
    counted = TorchRunner(
        spec, Way("cpu", "pytorch", "fp32", "resident"), seed=1, bench=TorchWorkbench(has_gpu=False)
    )
    return OnnxRunner(spec, way, seed=1, threads=1, counted=counted)


class NoGauges:
    def joules(self) -> Unknown:
        return Unknown("no gauge")

    def busy_percent(self) -> Unknown:
        return Unknown("no gauge")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("spec", [SPECS["particlenet"], FEW_LAYERS, FEW_BLOCKS], ids=lambda spec: spec.name)
def test_every_kind_of_model_is_scanned_in_every_precision_of_a_cpu(spec: Spec, precision: Mode) -> None:
    one = runner(spec, on_cpu(precision))
    *found, end = rows(one, [1, 3], Repeats(2, 60.0), NoGauges())
    assert end == SeriesEnd("finished")
    measured = latest(row for row in found if isinstance(row, BatchRow))
    assert [(row.batch, len(row.wall_s)) for row in measured] == [(1, 2), (3, 2)]
    assert all(not isinstance(row.work, Unknown) for row in measured)


class Session:
    """Notes what it was opened with; `starts` is what it says that it runs on."""

    def __init__(self, model: bytes, options: Any, providers: Sequence[tuple[str, dict[str, int]]]) -> None:
        self.model, self.options, self.providers = model, options, providers
        self.starts = [providers[0][0], "CPUExecutionProvider"]
        Session.last = self

    last: "Session"

    def get_providers(self) -> list[str]:
        return self.starts

    def run(self, names: None, given: dict[str, Any]) -> list[Any]:
        return list(given.values())


class Fallen(Session):
    """A provider whose libraries are missing: ONNX Runtime goes on with the CPU and only logs it."""

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the library by one with these providers."""

    def replace_with(available: Sequence[str], session: type[Session] = Session) -> None:
        library = ModuleType("onnxruntime")
        options = type("SessionOptions", (), {})
        vars(library).update(
            get_available_providers=lambda: list(available), SessionOptions=options, InferenceSession=session
        )
        monkeypatch.setitem(sys.modules, "onnxruntime", library)
        monkeypatch.setattr(onnx_runner, "exported", lambda *_: b"a model")

    return replace_with


@pytest.mark.parametrize(("name", "available"), GPU.items())
def test_a_gpus_session_is_opened_on_the_provider_that_is_there(
    name: str, available: Sequence[str], played: Callable[..., None]
) -> None:
    played(available)
    assert onnx_runner.provider("gpu") == name
    runner(SMALL, Way("gpu", "onnxruntime", "fp16", "copied"))
    options = {"use_tf32": 0} if name.startswith("CUDA") else {}
    assert Session.last.providers == [(name, options)]
    assert Session.last.model == b"a model"


def test_tf32_is_asked_for_on_nvidia_and_refused_elsewhere(played: Callable[..., None]) -> None:
    tf32 = Way("gpu", "onnxruntime", "tf32", "copied")
    played(GPU["CUDAExecutionProvider"])
    runner(SMALL, tf32)
    assert Session.last.providers == [("CUDAExecutionProvider", {"use_tf32": 1})]
    played(GPU["MIGraphXExecutionProvider"])
    with pytest.raises(Unsupported, match="TF32"):
        runner(SMALL, tf32)


def test_a_session_that_falls_back_to_the_cpu_is_not_measured_as_a_gpu(played: Callable[..., None]) -> None:
    played(GPU["ROCMExecutionProvider"], Fallen)
    with pytest.raises(Unsupported, match="ROCMExecutionProvider doesn't start here"):
        runner(SMALL, Way("gpu", "onnxruntime", "fp32", "copied"))


def test_a_library_without_a_gpus_provider_says_what_to_install(played: Callable[..., None]) -> None:
    played(["CPUExecutionProvider"])
    with pytest.raises(LibraryMissing, match="no provider for the gpu") as caught:
        runner(SMALL, Way("gpu", "onnxruntime", "fp32", "copied"))
    for package in ("onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-migraphx"):
        assert package in caught.value.hint


@pytest.mark.parametrize("inputs", ["pinned", "in-place", "resident"])
def test_inputs_that_a_session_would_copy_anyway_are_refused(inputs: Any) -> None:
    with pytest.raises(Unsupported, match="only inputs copied"):
        onnx_runner.refuse(Way("gpu", "onnxruntime", "fp32", inputs))
