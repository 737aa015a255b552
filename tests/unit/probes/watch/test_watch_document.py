"""A watch's page: its title says how long, its plots show something."""

import math

import pytest

from probes.core.unknown import Unknown
from probes.records.watch import Ended, Pace, Subject, Track, WatchReport
from probes.reports.watch import watch_document
from probes.reports.watch_charts import alone, draw_watch

NO = Unknown("not here")
GIB = 2.0**30


def watched(*curve: float | None) -> WatchReport:
    """A watch with a gauge that was known in these steps, of a quarter of a second."""
    took_s = 0.25 * len(curve) - 0.088
    subject = Subject("2026-11-24T03:42:16Z", "vm", 0.25, (), ("python3", "-c", "pass"))
    tracks = (Track("ram_bytes", took_s, GIB, GIB, GIB, curve), Track("cpu_percent", 0.0, NO, NO, NO, ()))
    pace = Pace(len(curve), 0, NO, NO, NO, NO)
    return WatchReport("watch", 1, "0.1.0", subject, took_s, 0.25, pace, tracks, (), NO, Ended(0, NO, 0.1))


def test_a_command_of_less_than_half_a_second_was_not_watched_for_0_s() -> None:
    document = watch_document(watched(GIB))
    assert document.title == "vm, watched for 162 ms"
    assert "1 sample" in document.layout
    assert "1 samples" not in document.layout


def test_a_single_step_gets_a_sentence_instead_of_an_empty_plot() -> None:
    (plot,) = draw_watch(watched(GIB))
    assert not plot.drawn
    assert "only one step was measured" in plot.missing


@pytest.mark.thorough
def test_a_gauge_that_was_never_known_has_no_empty_panel() -> None:
    (plot,) = draw_watch(watched(GIB, GIB))
    assert plot.drawn
    assert all("temperature" not in svg and "share, %" not in svg for _, svg in plot.drawn)
    (plot,) = draw_watch(watched(None, None))
    assert plot.missing == "no gauge of it was ever known"


def test_a_value_between_gaps_is_drawn_as_a_dot() -> None:
    gap = math.nan
    assert alone([1.0, gap, 2.0, 3.0, gap, 4.0]) == [True, False, False, False, False, True]
    assert alone([1.0]) == [True]
