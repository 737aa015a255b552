import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import FakeBench
from probe_samples import done, report
from probe_trees import lay

from probes.core.unknown import Unknown
from probes.hardware import host, nvml
from probes.measure import background_load
from probes.measure.background_load import Observation, judge
from probes.measure.probe_worker import with_noise
from probes.records.rows import Gap, Measurement, Noise
from probes.reports.kinds import RUN

CALM = Observation(
    at_s=0.0,
    cpus=16,
    busy_cpu_s=100.0,
    own_cpu_s=10.0,
    gpu_processes=1,
    foreign_percent=0,
    link_bytes_per_s=10**6,
    foreign_vram_bytes=600 * 2**20,
    slowdowns=(),
    kernel_s=20e-6,
    copy_s=30e-6,
)
LATER = replace(CALM, at_s=1.0, busy_cpu_s=101.0, own_cpu_s=11.0)


def test_a_calm_machine_raises_no_flag() -> None:
    assert judge(CALM, LATER) == Noise((), ())


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"gpu_processes": 2}, "foreign: 1 more process on the GPU"),
        ({"foreign_percent": 40}, "foreign: another process used 40% of the GPU"),
        ({"link_bytes_per_s": 64 * 10**9}, "foreign: 64.0 GB/s on the link"),
        ({"kernel_s": 2.4e-3}, "foreign: a small kernel had to wait 2.4 ms"),
        ({"copy_s": 1.1e-3}, "foreign: a small copy had to wait 1.1 ms"),
        ({"foreign_vram_bytes": 8 * 2**30}, "foreign: other processes' VRAM changed by 7.41 GiB"),
        ({"busy_cpu_s": 110.0}, "host: other programs used 9.0 of 16 CPUs"),
        ({"slowdowns": ("power cap",)}, "throttled: power cap"),
    ],
)
def test_each_disturbance_is_flagged_by_its_own_signal(changes: dict[str, object], flag: str) -> None:
    (found,) = judge(CALM, replace(LATER, **changes)).flags  # type: ignore[arg-type]
    assert found.startswith(flag)


def test_a_disturbance_that_ended_during_the_row_is_flagged_too() -> None:
    before = replace(CALM, link_bytes_per_s=64 * 10**9, kernel_s=2e-3, slowdowns=("power cap",))
    assert len(judge(before, LATER).flags) == 3


def test_unknown_signals_raise_no_flag_and_are_reported() -> None:
    blind = replace(
        LATER,
        busy_cpu_s=Unknown("no /proc/stat"),
        gpu_processes=Unknown("no NVML"),
        foreign_percent=Unknown("no NVML"),
        link_bytes_per_s=Unknown("no NVML"),
        foreign_vram_bytes=Unknown("no GPU"),
        slowdowns=Unknown("gpu_metrics of form 9.1 isn't known here"),
        kernel_s=Unknown("no GPU"),
        copy_s=Unknown("no GPU"),
    )
    found = judge(blind, blind)
    assert found.flags == ()
    assert len(found.unwatched) == 7


def test_a_row_too_short_for_the_kernels_clock_says_nothing_of_the_host() -> None:
    assert judge(CALM, replace(LATER, at_s=0.01, busy_cpu_s=101.5)).flags == ()


ROW = Measurement("vram_read", 4096, 4096, 1, "device", (1e-5,) * 20, (1e-5,) * 20)


def test_every_row_gets_its_noise_and_other_records_pass() -> None:
    looks = iter([CALM, replace(LATER, gpu_processes=3), LATER])

    class Watching:
        def observe(self) -> Observation:
            return next(looks)

    rows = list(with_noise(iter([ROW, Gap("x", 1, "y"), ROW]), Watching()))  # type: ignore[arg-type]
    assert [getattr(row, "noise", None) and len(row.noise.flags) for row in rows] == [1, None, 1]  # type: ignore[union-attr]


