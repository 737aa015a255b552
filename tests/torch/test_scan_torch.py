"""The parts of a throughput scan that need torch: models, counted work, runners, ONNX, a whole worker."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from probes.cli import program, throughput
from probes.core.errors import Exit, LibraryMissing, ModelFails, OutOfMemory, Unsupported, UsageError
from probes.core.unknown import Unknown
from probes.measure import supervisor
from probes.measure.device import TorchWorkbench
from probes.throughput import measure_ceilings
from probes.throughput.ceilings import Ceilings
from probes.throughput.direct import onnx_runner, worker
from probes.throughput.direct.models import FEATURES, PARTICLES, SPECS, Spec, build_model, nearest, spec_of
from probes.throughput.direct.results import BatchRow, ModelFacts, Way, Work, latest
from probes.throughput.direct.torch_runner import HostMemory, TorchRunner, work
from probes.throughput.direct.trials import SeriesEnd

CPU = Way("cpu", "pytorch", "fp32", "resident")
SMALL = Spec("small", ((16,),), lambda: torch.nn.Linear(16, 4))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def runner(spec: Spec = SMALL, way: Way = CPU) -> TorchRunner:
    return TorchRunner(spec, way, seed=3, bench=TorchWorkbench(has_gpu=False))


# ---- models --------------------------------------------------------------------------------------------


def test_the_command_line_offers_the_models_that_there_are() -> None:
    assert set(throughput.MODELS) == set(SPECS)


def test_nearest_neighbours_are_those_of_a_plain_search() -> None:
    points = torch.randn(2, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    distances = torch.cdist(points.transpose(1, 2), points.transpose(1, 2))
    for one in distances:
        one.fill_diagonal_(torch.inf)
    assert torch.equal(nearest(points, 4).sort()[0], distances.topk(4, largest=False)[1].sort()[0])


@torch.no_grad()
def test_particlenet_ignores_absent_particles_and_the_order_of_the_others() -> None:
    net = build_model(SPECS["particlenet"], seed=5, dtype=torch.float64, device="cpu")
    draw = torch.Generator().manual_seed(2)
    points = torch.randn(2, 2, PARTICLES, dtype=torch.float64, generator=draw)
    features = torch.randn(2, FEATURES, PARTICLES, dtype=torch.float64, generator=draw)
    mask = torch.ones(2, 1, PARTICLES, dtype=torch.float64)
    mask[:, :, 60:] = 0
    found = net(points, features, mask)
    assert found.sum(1).tolist() == pytest.approx([1.0, 1.0])
    other = features.clone()
    other[:, :, 60:] = 100.0
    assert torch.allclose(net(points, other, mask), found)
    order = torch.randperm(PARTICLES, generator=draw)
    assert torch.allclose(net(points[:, :, order], features[:, :, order], mask[:, :, order]), found)


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"product"}))
@torch.no_grad()
def test_every_model_runs_on_its_inputs_in_every_precision(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        spec = SPECS[name]
        module = build_model(spec, seed=1, dtype=dtype, device="cpu")
        out = module(*(torch.randn(2, *shape).to(dtype) for shape in spec.inputs))
        assert torch.isfinite(out).all()
        assert out.dtype == dtype


def test_weights_are_the_same_for_a_seed_and_others_for_another() -> None:
    a, b, c = (build_model(SMALL, seed=seed, dtype=torch.float32, device="cpu").weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_torchscript_file_is_a_model_and_anything_else_is_refused(tmp_path: Path) -> None:
    net = torch.nn.Linear(6, 2)
    torch.jit.save(torch.jit.trace(net, torch.zeros(1, 6)), tmp_path / "net.pt")
    spec = spec_of(str(tmp_path / "net.pt"), ((6,),))
    with runner(spec).at(3) as prepared:
        assert prepared.trial_s() > 0
        counted = prepared.work()
    assert isinstance(counted, Work)
    assert counted.flop == 2 * 3 * 6 * 2
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04nothing")
    with pytest.raises(UsageError, match=r"bad\.pt can't be read as TorchScript"):
        spec_of(str(tmp_path / "bad.pt"), ((6,),)).build()


# ---- counted work --------------------------------------------------------------------------------------


def test_a_products_work_is_exact() -> None:
    counted = work(torch.nn.Linear(32, 8, bias=False), [torch.zeros(4, 32)], None)
    assert counted == Work(
        flop=2 * 4 * 32 * 8,
        op_bytes=4 * (4 * 32 + 32 * 8 + 4 * 8),
        least_bytes=4 * (4 * 32 + 32 * 8 + 4 * 8),
        input_bytes=4 * 4 * 32,
        operations=1,
    )


class Views(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 8).t().unsqueeze(0).expand(5, 8, 2)


class Picks(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(0, torch.zeros(2, dtype=torch.int64, device=x.device))


def test_views_move_nothing_and_gathers_read_what_they_pick() -> None:
    found = work(Views(), [torch.zeros(16)], None)
    assert isinstance(found, Work)
    assert (found.op_bytes, found.operations) == (0, 0)
    found = work(Picks(), [torch.zeros(1_000_000)], None)
    assert isinstance(found, Work)
    assert found.op_bytes < 200


@pytest.mark.parametrize("name", ["particlenet", "mlp"])
def test_work_is_in_proportion_to_the_batch_and_the_same_in_inference_mode(name: str) -> None:
    one = runner(SPECS[name])
    shapes = [tuple((batch, *shape) for shape in SPECS[name].inputs) for batch in (1, 8)]
    few, many = (one.count(shape) for shape in shapes)
    assert isinstance(few, Work)
    assert isinstance(many, Work)
    assert many.flop == 8 * few.flop
    assert many.operations == few.operations
    with torch.inference_mode():
        assert one.count(shapes[0]) == few


def test_autocast_halves_the_bytes_of_products_and_counts_its_casts() -> None:
    whole, cast = runner(SPECS["mlp"]), runner(SPECS["mlp"], replace(CPU, precision="autocast"))
    shapes = ((512, 2048),)
    a, b = whole.count(shapes), cast.count(shapes)
    assert isinstance(a, Work)
    assert isinstance(b, Work)
    assert a.flop == b.flop
    assert b.operations > a.operations


def test_a_pass_that_cannot_be_counted_is_unknown() -> None:
    assert "can't be counted" in str(work(torch.nn.Linear(3, 3), [torch.zeros(1, 5)], None))


# ---- runners -------------------------------------------------------------------------------------------


def test_fresh_inputs_are_normal_and_new_in_every_trial() -> None:
    with runner().at(4096) as prepared:
        first = prepared._given[0].clone()
        prepared.fresh()
        second = prepared._given[0]
    assert not torch.equal(first, second)
    for given in (first, second):
        assert abs(float(given.mean())) < 0.02
        assert float(given.std()) == pytest.approx(1.0, abs=0.02)


def test_a_trial_runs_the_model_once_on_its_inputs() -> None:
    seen = []

    class Spy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.clone())
            return x

    one = runner(Spec("spy", ((3,),), Spy))
    with one.at(2) as prepared:
        seen.clear()
        assert prepared.trial_s() > 0
        assert len(seen) == 1
        assert torch.equal(seen[0], prepared._given[0])
        assert isinstance(prepared.pass_s(), Unknown)


FAULTS = """
import resource
import torch
from probes.throughput.direct.torch_runner import settle_allocator

