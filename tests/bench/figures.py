"""Renders the figures of README and the docs from docs/results/: `make readme-figures`.

A figure stands between two comments, which Markdown doesn't show: `<!--f NAME-->12.6 s<!--/f-->`. NAME is one
of FIGURES, which says from which results it is made and how. The results are what the benches wrote when they
last ran as a whole (board.py), and the probe reports that are kept there. A figure whose results are missing
stays as it is, and the command says which bench to run. Exit codes: 0 done, 1 results missing, 2 a name or a
result that doesn't exist.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildtool.files import write_text
from probes.headline import headline
from probes.report import read_report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
WIDTH = 120
MARK = re.compile(r"<!--f (?P<name>[^>\n]+?)-->(?P<shown>.*?)<!--/f-->", re.DOTALL)


class FigureError(Exception):
    """A mark names a figure, or a figure a result, that doesn't exist."""


@dataclass(frozen=True)
class Results:
    """What a bench wrote: its rows by the name of the bar or figure."""

    file: str
    document: Mapping[str, Any]

    @property
    def rows(self) -> dict[str, Mapping[str, Any]]:
        """Every named row; bars that were waived have the value None."""
        named = [(row.get("bar") or row.get("figure"), row) for row in self.document["rows"]]
        return {name: row for name, row in named if name}

    def row(self, name: str) -> Mapping[str, Any]:
        """One row. Raises FigureError where there is none with a value."""
        found = self.rows.get(name)
        if found is None or found["value"] is None:
            raise FigureError(f"{self.file} has no result {name!r}")
        return found

    def value(self, name: str) -> Any:
        """The value of one row."""
        return self.row(name)["value"]

    def values(self, pattern: str) -> list[Any]:
        """The values of all rows whose name matches as a whole. Raises FigureError where there is none."""
        found = [
            r["value"] for n, r in self.rows.items() if re.fullmatch(pattern, n) and r["value"] is not None
        ]
        if not found:
            raise FigureError(f"{self.file} has no result that matches {pattern!r}")
        return found


@dataclass(frozen=True)
class Figure:
    """Where a figure comes from: a file of docs/results and what is made of it."""

    file: str
    render: Callable[[Any], str]


def bench(name: str, render: Callable[[Results], str]) -> Figure:
    """A figure from `make bench-NAME`."""
    return Figure(f"bench-{name}.json", render)


def value(of: str, row: str, form: str = "{:.3g}", scale: float = 1.0) -> Figure:
    """One row's value, as `form` shows it."""
    return bench(of, lambda results: form.format(results.value(row) / scale))


def span(of: str, pattern: str, form: str = "{:.2g}", scale: float = 1.0) -> Figure:
    """The least and the largest value of several rows; one of them where both look the same."""

    def render(results: Results) -> str:
        found = results.values(pattern)
        least, most = (form.format(pick(found) / scale) for pick in (min, max))
        return least if least == most else f"{least} to {most}"

    return bench(of, render)


def minutes(seconds: float) -> str:
    """`3:56`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def quoted(paragraphs: Sequence[str]) -> str:
    """A list within a block quote, wrapped."""
    wrapped = [
        textwrap.fill(text, WIDTH, initial_indent="> - ", subsequent_indent=">   ", break_on_hyphens=False)
        for text in paragraphs
    ]
    return "\n" + "\n".join(wrapped) + "\n"


def images_block(results: Results) -> str:
    """What a fresh `make images` printed, as a fenced block with the commands that go with it."""
    took = minutes(results.value("images from nothing"))
    tables = [line[:WIDTH].rstrip() for line in results.value("printed").splitlines()]
    begun = (
        f"$ make images        # inputs, two images, proved, audited: {took} from nothing on {cores(results)}"
    )
    rest = (
        "$ make test          # lint, types, unit tests, and tests against the engine",
        "$ docker compose up  # the inference service on http://127.0.0.1:8000",
        "$ make probe         # what memory placement costs on this machine",
    )
    return "\n".join(["", "```", begun, *tables, "", *rest, "```", ""])


def build_block(results: Results) -> str:
    """Builds of the `cpu` image in three ways as a table, and what leaving out bytecode costs."""
    ways = {
        "ours": "`make images VARIANTS=cpu`",
        "naive": "a Dockerfile with a plain `pip install`",
        "fair": "the same without bytecode, compressed as ours is",
    }
    rows = [
        f"| {what} | {results.value(f'{name}: build'):.1f} s | {megabytes(results, f'{name}: stored')} "
        f"| {megabytes(results, f'{name}: unpacked')} |"
        for name, what in ways.items()
    ]
    table = [
        f"| `cpu` image, same inputs, {cores(results)} | build | stored | unpacked |",
        "|---|---|---|---|",
    ]
    ratio, fair = results.value("build-ratio"), results.value("build-ratio-fair")
    left_out = megabytes(results, "bytecode left out")
    start, compiled = (results.value(f"start to ready, {way} bytecode") for way in ("without", "with"))
    text = (
        f"That is {ratio:.2f} and {fair:.2f} of the others' time (`make bench-build`, medians of "
        f"{len(results.row('ours: build')['each'])}; caches empty). A build with nothing changed takes "
        f"{results.value('rebuild-unchanged'):.1f} s, one with changed service code "
        f"{results.value('rebuild-service-changed'):.1f} s. Leaving out {left_out} "
        f"of bytecode costs time at every start: a container is ready after {start:.1f} s instead of "
        f"{compiled:.1f} s."
    )
    return "\n".join(["", *table, *rows, "", textwrap.fill(text, WIDTH, break_on_hyphens=False), ""])


def megabytes(results: Results, name: str) -> str:
    """A row in bytes as MB of 10^6 bytes."""
    return f"{results.value(name) / 1e6:.0f} MB"


def cores(results: Results) -> str:
    """On what it ran."""
    return f"{results.document['cores']} cores"


FIGURES: dict[str, Figure] = {
    "images": bench("images", images_block),
    "probes.answer": Figure("h200-quick.json", lambda report: quoted(headline(report))),
    "build": bench("build", build_block),
}


def load(file: str) -> Any:
    """A probe report, or a bench's results; None where the file isn't there."""
    path = RESULTS / file
    if not path.exists():
        return None
    if not file.startswith("bench-"):
        return read_report(path)
    return Results(file, json.loads(path.read_text(encoding="utf-8")))


def render(text: str, load: Callable[[str], Any]) -> tuple[str, set[str]]:
    """`text` with every figure as its results say, and the files of results that are missing.

    Raises FigureError for a name that isn't known and for a result that isn't in its file.
    """
    missing: set[str] = set()

    def renew(mark: re.Match[str]) -> str:
        figure = FIGURES.get(mark["name"])
        if figure is None:
            raise FigureError(f"no figure is called {mark['name']!r}: see FIGURES in tests/bench/figures.py")
        results = load(figure.file)
        if results is None:
            missing.add(figure.file)
            return mark[0]
        return f"<!--f {mark['name']}-->{figure.render(results)}<!--/f-->"

    return MARK.sub(renew, text), missing


def documents() -> list[Path]:
    """Where figures may stand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    missing: set[str] = set()
    for path in documents():
        text = path.read_text(encoding="utf-8")
        try:
            renewed, lacking = render(text, load)
        except FigureError as error:
            print(f"error: {path.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        missing |= lacking
        if renewed != text:
            write_text(path, renewed)
            print(f"{path.relative_to(ROOT)}: figures renewed")
    for file in sorted(missing):
        print(
            f"no docs/results/{file}: run make {Path(file).stem}; its figures stay as they are",
            file=sys.stderr,
        )
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
