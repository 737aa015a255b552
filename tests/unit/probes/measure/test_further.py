"""Rows that scatter get further processes, as long as there is time; rows that agree get none."""

from dataclasses import replace

import pytest
from probe_samples import CPU_TORCH, report

from probes.core.unknown import Unknown
from probes.measure.schedule import MOST_PROCESSES, START_S, FurtherProcess, further_process
from probes.records.rows import Measurement
from probes.records.schema import Done, Failed, ProbeReport, ProbeRun

STEADY, WILD = (1.0, 1.0, 1.0), (1.0, 1.1, 0.9)


def row(name: str, at: float) -> Measurement:
    return Measurement(name, 4096, 4096, 1, "wall", Unknown("none"), (at,) * 20)


def measured(*rounds: dict[str, float], probe: str = "transfer", seconds: float = 10.0) -> ProbeReport:
    """A report with a process for each round, which found these medians."""
    runs = tuple(
        ProbeRun(probe, Done(), seconds, tuple(row(name, at) for name, at in one.items()), turn)
        for turn, one in enumerate(rounds)
    )
    return report(*runs, torch=CPU_TORCH)


def rounds(steady: tuple[float, ...], wild: tuple[float, ...]) -> list[dict[str, float]]:
    return [{"steady": a, "wild": b} for a, b in zip(steady, wild, strict=True)]


def test_only_rows_that_scatter_are_measured_again() -> None:
    found = further_process((measured(*rounds(STEADY, WILD)),), left_s=100.0)
    assert found == FurtherProcess("transfer", 3, ("steady 4096",))


def test_rows_that_agree_need_no_further_process() -> None:
    assert further_process((measured(*rounds(STEADY, STEADY)),), left_s=100.0) is None


def test_no_further_process_begins_that_would_not_end_in_time() -> None:
    one = measured(*rounds(STEADY, WILD), seconds=10.0)
    assert further_process((one,), left_s=START_S + 7.5) is not None
    assert further_process((one,), left_s=START_S + 7.4) is None


def test_a_row_that_never_settles_is_given_up() -> None:
    assert further_process((measured(*rounds(STEADY * 2, WILD * 2)),), left_s=1e6) is None
    assert len(STEADY * 2) == MOST_PROCESSES


def test_a_probe_that_broke_is_left_alone() -> None:
    one = measured(*rounds(STEADY, WILD))
    broken = replace(one.runs[-1], outcome=Failed("it crashed", "", 4, wedged=False))
    assert further_process((replace(one, runs=(*one.runs[:-1], broken)),), left_s=100.0) is None


def test_what_both_sides_of_a_pair_met_alike_is_no_scatter() -> None:
    a = measured(*rounds(STEADY, WILD))
    alike, apart = measured(*rounds(STEADY, WILD)), measured(*rounds(STEADY, WILD[::-1]))
    assert further_process((a, alike), left_s=100.0) is None
    assert further_process((a, apart), left_s=100.0) == FurtherProcess("transfer", 3, ("steady 4096",))


def test_the_probe_with_fewest_processes_comes_first() -> None:
    many = measured(*rounds(STEADY, WILD))
    few = measured(*rounds((1.0, 1.0), (1.0, 1.2)), probe="breakeven")
    found = further_process((replace(many, runs=(*many.runs, *few.runs)),), left_s=100.0)
    assert found is not None
    assert (found.probe, found.round) == ("breakeven", 2)


@pytest.mark.parametrize("left_s", [0.0, -5.0])
def test_without_time_nothing_is_begun(left_s: float) -> None:
    assert further_process((measured(*rounds(STEADY, WILD)),), left_s=left_s) is None
