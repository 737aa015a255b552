"""The audit's answer in five lines: how large, what takes the most, what to type about it, the budget.

The remedies of the report's findings are put in order here, errors first and then by bytes; pages and
Markdown begin with the largest one.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from buildtool.audit.claims import CARD_CHOICE, FOREIGN_CODE, FOREIGN_FILES
from buildtool.audit.findings import Finding, Severity, named_cards, size_text
from buildtool.audit.report import AuditReport, Judgement, Verdict
from probes.core.output import Paint, Style, plain
from probes.core.quoting import log_text
from probes.core.units import counted, decimal_bytes

_COMMAND_CHARS = 240  # a longer command is in the whole report: five lines are to stay five
_BEFORE = re.compile(r"# (.+); then\n")  # what has to be done before a remedy's command
_IN_DOCKERFILE = re.compile(r"(RUN|COPY|FROM|ADD) ")
_BUDGET_STYLES = {Verdict.PASS: Style.GOOD, Verdict.FAIL: Style.BAD, Verdict.UNKNOWN: Style.NOTABLE}


@dataclass(frozen=True)
class Remedy:
    """What could go, in words, and what to type; `command` is empty where it doesn't fit into a line."""

    id: str  # of its finding, or of the first of several with one command
    size: str  # of what it removes: "8.31 MB", "up to 815.12 MB"; empty where it isn't about size
    text: str
    command: str
    n_bytes: int
    is_error: bool
    is_warning: bool = False

    @property
    def words(self) -> str:
        """Return the remedy's text and the bytes that it saves."""
        return f"{self.text} ({self.size})" if self.size else self.text

    @property
    def typed(self) -> str:
        """The command, and whether it belongs into a Dockerfile."""
        if not self.command:
            return "the remedy is long: see the findings (--all)"
        return f"in the Dockerfile: {self.command}" if _IN_DOCKERFILE.match(self.command) else self.command


def remedies(report: AuditReport) -> list[Remedy]:
    """One for each finding, errors first, then the largest; findings with the same command are one."""
    merged: dict[str, Remedy] = {}
    for finding in sorted(report.findings, key=lambda row: (row.severity is not Severity.ERROR, -row.bytes)):
        remedy = _remedy(report, finding)
        key = remedy.command or finding.id
        if (same := merged.get(key)) and finding.id in (FOREIGN_CODE, FOREIGN_FILES):
            n_bytes = same.n_bytes + remedy.n_bytes
            merged[key] = Remedy(
                same.id, decimal_bytes(n_bytes), same.text, same.command, n_bytes, same.is_error
            )
        else:
            merged[finding.id if same else key] = remedy
    return sorted(merged.values(), key=lambda row: (not row.is_error, -row.n_bytes))


def largest_remedy(report: AuditReport) -> Remedy | None:
    """The one that removes most bytes; None where no finding is about size."""
    sized = [row for row in remedies(report) if row.n_bytes]
    return max(sized, key=lambda row: row.n_bytes, default=None)


def _remedy(report: AuditReport, finding: Finding) -> Remedy:
    text = finding.title
    if finding.id in (FOREIGN_CODE, FOREIGN_FILES):
        text = "GPU code for cards that the image isn't for"
    elif finding.id == CARD_CHOICE:
        text = _choice(report)
    elif before := _BEFORE.match(finding.remedy):
        text = f"{text}; {before[1]}; then"
    command = _command(finding.remedy)
    size = "" if finding.id == CARD_CHOICE else size_text(finding)
    is_error, is_warning = (finding.severity is each for each in (Severity.ERROR, Severity.WARNING))
    return Remedy(finding.id, size, text, command, finding.bytes, is_error, is_warning)


def _choice(report: AuditReport) -> str:
    """How much GPU code there is, and what keeping one card saves."""
    code, saved = report.gpu_code, report.gpu_code.saved_by_card
    total = sum(code.by_target.values())
    share = round(100 * total / report.totals.unpacked_bytes) if report.totals.unpacked_bytes else 0
    words = f"{decimal_bytes(total)} ({share} %) is GPU code"
    if not saved:
        return words
    least, most = min(saved.values()), max(saved.values())
    of = {n_bytes: card for card, n_bytes in saved.items()}
    saves = f"saves {decimal_bytes(least)} unpacked ({of[least]})"
    if most > least:
        saves += f" to {decimal_bytes(most)} ({of[most]})"
    return f"{words} for {named_cards(tuple(saved))}; keeping one {saves}"


