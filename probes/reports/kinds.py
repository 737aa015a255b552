"""The kinds of reports, in one table: how each is read, shown, drawn, exported and compared.

The verbs `show`, `html`, `prometheus`, `compare` and `schema` know no kind: they go through `KINDS`. A new
kind is one entry. A new form of output is a function of `Document`, which every kind has, and a method of
`ReportKind`; or a field of it, where kinds differ in more than words, and None for those that lack it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from probes.core import files
from probes.core.errors import LibraryMissing, ReportError
from probes.core.invocation import probe_command
from probes.fit.report import FitReport, fit_schema, is_fit, named_fit
from probes.placement.plan_file import cards_schema, plan_schema
from probes.records.files import reading
from probes.records.json_schema import report_schema
from probes.records.schema import ProbeReport, named_report
from probes.records.watch import WatchReport, watch_schema
from probes.reports.document import Document, Plot
from probes.reports.epochs import epochs_document
from probes.reports.fit import fit_document
from probes.reports.fleet import fleet_document, fleet_of
from probes.reports.html import render_page
from probes.reports.pictures import fit_plot
from probes.reports.run import run_document
from probes.reports.run_compare import compare, render_markdown
from probes.reports.run_metrics import exposition
from probes.reports.scan import scan_document
from probes.reports.scan_compare import compare_scans, render_scan_markdown
from probes.reports.scan_metrics import scan_exposition
from probes.reports.text import render_text
from probes.reports.watch import watch_document
from probes.throughput.report import MOST_BYTES, ThroughputReport, is_scan, named_scan, throughput_schema
from probes.training.report import EpochsReport, epochs_schema, is_epochs, named_epochs
from probes.watch.recording import is_watch_file, named_watch

ANY_MAKER: Final = "run, throughput, watch, fit, epochs"  # the verbs that write a report
R = TypeVar("R")


@dataclass(frozen=True)
class ReportKind(Generic[R]):
    """What can be done with the reports of one kind; `metrics` and `compare` are None where it has none."""

    name: str  # as `schema` takes it
    called: str  # in messages
    schema: Callable[[], str]
    holds: Callable[[Path], bool]  # whether a file is of this kind, also where the rest of it is broken
    load: Callable[[Path, Path, str], tuple[R, str]]  # file, its name in messages, hint -> report, its text
    document: Callable[[R], Document]
    plots: Callable[[R], tuple[Plot, ...]]  # raises ImportError without matplotlib: only the host has it
    metrics: Callable[[R], str] | None = None
    # without metrics: what the error says of a file, and its hint
    no_metrics: tuple[str, str] = ("has no metrics: {called}", "show it, or write a page: html")
    compare: Callable[[R, R, tuple[str, str], bool], str] | None = None  # A, B, names, force -> Markdown

    def text(self, report: R, *, markdown: bool = False) -> str:
        """A report as text, or as Markdown."""
        return render_text(self.document(report), markdown=markdown)

    def page(self, report: R, *, raw: str, name: str) -> str:
        """A report as an HTML page, which holds its file `raw` under its name. Raises LibraryMissing."""
        try:
            plots = self.plots(report)
        except ImportError as error:
            raise LibraryMissing(
                f"the page needs {error.name}, which is not installed", "pip install 'gpu-weir[report]'"
            ) from error
        return render_page(self.document(report), plots, raw=raw, name=name)


@dataclass(frozen=True)
class LoadedReport:
    """A report with its kind and the text that it was read from."""

    kind: ReportKind[Any]
    report: Any
    raw: str


def load_report(source: Path, *, makers: str = ANY_MAKER) -> LoadedReport:
    """The report in a file, of whichever kind. Raises ReportError.

    `makers` are the verbs that the error names. What can be read only once, a pipe, is copied first: a file's
    kind is seen by reading it.
    """
    make_one = f"name a report that one of these has written: {probe_command()} {makers}"
    with ExitStack() as stack:
        with reading(source, make_one):
            path = stack.enter_context(files.rereadable(source, most_bytes=MOST_BYTES))
        kind = next(kind for kind in KINDS if kind.holds(path))
        return LoadedReport(kind, *kind.load(path, source, make_one))


def _run_plots(report: ProbeReport) -> tuple[Plot, ...]:
    from probes.reports.run_charts import draw_plots

    return draw_plots(report)


def _scan_plots(report: ThroughputReport) -> tuple[Plot, ...]:
    from probes.reports.scan_charts import draw_scan

    return draw_scan(report)


def _epochs_plots(report: EpochsReport) -> tuple[Plot, ...]:
    from probes.reports.epochs_charts import draw_epochs

    return draw_epochs(report)


def _watch_plots(report: WatchReport) -> tuple[Plot, ...]:
    from probes.reports.watch_charts import draw_watch

    return draw_watch(report)


WATCH: Final = ReportKind[WatchReport](
    name="watch",
    called="a watch",
    schema=watch_schema,
    holds=is_watch_file,
    load=lambda path, name, _: named_watch(path, name=name),
    document=watch_document,
    plots=_watch_plots,
    no_metrics=(
        "is a watch, whose samples Prometheus takes while it runs",
        "{command} watch --listen HOST:PORT",
    ),
)
FIT: Final = ReportKind[FitReport](
    name="fit",
    called="an answer of `fit`",
    schema=fit_schema,
    holds=is_fit,
    load=lambda path, name, _: named_fit(path, name=name),
    document=fit_document,
    plots=lambda report: (fit_plot(report),),
)
EPOCHS: Final = ReportKind[EpochsReport](
    name="epochs",
    called="an epochs report",
    schema=epochs_schema,
    holds=is_epochs,
    load=lambda path, name, _: named_epochs(path, name=name),
    document=epochs_document,
    plots=_epochs_plots,
)
THROUGHPUT: Final = ReportKind[ThroughputReport](
    name="throughput",
    called="a throughput report",
    schema=throughput_schema,
    holds=is_scan,
    load=lambda path, name, _: named_scan(path, name=name),
    document=scan_document,
    plots=_scan_plots,
    metrics=scan_exposition,
    compare=lambda a, b, names, force: render_scan_markdown(compare_scans(a, b, names=names, force=force)),
)
RUN: Final = ReportKind[ProbeReport](
    name="report",
    called="a probe report",
    schema=report_schema,
    holds=lambda _: True,  # the last one: what is no report at all is refused as no report of a run
    load=lambda path, name, make_one: named_report(path, name=name, make_one=make_one),
    document=run_document,
    plots=_run_plots,
    metrics=exposition,
    compare=lambda a, b, names, force: render_markdown(compare(a, b, names=names, force=force)),
)
KINDS: Final[tuple[ReportKind[Any], ...]] = (WATCH, FIT, EPOCHS, THROUGHPUT, RUN)
SCHEMAS: Final[dict[str, Callable[[], str]]] = {
    **{kind.name: kind.schema for kind in KINDS},
    "plan": plan_schema,
    "cards": cards_schema,
}


def metrics_of(loaded: LoadedReport, path: Path) -> str:
    """The report in Prometheus' text format. Raises ReportError, naming the file, where it has no metrics."""
    kind = loaded.kind
    if kind.metrics:
        return kind.metrics(loaded.report)
    message, hint = (text.format(called=kind.called, command=probe_command()) for text in kind.no_metrics)
    raise ReportError(f"{path} {message}", hint)


