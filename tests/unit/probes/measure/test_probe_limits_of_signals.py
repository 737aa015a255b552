"""Thresholds, units and memory bounds: what is exactly at a limit, just below it and just above."""

from dataclasses import replace

import pytest
from probe_fakes import FakeBench
from test_probe_noise import CALM, LATER

from probes.core import units
from probes.core.unknown import Unknown
from probes.measure import spill
from probes.measure.background_load import judge
from probes.measure.workbench import STEP, Pattern, signed
from probes.records.rows import Request

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("signal", "at", "above"),
    [
        ("link_bytes_per_s", 100 * 10**6, 100 * 10**6 + 1),
        ("kernel_s", 500e-6, 501e-6),
        ("copy_s", 500e-6, 501e-6),
        ("foreign_percent", 0, 1),
        ("gpu_processes", 1, 2),
        ("foreign_vram_bytes", (600 + 256) * MIB, (600 + 256) * MIB + 1),
        ("foreign_vram_bytes", (600 - 256) * MIB, (600 - 256) * MIB - 1),
        ("busy_cpu_s", 101.0 + 4.0, 101.0 + 4.001),
    ],
)
def test_signal_is_a_disturbance_above_its_threshold_only(signal: str, at: float, above: float) -> None:
    assert judge(CALM, replace(LATER, **{signal: at})).flags == ()  # type: ignore[arg-type]
    assert len(judge(CALM, replace(LATER, **{signal: above})).flags) == 1  # type: ignore[arg-type]


def test_half_a_processor_on_a_small_host_is_no_disturbance() -> None:
    small, later = replace(CALM, cpus=1), replace(LATER, cpus=1)
    assert judge(small, replace(later, busy_cpu_s=101.5)).flags == ()
    assert judge(small, replace(later, busy_cpu_s=101.6)).flags == (
        "host: other programs used 0.6 of 1 CPUs",
    )


def test_look_that_followed_too_soon_says_nothing_of_the_host() -> None:
    soon = replace(CALM, busy_cpu_s=199.0)
    assert judge(CALM, replace(soon, at_s=0.099)).flags == ()
    assert len(judge(CALM, replace(soon, at_s=0.1)).flags) == 1


def test_processes_and_slowdowns_are_those_of_both_looks() -> None:
    before = replace(CALM, gpu_processes=4, slowdowns=("b", "a"))
    flags = judge(before, replace(LATER, gpu_processes=3, slowdowns=("a",))).flags
    assert flags == ("foreign: 3 more processes on the GPU", "throttled: a", "throttled: b")


@pytest.mark.parametrize(
    ("signal", "what"),
    [
        ("gpu_processes", "processes on the GPU"),
        ("foreign_percent", "their use of it"),
        ("link_bytes_per_s", "link traffic"),
        ("foreign_vram_bytes", "other processes' VRAM"),
        ("slowdowns", "throttling"),
        ("kernel_s", "waiting kernels"),
        ("busy_cpu_s", "host load"),
    ],
)
def test_missing_signal_is_named_with_its_reason_and_raises_no_flag(signal: str, what: str) -> None:
    found = judge(CALM, replace(LATER, **{signal: Unknown("not here")}))  # type: ignore[arg-type]
    assert (found.flags, found.unwatched) == ((), (f"{what}: not here",))
    assert judge(replace(CALM, **{signal: Unknown("not here")}), LATER).flags == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_bytes", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1.00 kB", "1000 B"),
        (1023, "1.02 kB", "1023 B"),
        (1024, "1.02 kB", "1.00 KiB"),
        (-1500, "-1.50 kB", "-1.46 KiB"),
        (5 * 10**6, "5.00 MB", "4.77 MiB"),
        (3 * GIB, "3.22 GB", "3.00 GiB"),
        (10**12, "1.00 TB", "931.32 GiB"),
        (5 * 10**15, "5000.00 TB", "4547.47 TiB"),
    ],
)
def test_bytes_are_reported_with_the_unit_that_reads_best(n_bytes: int, decimal: str, binary: str) -> None:
    assert units.decimal_bytes(n_bytes) == decimal
    assert units.binary_bytes(n_bytes) == binary


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(2.5, "2.5 s"), (1.0, "1 s"), (0.9, "900 ms"), (1e-3, "1 ms"), (9e-4, "900 us"), (1e-6, "1 us"),
     (4e-7, "400 ns"), (0.0, "0 ns"), (-0.002, "-2 ms")],
)  # fmt: skip
def test_spans_are_reported_with_the_unit_that_reads_best(seconds: float, told: str) -> None:
    assert units.duration(seconds) == told
    assert units.gb_per_s(5 * 10**9, 2.0) == 2.5


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("4GiB", 4 * GIB), (" 512 MiB ", 512 * MIB), ("4GB", 4 * 10**9), ("1.5kB", 1500), ("1KiB", 1024),
     ("3TB", 3 * 10**12), ("1KB", 1000), ("77", 77), ("77B", 77)],
)  # fmt: skip
def test_sizes_are_read_in_both_kinds_of_units(text: str, n_bytes: int) -> None:
    assert units.parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "1 XB", "1e9", "4GiBs", "4 Gi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "read"),
    [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64, 0), (-1, -1)],
)
def test_integers_wrap_as_the_device_holds_them(value: int, read: int) -> None:
    assert signed(value) == read