def _command(remedy: str) -> str:
    """The first command of a remedy in one line; empty for a long one, and where there is only a comment."""
    words: list[str] = []
    for line in remedy.splitlines():
        if line.startswith("#") and not words:
            continue
        words.append(_without_comment(line).strip())
        if not words[-1].endswith("\\"):
            break
        words[-1] = words[-1].removesuffix("\\").rstrip()
    text = " ".join(words)
    return text if len(text) <= _COMMAND_CHARS else ""


def _without_comment(line: str) -> str:
    """A line of a remedy without the comment after its command; the same signs in a quoted name stay."""
    for match in re.finditer("   # ", line):
        command = line[: match.start()]
        with suppress(ValueError):  # within quotes
            shlex.split(command)
            return command
    return line


# The five lines.


def answer_lines(report: AuditReport, paint: Paint = plain) -> list[str]:
    """The answer for a terminal, quoted."""
    found = remedies(report)
    first = found[0] if found else None
    rest = [row for row in found[1:] if row.n_bytes or row.is_error or row.is_warning]
    second = max(rest, key=lambda row: (row.is_warning and not row.n_bytes, row.n_bytes), default=None)
    return [
        _headline(report, paint),
        _line("first", first, paint) if first else "nothing in it looks like waste",
        _line("then", second, paint) if second else "nothing else of 1 MB or more to remove was found",
        paint(log_text(budget_line(report)), _BUDGET_STYLES[report.budget.verdict])
        if report.budget.verdict in _BUDGET_STYLES
        else log_text(budget_line(report)),
        f"more with --all: {', '.join(_rest(report))}; as a map to zoom: --html FILE",
    ]


def _headline(report: AuditReport, paint: Paint) -> str:
    totals = report.totals
    stored = "unknown" if totals.stored_bytes is None else decimal_bytes(totals.stored_bytes)
    kind, n_bytes = max(report.kinds.items(), key=lambda row: row[1], default=("", 0))
    most = f"; {100 * n_bytes / totals.unpacked_bytes:.0f} % of it {kind}" if n_bytes else ""
    size = f"{decimal_bytes(totals.unpacked_bytes)} unpacked, {stored} stored (compressed layers){most}"
    return f"{log_text(report.image.ref)}: {paint(log_text(size), Style.HEADING)}"


def _line(place: str, remedy: Remedy, paint: Paint) -> str:
    style = Style.BAD if remedy.is_error else Style.NOTABLE
    name = "error" if remedy.is_error else "warning" if remedy.is_warning and not remedy.n_bytes else place
    return f"{name}: {paint(log_text(remedy.words), style)}: {log_text(remedy.typed)}"


def budget_line(report: AuditReport) -> str:
    """The verdict on unpacked and stored bytes, or how to set limits."""
    verdict, budget = report.budget.verdict, report.budget
    if verdict is Verdict.NONE:
        return "budget: none set (--budget-unpacked, --budget-stored)"
    unpacked, stored = judgement_text(budget.unpacked), judgement_text(budget.stored)
    return f"budget: {verdict.value} (unpacked {unpacked}; stored {stored})"


def judgement_text(judgement: Judgement) -> str:
    """What was compared with a limit, and with what result."""
    if judgement.verdict is Verdict.NONE:
        return "no limit"
    sign = {Verdict.PASS: "<=", Verdict.FAIL: ">", Verdict.UNKNOWN: "against"}[judgement.verdict]
    actual, limit = (
        "unknown" if n_bytes is None else decimal_bytes(n_bytes)
        for n_bytes in (judgement.actual_bytes, judgement.limit_bytes)
    )
    return f"{actual} {sign} {limit}"


def _rest(report: AuditReport) -> Iterator[str]:
    """What the whole report lists."""
    errors = sum(row.severity is Severity.ERROR for row in report.findings)
    serious = f" ({counted(errors, 'error')})" if errors else ""
    yield f"{counted(len(report.findings), 'finding')}{serious}"
    yield counted(len(report.layers), "layer")
    yield counted(len(report.packages), "package")
    yield "owners, kinds, the largest files"
    if report.notes:
        yield counted(len(report.notes), "note")
