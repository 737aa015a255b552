"""Compares an image with an earlier report of it: what got worse. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from buildtool.audit.findings import Finding, Severity
from buildtool.audit.report import AuditReport
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.model import parse_size
from probes.core.units import decimal_bytes


@dataclass(frozen=True)
class Tolerance:
    """How much growth is ignored: a share of the earlier size (0.01 is 1 %), or a number of bytes."""

    share: float = 0.01
    n_bytes: int = 0

    def forgives(self, before_bytes: int, after_bytes: int) -> bool:
        """Whether this growth is within the tolerance."""
        return after_bytes - before_bytes <= max(self.n_bytes, self.share * before_bytes)

    def __str__(self) -> str:
        return decimal_bytes(self.n_bytes) if self.n_bytes else f"{100 * self.share:g} %"


@dataclass(frozen=True)
class Regression:
    """One thing that got worse: the image's bytes, or a finding."""

    title: str
    before_bytes: int
    after_bytes: int
    detail: str = ""
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        grown = self.after_bytes - self.before_bytes
        figures = f"{decimal_bytes(self.before_bytes)} before, {decimal_bytes(self.after_bytes)} now"
        parts = [self.title, f"{figures} (+{decimal_bytes(grown)})" if grown else "", self.detail]
        return ": ".join(filter(None, parts))


@dataclass(frozen=True)
class Comparison:
    """An image compared with its baseline; `not_compared` lists what couldn't be compared, and why."""

    label: str
    tolerance: Tolerance
    regressions: tuple[Regression, ...]
    not_compared: tuple[str, ...] = ()


def parse_tolerance(text: str) -> Tolerance:
    """`2%` or a size such as `5 MB`. Raises ConfigError."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if share:
        return Tolerance(share=float(share[1]) / 100)
    try:
        return Tolerance(share=0.0, n_bytes=parse_size(text))
    except ConfigError as error:
        raise ConfigError(f"{text!r} is not a tolerance", "write one such as 2% or '5 MB'") from error


def compare(before: AuditReport, after: AuditReport, *, label: str, tolerance: Tolerance) -> Comparison:
    """What is worse in `after`. Raises DataError where the two are for different platforms."""
    if before.image.platform != after.image.platform:
        raise DataError(
            f"{label} is for {before.image.platform}, the image is for {after.image.platform}",
            "take the baseline of the same platform",
        )
    regressions = [
        *_grown("unpacked bytes", before.totals.unpacked_bytes, after.totals.unpacked_bytes, tolerance),
        *_worse_findings(before.findings, after.findings, tolerance),
    ]
    stored = before.totals.stored_bytes, after.totals.stored_bytes
    if stored[0] is None or stored[1] is None:
        where = "the baseline" if stored[0] is None else "the image"
        return Comparison(label, tolerance, tuple(regressions), (f"stored bytes, unknown for {where}",))
    regressions[:0] = _grown("stored bytes", stored[0], stored[1], tolerance)
    return Comparison(label, tolerance, tuple(regressions))


def _grown(what: str, before: int, after: int, tolerance: Tolerance) -> list[Regression]:
    if tolerance.forgives(before, after):
        return []
    return [Regression(f"more {what}", before, after)]


def _worse_findings(
    before: Iterable[Finding], after: Iterable[Finding], tolerance: Tolerance
) -> list[Regression]:
    """New findings, and those with more bytes or more cases. Findings of severity `info` never fail."""
    baseline, regressions = _by_id(before), []
    for name, rows in _by_id(after).items():
        earlier = baseline.get(name, [])
        bytes_of = sum(row.bytes for row in earlier), sum(row.bytes for row in rows)
        more = len(rows) > len(earlier) or not tolerance.forgives(*bytes_of)
        if more and any(row.severity is not Severity.INFO for row in rows):
            title = f"{'larger' if earlier else 'new'} finding {name}"
            regressions.append(Regression(title, *bytes_of, detail=rows[0].title, paths=rows[0].paths))
    return regressions


def _by_id(findings: Iterable[Finding]) -> Mapping[str, list[Finding]]:
    grouped: defaultdict[str, list[Finding]] = defaultdict(list)
    for row in findings:
        grouped[row.id].append(row)
    return grouped
