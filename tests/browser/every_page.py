"""Every HTML page and picture that Weir writes, as files to look at; made in one process."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "probes" / "throughput"))

import made_reports  # noqa: E402
from test_audit_report import rocm_like  # noqa: E402
from test_scan_shown import whole  # noqa: E402

from buildtool.audit.html import render_html  # noqa: E402
from probes.core.codec import to_json  # noqa: E402
from probes.core.unknown import Unknown  # noqa: E402
from probes.fit.answer import answer  # noqa: E402
from probes.fit.report import FitReport, Largest, Measured, Parts, Phase, Question, Taken, Trial  # noqa: E402
from probes.placement.models.reading import describe  # noqa: E402
from probes.placement.planner.machine import profile  # noqa: E402
from probes.placement.planner.plan import make_plan  # noqa: E402
from probes.placement.types import Objective, Workload  # noqa: E402
from probes.records.watch import Ended, Pace, Subject, Track, WatchReport  # noqa: E402
from probes.reports.kinds import FIT, RUN, THROUGHPUT, WATCH, ReportKind, load_report  # noqa: E402
from probes.reports.pictures import draw_fit, draw_plan  # noqa: E402

RESULTS = ROOT / "docs" / "results"
STORED = (
    "h200-quick",
    "h200-full",
    "scan-cpu",
    "scan-h200",
    "scan-served-cpu",
    "watch-service-h100",
)
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
        trials, 12.5, Taken(weights=GIB), GIB, "", ("the process's own part is left out",),
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
    "run-full": lambda: written(RUN, made_reports.full_report()),
    "run-cpu": lambda: written(RUN, made_reports.cpu_report()),
    "run-broken": lambda: written(RUN, made_reports.broken_report()),
    "scan-made": lambda: written(THROUGHPUT, whole()),
    "watch-short": lambda: written(WATCH, short_watch()),
    "fit-predicted": lambda: written(FIT, predicted_fit()),
    "fit-training": lambda: written(FIT, predicted_fit("qwen2.5-3b", **TRAINING)),
    "fit-measured": lambda: written(FIT, measured_fit()),
    **{name: partial(stored, name) for name in STORED},
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
