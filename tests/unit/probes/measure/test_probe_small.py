"""Small work, which plans take the cost of launches from: measured with `transfer`, kept beside its rows."""

import pytest
from probe_fakes import SMALL_S, FakeBench

from probes.measure import transfer
from probes.records.schema import Settings
from probes.records.stats import median

QUICK = Settings(quick=True, seed=1, vram_cap_bytes=None)
FULL = Settings(quick=False, seed=1, vram_cap_bytes=None)


def test_each_kind_of_small_work_is_timed_by_both_clocks() -> None:
    found = {one.name: one for one in transfer.small(FakeBench(), FULL)}
    assert found.keys() == SMALL_S.keys()
    for name, one in found.items():
        assert isinstance(one.device_s, tuple)
        assert median(one.device_s) == pytest.approx(SMALL_S[name])
        assert median(one.wall_s) == pytest.approx(SMALL_S[name] + 1e-5)


def test_a_gpu_without_kernels_that_unpack_has_the_rest_measured() -> None:
    bench = FakeBench(lacks_small=("unpack",))
    assert [one.name for one in transfer.small(bench, FULL)] == ["layers", "product"]


def test_a_quick_run_compiles_no_kernel() -> None:
    assert [one.name for one in transfer.small(FakeBench(), QUICK)] == ["layers", "product"]


def test_nothing_is_launched_without_a_gpu() -> None:
    assert not list(transfer.small(FakeBench(has_gpu=False), FULL))
