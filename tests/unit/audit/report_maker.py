"""Audit reports for the tests: one of a small image with everything in it, and ways to change it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import image_maker as make
from image_maker import Image, file, folder, tar

from buildtool.audit.audit import audit_image
from buildtool.audit.findings import Finding, Severity
from buildtool.audit.options import NO_BUDGET, AuditOptions
from buildtool.audit.report import AuditReport
from buildtool.audit.treemap import Tree, TreeRow
from buildtool.core.model import Budget

STATUS = b"Package: libc6\nStatus: install ok installed\nVersion: 2.41-1\n"
BASE = tar(
    folder("usr/lib"),
    file("usr/lib/libc.so.6", bytes(2000)),
    file("var/lib/dpkg/status", STATUS),
    file("var/lib/dpkg/info/libc6.list", b"/usr/lib/libc.so.6\n"),
    file("usr/share/doc/readme", bytes(30)),
)
SERVICE = tar(file("app/service.py", bytes(500)), file("usr/share/doc/readme", bytes(40)))

# what a stranger may name a file, to break out of markup, scripts, attributes or lines
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\" onmouseover='alert(1)' x=\"",
    "]]><!--",
    "&lt;b&gt;",
    "{{7*7}}${7*7}",
    "tab\tnewline\nreturn\r",
    "nul\0bell\x07escape\x1b[2J",
    "left\u202eotf.exe",
    "line\u2028separator",
    "שלום/مرحبا",
    "lone\udc80byte",
)


class FakeEngine:
    def __init__(self, image: Image) -> None:
        self._content = make.archive(make.containerd_nested(image))

    def save(self, ref: str) -> Iterator[bytes]:
        return make.chunks(self._content, 10_000)

    def tags(self, _repository: str | None = None) -> tuple[str, ...]:
        return ()


def audited(*layers: bytes, ref: str = "weir/tiny:1", budget: Budget = NO_BUDGET) -> AuditReport:
    image = Image(list(layers), ref=ref)
    return audit_image(image.ref, engine=FakeEngine(image), options=AuditOptions(budget=budget))


@cache
def small_report(budget: Budget = NO_BUDGET) -> AuditReport:
    return audited(BASE, SERVICE, budget=budget)


def a_finding(name: str = "caches", *, n_bytes: int = 5_000_000, **changes: object) -> Finding:
    row = Finding(
        name, Severity.WARNING, "caches of package managers", n_bytes, ("var/cache",), "RUN rm -rf x"
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def with_findings(*findings: Finding) -> AuditReport:
    return replace(small_report(), findings=findings)


def a_row(path: str, n_bytes: int, **changes: object) -> TreeRow:
    row = TreeRow(path, False, 0, "deb", "libc6", "shared libraries", "", n_bytes, n_bytes, 1)
    return replace(row, **changes)  # type: ignore[arg-type]


def with_tree(*rows: TreeRow, least_bytes: int = 10) -> AuditReport:
    return replace(small_report(), tree=Tree(least_bytes, rows))
