"""One HTML page from a watch's report and its plots: what came of it, plots, every figure. Pure."""

from collections.abc import Sequence

from probes.records.watched import WatchReport
from probes.report.page.html import Plot, answer_section, figure, framed, header, moment, raw_section
from probes.shared.quoting import html
from probes.watch.showing.words import figure_lines, summary


def render_watch(report: WatchReport, plots: Sequence[Plot], *, raw: str, name: str) -> str:
    """The whole page. `raw` is the report's file, which the page includes unless it is empty."""
    subject = report.subject
    title = f"{subject.host}, watched for {report.duration_s:.0f} s"
    beside = [f"during {' '.join(subject.command)}"] if subject.command else []
    return framed(
        title,
        header("Watched", title, [moment(subject.started), *beside, f"Weir {report.tool_version}"]),
        answer_section(summary(report)),
        *map(figure, plots),
        f'<section id="figures"><h2>Every figure</h2><div class="scroll" tabindex="0"><pre>'
        f"{html(chr(10).join(figure_lines(report)))}</pre></div></section>",
        raw_section(raw, name) if raw else "",
    )
