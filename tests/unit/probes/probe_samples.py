"""Reports and machines to test with."""

from dataclasses import replace

from probes.core.unknown import Unknown
from probes.records.facts import Gpu, KfdNode, Machine, TorchFacts
from probes.records.rows import Pass
from probes.records.schema import Done, Failed, ProbeReport, ProbeRun, Settings, Waived

SETTINGS = Settings(quick=True, seed=7, vram_cap_bytes=None)
GPU = Gpu(
    name="Some GPU",
    target="sm_90",
    pci_id="0000:03:00.0",
    vram_total_bytes=16 * 2**30,
    vram_free_bytes=15 * 2**30,
    l2_bytes=Unknown("not told"),
    integrated=False,
)
CPU_TORCH = TorchFacts("2.6.0", "none", "", 2, (), "this torch is a CPU build")
CUDA_TORCH = TorchFacts("2.11.0", "cuda", "13.0", 16, (GPU,), "")
HIP_TORCH = TorchFacts("2.9.0", "hip", "6.4", 8, (replace(GPU, target="gfx1100"),), "")
MACHINE = Machine(
    host="box",
    kernel="6.12.1",
    wsl=False,
    container=True,
    cpus=2,
    ram_total_bytes=16 * 2**30,
    ram_available_bytes=12 * 2**30,
    cgroup_limit_bytes=Unknown("no limit is set"),
    gpu_driver=Unknown("none is loaded"),
    device_files=(),
    cards=(),
    kfd_nodes=(),
    torch=CPU_TORCH,
)
GIB = 2**30
DEVICE_SHARE = 0.5  # of the wall-clock time
APU_NODE = KfdNode(1, "gfx1151", 128, apu=True)


def machine(**changes: object) -> Machine:
    return replace(MACHINE, **changes)  # type: ignore[arg-type]


def report(*runs: ProbeRun, **changes: object) -> ProbeReport:
    return ProbeReport(2, "0.1.0", "2026-02-08T12:00:00Z", SETTINGS, machine(**changes), runs)


def done(probe: str, *records: object) -> ProbeRun:
    return ProbeRun(probe, Done(), 1.0, tuple(records))  # type: ignore[arg-type]


def failed(code: int, *, wedged: bool = False) -> ProbeRun:
    return ProbeRun("spill", Failed("it broke", "mend it", code, wedged=wedged), 1.0, ())


def waived() -> ProbeRun:
    return ProbeRun("spill", Waived("no GPU to measure"), 0.0, ())


def passes(rows: int, times: dict[str, float], *, noise: float = 0.0) -> list[Pass]:
    return [
        Pass(
            name,  # type: ignore[arg-type]
            rows,
            32,
            GIB,
            0 if name == "resident" else GIB // 4,
            8192,
            "float16",
            (took * DEVICE_SHARE,) * 20,
            tuple(took * (1 + noise * (-1) ** i) for i in range(20)),
            0.0,
        )
        for name, took in times.items()
    ]


TIMES = {"resident": 1e-3, "zero_copy_weights": 20e-3, "zero_copy_all": 22e-3, "streamed": 16e-3}
