"""Renders the figures of README and the docs from docs/results/: `make readme-figures`.

    figures.py [--keep BENCH]

`--keep` (`make keep-results BENCH=build`) first copies there what a bench's last whole run left in reports/.

A figure stands between two comments, which Markdown doesn't show: `<!--f NAME-->12.6 s<!--/f-->`. NAME is one
of FIGURES, which says from which results it is made and how. The results are what the benches wrote when they
last ran as a whole (board.py), and the probe reports that are kept there. A figure whose results are missing
stays as it is, and the command says which bench to run. Where files that a bench measures (MEASURED in
board.py) have changed since, the text says so. Exit codes: 0 done, 1 results missing, 2 a name or a result
that doesn't exist.
"""

import argparse
import functools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import board

from buildtool.core.files import write_text
from probes.records.schema import ProbeReport, read_report
from probes.reports.run_headline import headline

ROOT = board.ROOT
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
    return bench(of, lambda results: form.format(_scaled(results.value(row), scale)))


def _scaled(found: Any, scale: float) -> Any:
    """A number by its scale; a sentence as it is."""
    return found if isinstance(found, str) else found / scale


def block(lines: Sequence[str]) -> str:
    """Lines that stand by themselves: every Markdown needs them apart from the comments around."""
    return "\n".join(["", "", *lines, "", ""])


def minutes(seconds: float) -> str:
    """`3:56`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def quoted(paragraphs: Sequence[str]) -> str:
    """A list within a block quote, wrapped."""
    wrapped = [
        textwrap.fill(text, WIDTH, initial_indent="> - ", subsequent_indent=">   ", break_on_hyphens=False)
        for text in paragraphs
    ]
    return block(wrapped)


def passes_compared(answers: Sequence[str]) -> str:
    """`24.6 ms ..., and 1.35 ms with everything in VRAM, 18 times less`: the headline's last two times."""
    (found,) = [
        m
        for m in (
            re.search(r"fastest: (\S+ m?s) a pass.* and (\S+ m?s) with everything in VRAM, (\S+) times", a)
            for a in answers
        )
        if m
    ]
    return f"{found[1]} a pass, and {found[2]} with everything in VRAM, {found[3]} times less"


def images_block(results: Results) -> str:
    """What a fresh `make images` printed, as a fenced block with the command, and when that was."""
    took = minutes(results.value("images from nothing"))
    tables = [_cut(line) for line in results.value("printed").splitlines()]
    begun = (
        f"$ make images        # inputs, two images, proved, audited: {took} from nothing on {cores(results)}"
    )
    when = f"`make bench-images`, {results.document['date']}{beside(results)}."
    return block(["```console", begun, *tables, "```", "", when])


def _cut(line: str) -> str:
    """A line of a table, no wider than the page; three dots show where text is missing."""
    if len(line) <= WIDTH or not line.strip("- "):
        return line[:WIDTH].rstrip()
    return f"{line[: WIDTH - 3].rstrip()}..."


def build_block(results: Results) -> str:
    """Builds of the `cpu` image in three ways as a table, and what bytecode saves at a start."""
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
        f"{len(results.row('ours: build')['each'])}, caches empty{beside(results)}). A build with nothing "
        f"changed takes {results.value('rebuild-unchanged'):.1f} s, one with changed service code "
        f"{results.value('rebuild-service-changed'):.1f} s. Without {left_out} of bytecode a container is "
        f"ready after {start:.1f} s instead of {compiled:.1f} s."
    )
    return block([*table, *rows, "", textwrap.fill(text, WIDTH, break_on_hyphens=False)])


def prune_images(results: Results) -> str:
    """The `rocm` image built for one card at a time."""
    sizes = {
        name.split()[1].rstrip(":"): f"{row['value'] / 1e9:.2f} GB"
        for name, row in results.rows.items()
        if re.fullmatch(r"rocm \S+: unpacked", name)
    }
    whole = f"{results.value('rocm: unpruned root file system') / 1e9:.2f} GB"
    return block(
        [
            f"| | unpruned root file system | {' | '.join(f'image for {target}' for target in sizes)} |",
            f"|{'---|' * (len(sizes) + 2)}",
            f"| unpacked | {whole} | {' | '.join(sizes.values())} |",
        ]
    )


