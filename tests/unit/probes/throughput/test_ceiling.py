"""Ceilings: rates from raw seconds, and the search for the largest one, on devices that misbehave."""

import random

import pytest

from probes.core.errors import OutOfMemory
from probes.core.unknown import Unknown
from probes.throughput.ceilings import (
    Ceiling,
    Ceilings,
    DeviceCeilings,
    FlopCeiling,
    contenders,
    largest,
    rates,
)


def ceiling(rate: float, *, size: int = 1) -> Ceiling:
    return Ceiling(f"size {size}", 1.0, (1.0 / rate,) * 3, "wall")


def test_a_rate_is_work_over_the_median_time_and_its_error_is_relative_to_it() -> None:
    rng = random.Random(1)
    found = Ceiling("copy", 2e9, tuple(rng.gauss(0.1, 0.001) for _ in range(400)), "device")
    assert found.n == 400
    assert found.median == pytest.approx(2e10, rel=0.001)
    # the median of 400 normal samples with 1 % spread errs by 1.25 * 1 % / 20
    assert found.error is not None
    assert found.error / found.median == pytest.approx(0.0125 / 20, rel=0.3)


def test_a_single_sample_has_no_error() -> None:
    assert Ceiling("copy", 1.0, (0.5,), "wall").error is None


def search(
    by_size: dict[int, float], *, longest_s: float = 1e9
) -> tuple[dict[int, Ceiling] | Unknown, list[int]]:
    tried = []

    def measure(size: int) -> Ceiling:
        tried.append(size)
        if by_size[size] == 0:
            raise OutOfMemory(f"{size} was refused")
        return ceiling(by_size[size], size=size)

    return rates(tuple(by_size), measure, work=float, longest_s=longest_s), tried


def test_the_best_size_counts_and_the_search_ends_where_rates_fall() -> None:
    found, tried = search({1: 10.0, 2: 50.0, 4: 48.0, 8: 30.0, 16: 99.0})
    assert isinstance(found, dict)
    assert (largest(found.values()).median, tried) == (pytest.approx(50.0), [1, 2, 4, 8])


def test_every_size_near_the_best_is_measured_again_under_lasting_load() -> None:
    found, _ = search({1: 10.0, 2: 50.0, 4: 48.0, 8: 46.0, 16: 30.0})
    assert isinstance(found, dict)
    assert contenders(found) == [2, 4, 8]


def test_refused_memory_ends_the_search_and_keeps_the_best() -> None:
    found, tried = search({1: 10.0, 2: 50.0, 4: 0.0, 8: 60.0})
    assert isinstance(found, dict)
    assert (largest(found.values()).of, tried) == ("size 2", [1, 2, 4])
    assert search({1: 0.0, 2: 5.0})[0] == Unknown("1 was refused")


def test_an_operation_that_would_take_too_long_is_not_begun() -> None:
    # 8 / 1 of work would take 8 s by the best rate so far
    _, tried = search({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, longest_s=4.0)
    assert tried == [1, 2, 4]


def test_a_precision_or_device_that_was_not_measured_is_unknown_with_a_reason() -> None:
    none = Unknown("no")
    cpu = DeviceCeilings("cpu", "x", (FlopCeiling("fp32", ceiling(5)),), none, none, none, none)
    assert cpu.flops("fp32") == ceiling(5)
    assert "bf16" in str(cpu.flops("bf16"))
    assert Ceilings((cpu,)).on("cpu") is cpu
    assert "gpu" in str(Ceilings((cpu,)).on("gpu"))
