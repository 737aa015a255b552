"""What the nodes have reported, as one table and one page: by the verbs of the probes that read reports."""

import os
from collections.abc import Iterator
from pathlib import Path

from buildtool.launch.job import Job
from probes.cli.reports import is_report

MOST_FILES = 100_000
MOST_REPORTS = 1000
_RANK = "rank-"  # of a training run, one file for each rank
PAGE, JOINED = "report.html", "report.json"


def commands(job: Job) -> list[list[str]]:
    """The command lines of `weir probe` that join the reports below `out`; none where there are none."""
    ranks: list[Path] = []
    reports: list[Path] = []
    for path in _json_files(Path(job.out)):
        if path.name.startswith(_RANK):
            ranks.append(path)
        elif len(reports) < MOST_REPORTS and is_report(path):  # a job may write other JSON
            reports.append(path)
    page, joined = (str(Path(job.out) / name) for name in (PAGE, JOINED))
    if ranks:
        return [["epochs", "--from", job.out, "--json", joined], ["html", joined, "--out", page]]
    if len(reports) > 1:
        more = ["--html", page] if len(reports) > 2 else []
        return [["compare", *map(str, sorted(reports)), *more]]
    return [["show", str(path)] for path in reports]


def _json_files(folder: Path) -> Iterator[Path]:
    """JSON files in a folder and those below it; links to folders aren't followed."""
    seen = 0
    for place, _, names in os.walk(folder):
        for name in names:
            seen += 1
            if seen > MOST_FILES:
                return
            if name.endswith(".json") and not name.startswith(".") and name != JOINED:
                yield Path(place) / name
