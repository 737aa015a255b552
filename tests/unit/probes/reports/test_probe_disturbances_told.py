"""Disturbances by their amounts and directions, and the report about a card that was asked for too much."""

from dataclasses import replace

import pytest
from probe_samples import done, report

from probes.core.unknown import Unknown
from probes.measure.background_load import Observation, judge
from probes.records.rows import Expectation, Record, Request, Stop
from probes.reports import run_findings, run_headline

MIB, GIB = 2**20, 2**30
BEFORE = Observation(
    at_s=100.0,
    cpus=16,
    busy_cpu_s=100.0,
    own_cpu_s=10.0,
    gpu_processes=1,
    foreign_percent=0,
    link_bytes_per_s=10**6,
    foreign_vram_bytes=8 * GIB,
    slowdowns=(),
    kernel_s=20e-6,
    copy_s=30e-6,
)
AFTER = replace(BEFORE, at_s=102.0, busy_cpu_s=102.0, own_cpu_s=12.0)


def flags(before: Observation, after: Observation) -> list[str]:
    return list(judge(before, after).flags)


def test_load_of_the_host_is_what_others_used_over_the_time_that_passed() -> None:
    assert flags(BEFORE, AFTER) == []
    loaded = flags(BEFORE, replace(AFTER, busy_cpu_s=120.0))
    assert loaded == ["host: other programs used 9.0 of 16 CPUs"]


@pytest.mark.parametrize(("processes", "said"), [(2, "1 more process on"), (3, "2 more processes on")])
def test_other_processes_are_counted_without_this_one(processes: int, said: str) -> None:
    assert flags(BEFORE, replace(AFTER, gpu_processes=processes)) == [f"foreign: {said} the GPU"]


@pytest.mark.parametrize("n_bytes", [7 * GIB, 9 * GIB])
def test_vram_that_others_gave_back_is_reported_as_vram_that_they_took(n_bytes: int) -> None:
    found = flags(BEFORE, replace(AFTER, foreign_vram_bytes=n_bytes))
    assert found == ["foreign: other processes' VRAM changed by 1.00 GiB"]


def test_the_longest_wait_of_both_looks_is_reported() -> None:
    found = flags(replace(BEFORE, kernel_s=3e-3), replace(AFTER, kernel_s=2e-3, copy_s=Unknown("none")))
    assert found == ["foreign: a small kernel had to wait 3.0 ms"]


def test_slowdowns_are_reported_once_and_in_order() -> None:
    words = ("thermal", "power cap", "hot memory", "brake", "current")
    found = flags(replace(BEFORE, slowdowns=words), replace(AFTER, slowdowns=words[:2]))
    assert found == [f"throttled: {word}" for word in sorted(words)]


def asked(*, granted: bool, behaviour: str = "refuses") -> list[Record]:
    """One block granted or refused unlike the oversize request, so that neither represents the other."""
    expected = Expectation(behaviour, "Cards of this kind refuse.", "the manual")  # type: ignore[arg-type]
    return [
        expected,
        Request("block", MIB, 0, GIB, None, not granted, ""),
        Request("forced", MIB, 0, GIB, None, True, ""),
        Request("oversize", 2 * GIB, 0, GIB, None, granted, ""),
        Stop("target", GIB, "as far as asked"),
    ]


def test_the_drivers_own_answer_is_held_against_what_is_expected() -> None:
    said = run_findings.findings(report(done("spill", *asked(granted=False))))
    assert said[1].startswith("Around the limit: of 1 requests")
    assert said[2] == (
        "The driver itself: one request for 2.00 GiB with 1.00 GiB free was "
        "refused with out of memory: it does not spill."
    )
    assert said[3] == "That is as expected here. Cards of this kind refuse."
    other = run_findings.findings(report(done("spill", *asked(granted=True))))
    assert other[2].endswith("was granted: it would spill.")
    assert other[3] == "That is NOT as expected here. Cards of this kind refuse."


def test_an_answer_without_an_expectation_is_neither_expected_nor_not() -> None:
    for records in (asked(granted=False)[1:], asked(granted=False, behaviour="unknown")):
        assert not any("expected" in one for one in run_findings.findings(report(done("spill", *records))))
        assert "expected" not in run_headline.headline(report(done("spill", *records)))[1]


@pytest.mark.parametrize(
    ("granted", "sentence"),
    [
        (
            False,
            "When VRAM is full the driver refuses: a request for 2 GiB with 1 GiB free was answered with out "
            "of memory, as expected on this system, so nothing moves to system RAM unless the program puts "
            "it there.",
        ),
        (
            True,
            "When VRAM is full the driver spills silently: a request for 2 GiB with 1 GiB free was granted, "
            "which is NOT what is expected on this system.",
        ),
    ],
)
def test_what_a_full_card_does_is_said_with_the_request_that_showed_it(granted: bool, sentence: str) -> None:
    assert run_headline.headline(report(done("spill", *asked(granted=granted))))[1] == sentence


def test_a_report_without_an_oversize_request_says_nothing_of_the_drivers_answer() -> None:
    records = [
        one for one in asked(granted=False) if getattr(one, "purpose", "") not in ("oversize", "forced")
    ]
    said = run_findings.findings(report(done("spill", *records)))
    assert not any(one.startswith(("The driver itself", "Around the limit")) for one in said)
    assert run_headline.headline(report(done("spill", *records)))[1].startswith(
        "Asked for more device memory: "
    )