def test_flags_are_doubts_in_the_table_and_counted_below() -> None:
    noisy = replace(ROW, noise=Noise(("foreign: a small kernel had to wait 2 ms",), ("throttling: no NVML",)))
    text = RUN.text(report(done("transfer", noisy, replace(ROW, payload_bytes=8192, noise=Noise((), ())))))
    assert "noise, 1 times in 2 rows: foreign: a small kernel" in text
    assert "not watched: throttling: no NVML" in text


def test_processor_time_is_read_without_idle_and_waiting(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/stat": "cpu  100 20 30 9999 888 7 3 0 0 0\ncpu0 1 2 3 4\n"})
    assert host.machine_cpu_s(tmp_path) == pytest.approx(160 / 100)
    assert isinstance(host.machine_cpu_s(tmp_path / "none"), Unknown)


def test_without_a_gpu_only_the_host_is_watched(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/stat": "cpu  1 1 1 1 1 1 1\n"})
    look = background_load.BackgroundLoad(FakeBench(has_gpu=False), tmp_path, "0000:03:00.0").observe()
    assert isinstance(look.kernel_s, Unknown)
    assert isinstance(look.busy_cpu_s, float)


class NoLibrary:
    """An NVML that knows nothing: every function is missing."""

    class Words:
        restype: object = None

        def __call__(self, code: int) -> bytes:
            return b"Not Supported"

    nvmlErrorString = Words()

    def nvmlDeviceGetHandleByPciBusId_v2(self, *_: object) -> int:
        return 3


def test_what_nvml_refuses_is_unknown_in_its_own_words() -> None:
    found = nvml.Nvml(NoLibrary())  # type: ignore[arg-type]
    assert found.cards() == ()
    card = nvml.NvmlCard(found, "x")
    for reading in (card.link(), card.slowdowns(), card.computing(), card.uses(0)):
        assert reading == Unknown("NVML: Not Supported")
    assert card.link_bytes_per_s(up=True) == Unknown("NVML: Not Supported")


class OfProcesses(NoLibrary):
    """An NVML of one card that two processes used; it says how many first, as NVML does."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def nvmlDeviceGetHandleByPciBusId_v2(self, *_: object) -> int:
        return 0

    def nvmlDeviceGetProcessUtilization(self, _: object, each: Any, count: Any, since: object) -> int:
        if each is None:
            count._obj.value = 2
            return self.code or nvml.INSUFFICIENT_SIZE
        for one, (pid, at_us) in zip(each, ((7, 1_000), (8, 2_000)), strict=True):
            one.pid, one.time_us, one.sm, one.memory = pid, at_us, 40, 5
        return 0


def test_what_processes_did_since_the_last_reading_is_theirs_alone() -> None:
    card = nvml.NvmlCard(nvml.Nvml(OfProcesses()), "x")  # type: ignore[arg-type]
    assert card.uses(0) == tuple(
        nvml.ProcessUtilization(pid, at, 40, 5) for pid, at in ((7, 1_000), (8, 2_000))
    )
    assert card.uses(1_000) == (nvml.ProcessUtilization(8, 2_000, 40, 5),)
    idle = nvml.NvmlCard(nvml.Nvml(OfProcesses(nvml.NOT_FOUND)), "x")  # type: ignore[arg-type]
    assert idle.uses(0) == ()


def test_the_other_side_of_a_run_in_turns_is_no_foreign_load(tmp_path: Path) -> None:
    """Of its own process it may use any number of processors, whose time counts as this side's."""
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc/77").mkdir(parents=True)
    stat = tmp_path / "proc/77/stat"
    stat.write_text(f"77 (a (b) c) S {'0 ' * 10}{300 * ticks} {100 * ticks} 0 0\n")
    alone, beside = (
        background_load.BackgroundLoad(FakeBench(), tmp_path, "0000:03:00.0", beside=pid).observe()
        for pid in (0, 77)
    )
    assert beside.own_cpu_s - alone.own_cpu_s == pytest.approx(400, abs=5)
    assert isinstance(beside.foreign_vram_bytes, Unknown)
    assert isinstance(alone.foreign_vram_bytes, int)