settle_allocator()
torch.set_num_threads(1)
net = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(8)))
given = torch.ones(1 << 20)
with torch.inference_mode():
    for turn in range(20):
        net(given)
        if turn == 9:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_small_batch_does_not_pay_for_new_pages_because_no_large_one_came_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert int(done.stdout) < 2000  # of ten passes that take 4 MiB tensors; unsettled it is mostly 60,000


def test_refused_memory_is_our_own_error() -> None:
    with pytest.raises(OutOfMemory, match="a pass of batch"), runner().at(2**50):
        pass


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_file_whose_shapes_are_wrong_is_a_message_and_not_a_traceback(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(6, 2), torch.zeros(1, 6)), tmp_path / "net.pt")
    spec = spec_of(str(tmp_path / "net.pt"), ((7,),))
    with (
        pytest.raises(ModelFails, match=r"net\.pt fails at batch 2: .+") as caught,
        runner(spec).at(2) as prepared,
    ):
        prepared.trial_s()
    assert "--shape" in caught.value.hint


def test_outputs_that_are_not_finite_are_doubted() -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"good": x, "bad": x / 0}

    with runner(Spec("broken", ((3,),), Broken)).at(2) as prepared:
        assert prepared.doubt() == "the model's outputs hold NaN or infinity"
    with runner().at(2) as prepared:
        assert prepared.doubt() == ""