def compared(a: LoadedReport, b: LoadedReport, paths: tuple[Path, Path], *, force: bool) -> str:
    """Two reports side by side as Markdown. Raises ReportError where they can't be compared."""
    if a.kind is not b.kind or a.kind.compare is None:
        raise ReportError(
            f"{paths[0]} and {paths[1]} can't be compared: {a.kind.called} and {b.kind.called}",
            "name two probe reports, or two throughput reports",
        )
    return a.kind.compare(a.report, b.report, (str(paths[0]), str(paths[1])), force)


def fleet(paths: Sequence[Path]) -> tuple[str, str]:
    """Probe reports of many machines as Markdown and as a page. Raises ReportError.

    Machines are called by the folders that their reports are in, where these differ; else by their files.
    """
    loaded = [load_report(path, makers="run") for path in paths]
    for path, each in zip(paths, loaded, strict=True):
        if each.kind is not RUN:
            raise ReportError(f"{path} is {each.kind.called}", "name probe reports alone")
    folders = [path.absolute().parent.name for path in paths]
    names = folders if len(set(folders)) == len(paths) else [path.stem for path in paths]
    document = fleet_document(fleet_of([each.report for each in loaded], names))
    return f"{render_text(document, markdown=True)}\n", render_page(document, (), raw="", name="")
