"""HTML pages and pictures that Weir writes, as files to look at; made in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from test_audit_report import rocm_like

from buildtool.audit.html import render_html
from probes.core.codec import to_json
from probes.core.unknown import Unknown
from probes.fit.answer import answer
from probes.fit.report import FitReport, Largest, Measured, Parts, Phase, Question, Taken, Trial
from probes.placement.models.reading import describe
from probes.placement.planner.machine import profile
from probes.placement.planner.plan import make_plan
from probes.placement.types import Objective, Workload
from probes.records.watch import Ended, Pace, Subject, Track, WatchReport
from probes.reports.kinds import FIT, WATCH, ReportKind, load_report
from probes.reports.pictures import draw_fit, draw_plan

RESULTS = Path(__file__).parents[2] / "docs" / "results"
GIB = 2**30
NO = Unknown("not here")


def short_watch() -> WatchReport:
    """A command that ended before the second sample: the example of docs/watch.md on a fast machine."""
    subject = Subject("2026-11-24T03:42:16Z", "vm", 0.25, (), ("python3", "-c", "sum(range(10**7))"))
    tracks = (
        Track("cpu_percent", 0.0, NO, NO, NO, (None,)),
        Track("ram_bytes", 0.162, 3 * GIB, 3.0 * GIB, 3 * GIB, (3.0 * GIB,)),
        Track("swap_bytes", 0.162, 0, 0.0, 0, (0.0,)),
    )
    pace = Pace(1, 0, NO, NO, NO, NO)
    return WatchReport("watch", 1, "0.1.0", subject, 0.162, 0.25, pace, tracks, (), NO, Ended(0, NO, 0.1))


def predicted_fit(model: str = "bert-base", **asked: Any) -> FitReport:
    """An answer of `fit` without a measurement."""
    question = Question(model, **{"tokens": 128, **asked})
    return answer(describe(model), question, profile("mi50"), budget=None)


def measured_fit() -> FitReport:
    """An answer of `fit` with trials."""
    parts = Parts(GIB // 2, GIB // 4, GIB // 3, (Phase("forward", GIB), Phase("backward", 2 * GIB)))
    trials = (
        Trial(8, "fits", 1.5, GIB, NO, NO, parts=parts),
        Trial(9, "crashed", 2.5, NO, NO, NO, "RuntimeError: a sentence that goes on and on, " * 3),
        Trial(16, "allocation_refused", 2.5, NO, NO, NO),
    )
    found = Measured(
        "A CPU of some maker @ 2.00 GHz", "Limited by a cgroup.", Largest("batch", 8, 9, exact=True),
        trials, Taken(weights=GIB), GIB, 12.5, notes=("the process's own part is left out",),
    )  # fmt: skip
    return replace(predicted_fit(), measured=found)


def picture_of_plan(model: str, objective: Objective, vram: int, work: Workload) -> str:
    """The SVG of a plan."""
    made = make_plan(
        describe(model), profile("wx4100"), vram=vram, host=None, workload=work, objective=objective
    )
    return draw_plan(made.plan, made.search.timeline)


def written(kind: ReportKind[Any], report: object) -> str:
    """The page of a report."""
    return kind.page(report, raw=to_json(report), name="report.json")


def stored(name: str) -> str:
    """The page of a report in docs/results."""
    loaded = load_report(RESULTS / f"{name}.json")
    return loaded.kind.page(loaded.report, raw=loaded.raw, name=f"{name}.json")


TRAINING = {"task": "training", "precision": "amp-bf16", "optimizer": "adamw", "tokens": 1024}
MADE: dict[str, Callable[[], str]] = {
    "audit": lambda: render_html(rocm_like()),
    "watch-short": lambda: written(WATCH, short_watch()),
    "fit-predicted": lambda: written(FIT, predicted_fit()),
    "fit-training": lambda: written(FIT, predicted_fit("qwen2.5-3b", **TRAINING)),
    "fit-measured": lambda: written(FIT, measured_fit()),
    "watch-service-h100": lambda: stored("watch-service-h100"),
}
DRAWN: dict[str, Callable[[], str]] = {
    "plan-picture": lambda: picture_of_plan("qwen2.5-3b", "fast", 4 * GIB, Workload(1, 1, 2048)),
    "fit-picture": lambda: draw_fit(predicted_fit("qwen2.5-3b", **TRAINING)),
}
NAMES = (*MADE, *DRAWN)


def write_page(name: str, place: Path) -> Path:
    """Write one page or picture, and return its file."""
    if name in DRAWN:
        path, text = place / f"{name}.svg", DRAWN[name]()
    else:
        path, text = place / f"{name}.html", MADE[name]()
    path.write_text(text, encoding="utf-8")
    return path