def prune_libraries(results: Results) -> str:
    """Debian's libraries, each pruned to one card at a time."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, row in results.rows.items():
        if match := re.fullmatch(r"(?P<library>lib\S+) (?P<target>\S+): size", name):
            found.setdefault(match["library"], {})[match["target"]] = row
    targets = list(dict.fromkeys(target for sizes in found.values() for target in sizes))
    lines = [
        f"| Debian's library | before | {' | '.join(targets)} | time |",
        f"|{'---|' * (len(targets) + 3)}",
    ]
    for library, sizes in found.items():
        shares = " | ".join(f"{sizes[target]['value']:.1%}" if target in sizes else "" for target in targets)
        before = next(iter(sizes.values()))["before_bytes"] / 1e6
        times = _span(results.values(rf"{re.escape(library)} \S+: time"))
        lines.append(f"| {library} | {before:.0f} MB | {shares} | {times} |")
    return block(lines)


def bars(results: Results, more: Sequence[str] = ()) -> str:
    """Every bar of a bench as a table; those that differ in a number or a file's name alone share a row.

    `more`: lines that follow.
    """
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in results.document["rows"]:
        if "bar" in row and row["value"] is not None:
            grouped.setdefault((_without_numbers(row["bar"]), _must(row)), []).append(row)
    lines = ["| bar | must be | seen |", "|---|---|---|"]
    for (name, must), rows in grouped.items():
        seen = _span([row["value"] for row in rows])
        count = f" ({len(rows)} times)" if len(rows) > 1 else ""
        missed = "" if all(row["ok"] for row in rows) else ", **missed**"
        lines.append(f"| {name if len(rows) > 1 else rows[0]['bar']} | {must} | {seen}{count}{missed} |")
    ran = f"`{results.document['command']}`, {results.document['date']}, {cores(results)}{beside(results)}:"
    return block([ran, "", *lines, *more])


def on_a_gpu(results: Results) -> str:
    """As `bars`, with what couldn't be judged and why, and the times and rates that bars compare."""
    rows = results.document["rows"]
    waived = [row for row in rows if "bar" in row and row["value"] is None]
    more = [f"| {row['bar']} | | not judged: {row['waived'].partition('. ')[0]} |" for row in waived]
    speeds = [row for row in rows if "figure" in row and row["unit"] in SPEEDS]
    if speeds:
        more += ["", "| measured | |", "|---|---|"]
    for row in speeds:
        more.append(f"| {row['figure']} | {_number(row['value'])} {row['unit']} |")
    return bars(results, more)


def every_bench(benches: Sequence[Results]) -> str:
    """What each bench's last kept run held, missed and couldn't judge; then every bar that was missed."""
    lines = ["| bench | run on | held | missed | not judged |", "|---|---|---|---|---|"]
    missed = ["| missed | must be | seen | bench |", "|---|---|---|---|"]
    for results in benches:
        document = results.document
        rows = [row for row in document["rows"] if "bar" in row]
        lost = [row for row in rows if row["value"] is not None and not row["ok"]]
        waived = sum(row["value"] is None for row in rows)
        held = len(rows) - len(lost) - waived
        name = f"[`{document['command']}`](results/{results.file})"
        when = f"{document['date']}, {cores(results)}{busy(results)}"
        lines.append(f"| {name} | {when} | {held} | {len(lost)} | {waived} |")
        for row in lost:
            missed.append(
                f"| {row['bar']} | {_must(row)} | {_number(row['value'])} | `{document['command']}` |"
            )
    return block([*lines, "", *missed])


def _must(row: Mapping[str, Any]) -> str:
    """`at most 45 s`."""
    unit = "" if row["unit"] == "1" else row["unit"]
    return f"{row['must_be']} {_number(row['limit'])} {unit}".rstrip()


