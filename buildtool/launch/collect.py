"""What the nodes have reported, as one table and one page: by the verbs of the probes that read reports."""

import os
from collections.abc import Iterator
from pathlib import Path

from buildtool.launch.job import Job
from probes.cli.reports import refusal

MOST_FILES = 100_000
MOST_REPORTS = 1000
_RANK = "rank-"  # of a training run, one file for each rank
PAGE, JOINED = "report.html", "report.json"
_OURS, _BEGINNING = b'"tool_version"', 4096  # is at the beginning of a report, of any version
MOST_REFUSED = 20


def commands(job: Job) -> tuple[list[list[str]], list[str]]:
    """The command lines of `weir probe` that join the reports below `out`, and what is missing there."""
    ranks: list[Path] = []
    reports: list[Path] = []
    missing: list[str] = []
    for path in _json_files(Path(job.out)):
        if path.name.startswith(_RANK):
            ranks.append(path)
        elif len(reports) < MOST_REPORTS:
            if not (why := refusal(path)):
                reports.append(path)
            elif len(missing) < MOST_REFUSED and _is_ours(path):  # a job may write other JSON
                missing.append(why)
    page, joined = (str(Path(job.out) / name) for name in (PAGE, JOINED))
    if ranks:
        return [["epochs", "--from", job.out, "--json", joined], ["html", joined, "--out", page]], []
    if 1 < len(reports) < job.world:
        missing.append(
            f"reports of {len(reports)} processes are below {job.out}, and {job.world} were started"
        )
    if len(reports) > 1:
        more = ["--html", page] if len(reports) > 2 else []
        return [["compare", *map(str, sorted(reports)), *more]], missing
    return [["show", str(path)] for path in reports], missing


def _is_ours(path: Path) -> bool:
    """Whether a file that can't be read as a report was meant to be one."""
    try:
        with path.open("rb") as file:
            return _OURS in file.read(_BEGINNING)
    except OSError:
        return False


def _json_files(folder: Path) -> Iterator[Path]:
    """JSON files in a folder and those below it; links to folders aren't followed."""
    seen = 0
    for place, _, names in os.walk(folder):
        for name in names:
            seen += 1
            if seen > MOST_FILES:
                return
            path = Path(place, name)
            # a pipe would be waited for
            if path.suffix == ".json" and not name.startswith(".") and name != JOINED and path.is_file():
                yield path