@pytest.mark.parametrize(("first", "words"), [(0, 1), (3, 1), (0, 7), (5, 8), (11, 0)])
def test_sum_in_closed_form_is_the_sum_of_the_words(first: int, words: int) -> None:
    pattern = Pattern(start=12345)
    assert pattern.total(first, words) == signed(sum(STEP * i + 12345 for i in range(first, first + words)))
    assert pattern.plus(7).total(first, words) == signed(pattern.total(first, words) + 7 * words)


@pytest.mark.parametrize(
    ("kind", "asked", "free", "host"),
    [
        ("vram", 5 * GIB, 4 * GIB, GIB),
        ("vram", 4 * GIB, 4 * GIB, 0),
        ("vram", 3 * GIB, 4 * GIB, 0),
        ("pinned", 3 * GIB, 0, 4 * GIB),
        ("pinned", 4 * GIB, 0, 4 * GIB),
        ("pinned", 4 * GIB + 1, 0, 8 * GIB),
        ("pageable", 3 * GIB, 0, 3 * GIB),
    ],
)
def test_most_host_memory_that_a_request_can_take(kind: str, asked: int, free: int, host: int) -> None:
    assert spill.host_bytes(kind, asked, vram_free_bytes=free) == host  # type: ignore[arg-type]


def test_requests_go_round_the_kinds_within_their_range_and_repeat_with_the_seed() -> None:
    limits = spill.Limits(vram_bytes=64 * MIB, host_bytes=32 * MIB, cap_bytes=77)

    def requests(seed: int, spendable: int = 1 << 40):  # type: ignore[no-untyped-def]
        return list(
            spill.ask_around_limits(
                FakeBench(), limits, count=7, seed=seed, host_spendable_bytes=lambda: spendable
            )
        )

    found = requests(1)
    kinds = [request.kind for request in found]
    assert kinds == ["vram", "pinned", "pageable", "vram", "pinned", "pageable", "vram"]
    for request in found:
        limit = 64 * MIB if request.kind == "vram" else 32 * MIB
        assert 0.9 * limit - 2 * MIB <= request.asked_bytes <= 1.5 * limit
        assert request.asked_bytes % (2 * MIB) == 0
    assert [r.asked_bytes for r in requests(1)] == [r.asked_bytes for r in found]
    assert [r.asked_bytes for r in requests(2)] != [r.asked_bytes for r in found]
    refused = requests(1, spendable=0)
    assert all(not request.granted for request in refused if request.kind != "vram")
    assert "memory floor" in refused[1].message
    assert all(request.granted for request in refused if request.kind == "vram")  # they take none of it


@pytest.mark.parametrize(("spendable", "declined"), [(32 * MIB, False), (32 * MIB - 1, True)])
def test_request_is_reported_with_the_cap_of_its_memory_and_declined_above_the_floor_alone(
    spendable: int, declined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "FACTORS", (1.0, 1.0))
    limits = spill.Limits(vram_bytes=64 * MIB, host_bytes=32 * MIB, cap_bytes=77)
    bench = FakeBench()
    vram, pinned, pageable = spill.ask_around_limits(
        bench, limits, count=3, seed=1, host_spendable_bytes=lambda: spendable
    )
    message = pinned.message
    assert bool(message) is declined
    free = bench.vram_bytes
    assert vram == Request("forced", 64 * MIB, 0, free, 77, True, "", "vram")
    assert pinned == Request("forced", 32 * MIB, 0, free, None, not declined, message, "pinned", declined)
    assert pageable == replace(pinned, kind="pageable")