def _without_numbers(name: str) -> str:
    prefix, colon, rest = name.rpartition(": ")
    variable = bool(re.search(r"[\d/]", prefix))
    return re.sub(r"\d+(\.\d+)?", "N", rest if variable else f"{prefix}{colon}{rest}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _span(values: Sequence[float]) -> str:
    least, most = _number(min(values)), _number(max(values))
    return least if least == most else f"{least} to {most}"


def beside(results: Results) -> str:
    """What else is to be known of a run: other work on the machine, code that has changed since."""
    return busy(results) + earlier(results)


def busy(results: Results) -> str:
    """Says so where other work ran beside the bench."""
    if "load" not in results.document:
        return ", what else ran there is unknown"
    before = results.document["load"][0]
    return (
        f", on a machine with other work: load {before:g}" if before > results.document["cores"] / 2 else ""
    )


digest_now = functools.cache(board.code_digest)


def earlier(results: Results) -> str:
    """Says so where the code that the bench measured has changed since."""
    document = results.document
    same = document.get("code") == digest_now(board.measured(document["bench"]))
    return "" if same else ", with earlier code"


def megabytes(results: Results, name: str) -> str:
    """A row in bytes as MB of 10^6 bytes."""
    return f"{results.value(name) / 1e6:.0f} MB"


def seconds_of(report: ProbeReport) -> float:
    """What the probes of a run took together."""
    return sum(run.seconds for run in report.runs)


def cores(results: Results) -> str:
    """On what it ran."""
    return f"{results.document['cores']} cores"


SPEEDS = ("ms", "tokens/s")

# groups of tests/device/run_placement.sh
ON_A_GPU = (
    "square",
    "twice",
    "dtypes",
    "stream",
    "qwen",
    "bert",
    "gpt2",
    "dit",
    "experts",
    "peers",
    "trouble",
    "load",
    "eager",
    "summary",
)

# results of other scripts for machines with a GPU
ON_A_CARD = {
    "bench-scan-gpu.json": "tests/device/run_scan.sh",
    "bench-fit-gpu.json": "tests/device/run_fit.sh",
    "bench-watch-gpu.json": "tests/device/run_watch_fit.sh",
}

EVERY_BENCH = "bench-*.json"

# benches of which single figures stand in a text, which then has `<!--f NAME.code--><!--/f-->` behind them
AGED = ("audit", "device-full", "device-noise", "placement-qwen", "placement-square", "prune")

FIGURES: dict[str, Figure] = {
    "benches": Figure(EVERY_BENCH, every_bench),
    **{f"{name}.code": bench(name, earlier) for name in AGED},
    "images": bench("images", images_block),
    "audit.bars": bench("audit", bars),
    "audit.time": value("audit", "weir/rocm:latest: wall time over the reference's (medians)", "{:.1f}"),
    "audit.vast-memory": value("audit", "vast image: peak memory", "{:.0f} MiB"),
    "audit.naive-cuda": value("audit", "cpu-naive: CUDA that the finding names", "{:.3f} GB", 1e9),
    "audit.naive-cuda-recorded": value("audit", "cpu-naive: CUDA by the wheels' lists", "{:.3f} GB", 1e9),
    "audit.naive-predicted": value("audit", "cpu-naive: predicted Python bytes", "{:.0f} MB", 1e6),
    "audit.naive-slim": value("audit", "cpu: Python bytes", "{:.0f} MB", 1e6),
    "device.quick": bench("device-quick", bars),
    "device.full": bench("device-full", bars),
    "doctor.bars": bench("doctor", bars),
    "placement.bars": bench("placement", bars),
    "placement.bits": value("placement", "packing, bfloat16, Gaussian: bits a weight", "{:.2f}"),
    "placement.modules": value("placement", "random modules x plans", "{:,.0f}"),
    "placement.fused": value("placement-square", "40 layers, batch 1, fused, over all-resident", "{:.2f}"),
    "placement.exact": value(
        "placement-square", "40 layers, batch 1, bit-identical, over all-resident", "{:.2f}"
    ),
    "placement.fused-error": value("placement-square", "40 layers, batch 1, fused: worst error", "{:.1%}"),
    "placement.predicted": value("placement-times", "their predicted time, worst", "{:.1%}"),
    "qwen.exact": value("placement-qwen", "Qwen2.5-3B, placed, captured", "{:.0f}"),
    "qwen.fast": value("placement-qwen", "Qwen2.5-3B, placed, captured, fused", "{:.0f}"),
    "qwen.whole": value("placement-qwen", "Qwen2.5-3B, all-resident, captured", "{:.0f}"),
    "qwen.exact-share": value(
        "placement-qwen", "Qwen2.5-3B: captured (same bits) over all-resident, captured", "{:.2f}"
    ),
    "qwen.fast-share": value(
        "placement-qwen", "Qwen2.5-3B: captured, fused, over all-resident, captured", "{:.2f}"
    ),
    "qwen.eager": value("placement-qwen", "Qwen2.5-3B, all-resident, eager", "{:.1f}"),
    "qwen.over-eager": value(
        "placement-qwen", "Qwen2.5-3B: captured (same bits) over resident eager", "{:.2f}"
    ),
    "qwen.eager-share": value("placement-qwen", "Qwen2.5-3B: placed over resident, eager", "{:.2f}"),
    "qwen.accelerate": value("placement-qwen", "Qwen2.5-3B, accelerate device_map", "{:.1f}"),
    "qwen.accelerate-pinned": value("placement-qwen", "Qwen2.5-3B, accelerate device_map, pinned", "{:.1f}"),
    "noise.different": value("device-noise", "rows called different in two runs of one machine", "{:.1%}"),
    "noise.found": value("device-noise", "rows of 1 MiB or more in which 5% are found", "{:.1%}"),
    "noise.quick": value("device-noise-quick", "quick run of all probes", "{:.1f} s"),
    "placement.times": bench("placement-times", bars),
    "placement.times-h100": bench("placement-times-h100", bars),
    "placement.square-h100": bench("placement-square-h100", bars),
    **{f"placement.{group}": bench(f"placement-{group}", on_a_gpu) for group in ON_A_GPU},
    "prune.bars": bench("prune", bars),
    "prune.images": bench("prune", prune_images),
    "prune.libraries": bench("prune", prune_libraries),
    "prune.gfx906": value("prune", "rocm gfx906: unpacked", "{:.2f} GB", 1e9),
    "prune.whole": value("prune", "rocm: unpruned root file system", "{:.2f} GB", 1e9),
    "scan.answer": value("scan", "the answer of a scan of this CPU", "{}"),
    "scan.bars": bench("scan", bars),
    "scan.gpu": bench("scan-gpu", bars),
    "fit.gpu": bench("fit-gpu", bars),
    "watch.gpu": bench("watch-gpu", bars),
    "trust.bars": bench("probes", bars),
    "probes.quick-s": Figure("h200-quick.json", lambda report: f"{seconds_of(report):.0f} s"),
    "probes.full-min": Figure("h200-full.json", lambda report: f"{seconds_of(report) / 60:.0f} minutes"),
    "probes.answer": Figure("h200-quick.json", lambda report: quoted(headline(report))),
    "probes.full-passes": Figure("h200-full.json", lambda report: passes_compared(headline(report))),
    "build": bench("build", build_block),
}


def load(file: str) -> Any:
    """A probe report, a bench's results or those of every bench; None where the file isn't there."""
    if file == EVERY_BENCH:
        return [load(path.name) for path in sorted(RESULTS.glob(file))]
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


def maker(file: str) -> str:
    """How to make a file of results."""
    if file.startswith("bench-placement-"):
        return "run tests/device/run_placement.sh on a machine with a GPU and copy it from there"
    if file in ON_A_CARD:
        return f"run {ON_A_CARD[file]} on a machine with a GPU and copy it from there"
    if file.startswith("bench-device") or not file.startswith("bench-"):
        return "run tests/device/run_quick.sh on a machine with a GPU and copy it from there"
    name = Path(file).stem
    return f"run make {name}, then make keep-results BENCH={name.removeprefix('bench-')}"


def documents() -> list[Path]:
    """Where figures may stand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def keep(name: str) -> int:
    """Copy what the last whole run of a bench left to the results that the docs show."""
    found = sorted((board.RUNS / name).glob("*"))
    if not found:
        print(f"no results in reports/bench/{name}: run make bench-{name}", file=sys.stderr)
        return 1
    for path in found:
        shutil.copyfile(path, RESULTS / path.name)
        print(f"docs/results/{path.name}: kept")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--keep", metavar="BENCH", help="copy this bench's last results to docs/results first"
    )
    args = parser.parse_args()
    if args.keep is not None and (code := keep(args.keep)):
        return code
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
        print(f"no docs/results/{file}: {maker(file)}; its figures stay as they are", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