def test_a_batch_that_the_one_before_says_will_not_fit_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    status, meminfo = tmp_path / "proc/self/status", tmp_path / "proc/meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 5000000 kB\n")
    status.write_text("VmHWM:\t  100000 kB\n")
    memory = HostMemory(tmp_path)
    with memory.batch(1):
        status.write_text("VmHWM:\t 1100000 kB\n")
    with memory.batch(2):
        status.write_text("VmHWM:\t 2100000 kB\n")
    with pytest.raises(OutOfMemory, match="it would take about"), memory.batch(4):
        pass


def test_autocast_and_precisions_reach_the_model() -> None:
    seen = []

    class Spy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            seen.append((x.dtype, found.dtype))
            return found

    spec = Spec("spy", ((8,),), lambda: Spy(8, 8))
    for precision in ("fp32", "bf16", "autocast"):
        with runner(spec, replace(CPU, precision=precision)).at(2) as prepared:
            prepared.trial_s()
    assert seen == [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ]


def test_float32_products_are_whole_unless_tf32_is_asked_for() -> None:
    before = torch.get_float32_matmul_precision()
    with measure_ceilings.float32_as("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        with measure_ceilings.float32_as("fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == before
    assert "TF32" in str(measure_ceilings.supports("cpu", "tf32"))


# ---- ONNX Runtime --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["particlenet", "mlp"])
def test_the_exported_model_computes_what_torch_computes_at_any_batch(name: str) -> None:
    way = Way("cpu", "onnxruntime", "fp32", "resident")
    one = onnx_runner.OnnxRunner(SPECS[name], way, seed=3, threads=1, counted=runner(SPECS[name]))
    for batch in (1, 3):
        with one.at(batch) as prepared, torch.no_grad():
            ours = one._counted.module(*prepared._tensors)
            (theirs,) = one._session.run(None, prepared._given)
            assert torch.allclose(ours, torch.from_numpy(theirs), rtol=1e-3, atol=1e-4)
            assert prepared.trial_s() > 0


def test_what_onnx_runtime_lacks_is_refused_with_a_reason() -> None:
    for precision in ("bf16", "autocast", "tf32"):
        with pytest.raises(Unsupported):
            onnx_runner.refuse(Way("cpu", "onnxruntime", precision, "resident"))
    with pytest.raises(LibraryMissing, match="no provider for the gpu"):
        onnx_runner.provider("gpu")


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(LibraryMissing) as caught:
        onnx_runner.runtime()
    assert caught.value.hint == "pip install onnxruntime"


class Complex(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x.view(-1, 4, 4)).abs()


def test_a_model_that_cannot_be_exported_is_absent_and_not_a_crash() -> None:
    spec = Spec("complex", ((16,),), Complex)
    with pytest.raises(Unsupported, match="can't be exported"):
        onnx_runner.exported(spec, Way("cpu", "onnxruntime", "fp32", "resident"), 1)


# ---- whole ---------------------------------------------------------------------------------------------


def job(way: Way | None, **other: object) -> worker.ScanJob:
    made = worker.ScanJob(
        way=way,
        devices=("cpu",),
        model="mlp",
        shapes=(),
        batches=(1, 2),
        trials=3,
        longest_s=30.0,
        aim=0.0,
        seed=1,
        threads=1,
        pci_id=Unknown("no GPU"),
        amd=False,
        cpu_name="a CPU",
    )
    return replace(made, **other)  # type: ignore[arg-type]


def oversee(one: worker.ScanJob) -> supervisor.JobResult[worker.Message]:
    return supervisor.run_job(
        one,
        worker.parse,
        limit_s=600.0,
        on_record=lambda _: None,
        command=supervisor.module_command(worker.__name__),
    )


def test_a_worker_measures_a_way_in_a_process_of_its_own() -> None:
    ended = oversee(job(CPU))
    facts, *rows, last = ended.records
    assert isinstance(facts, ModelFacts)
    assert facts.weight_bytes == 8 * 2048 * 2048 * 4
    found = latest(row for row in rows if isinstance(row, BatchRow))
    assert [(row.batch, len(row.wall_s)) for row in found] == [(1, 3), (2, 3)]
    assert last == SeriesEnd("finished")


def test_a_worker_says_what_is_absent_and_ends_well() -> None:
    ended = oversee(job(Way("cpu", "pytorch", "tf32", "resident")))
    (last,) = ended.records
    assert isinstance(last, SeriesEnd)
    assert last.end == "absent"


def test_the_ceilings_of_this_cpu_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure_ceilings, "EFFORT", replace(measure_ceilings.EFFORT, samples=5, budget_s=0.05)
    )
    monkeypatch.setattr(measure_ceilings, "SIDES", {"cpu": (64, 128)})
    monkeypatch.setattr(measure_ceilings, "COPY_BYTES", {"cpu": 2**22})
    found = measure_ceilings.measure(TorchWorkbench(has_gpu=False), ["cpu"], cpu_name="a CPU")
    assert isinstance(found, Ceilings)
    (cpu,) = found.devices
    for rate in (cpu.flops("fp32"), cpu.memory, cpu.launches):
        assert not isinstance(rate, Unknown)
        assert rate.median > 1e3
    assert isinstance(cpu.flops("tf32"), Unknown)
    assert isinstance(cpu.to_device, Unknown)


# the worker, with ceilings as small as in the test above: at full size they take most of a scan
FEW_CEILINGS = """
import runpy
from dataclasses import replace
from probes.throughput import measure_ceilings as here
here.EFFORT = replace(here.EFFORT, samples=5, budget_s=0.05)
here.SIDES, here.COPY_BYTES = {"cpu": (64, 128)}, {"cpu": 2**22}
runpy.run_module("probes.throughput.direct.worker", run_name="__main__")
"""


def test_the_command_scans_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(module: str) -> supervisor.Command:
        assert module == "probes.throughput.direct.worker"
        return lambda descriptor: [sys.executable, "-c", FEW_CEILINGS, str(descriptor), str(os.getpid())]

    monkeypatch.setattr(supervisor, "module_command", command)
    words = "throughput --model mlp --batches 1,2 --trials 3 --aim 0 --device cpu --precision fp32"
    words += " --backend pytorch"
    code = program.main([*words.split(), "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 0, said.err
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert len(report["direct"]["series"][0]["rows"][1]["wall_s"]) == 3
    assert report["ceilings"]["devices"][0]["memory"]["seconds"]
    assert str(file) in said.out


def test_the_command_line_starts_its_own_workers(tmp_path: Path) -> None:
    """As a user types it. Nothing is measured of a GPU that isn't there, so this takes no ceilings' time."""
    words = "throughput --model mlp --device gpu --precision fp32 --backend pytorch --out"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "probes", *words.split(), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == Exit.DEVICE, done.stderr
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert report["machine"]["torch"]["version"] == torch.__version__
    assert report["ceilings"]["devices"] == []
    assert [series["end"] for series in report["direct"]["series"]] == ["absent"]
    assert str(file) in done.stdout
