"""The reference pages of the compatibility data and the linter's rules."""

import datetime
from collections.abc import Iterator

from buildtool.doctor.compatibility import Answer, Compatibility, Target, cells, compatibility
from buildtool.doctor.lint.rules import rules
from probes.core.quoting import markdown

RUNS = {"yes": "runs", "partly": "in part", "no": "doesn't run"}


def compatibility_page(today: datetime.date | None = None) -> str:
    """Every target with its routes, every build, every source."""
    data = compatibility()
    day = today or datetime.datetime.now(datetime.UTC).date()
    lines = [
        "# Which torch runs on which card",
        "",
        "`weir doctor` answers from this data (`buildtool/doctor/data/compatibility.yaml`).",
        "Official: published by PyTorch or AMD. Distribution: packaged by a Linux distribution.",
        "Community: reported by users. Override: `HSA_OVERRIDE_GFX_VERSION`, which makes a card report a",
        "neighbour's instruction set. A number in brackets is the source; † marks one that is older than a",
        "year. Nothing here was run on an AMD card by this project.",
        "",
    ]
    numbers = {name: number for number, name in enumerate(data.sources, 1)}
    marks = {name: "†" if source.is_stale(day) else "" for name, source in data.sources.items()}

    def cited(name: str) -> str:
        return f" [{numbers[name]}{marks[name]}](#sources)" if name else ""

    for target in data.targets:
        lines += [f"## {target.id}", "", f"{markdown(target.family)}{cited(target.source)}.", ""]
        names = [card.product for card in data.cards if card.target == target.id]
        lines += [f"Cards: {markdown(', '.join(names))}.", ""] if names else []
        lines += ["| Route | On | Torch | With | Python | Get it | |", "|---|---|---|---|---|---|---|"]
        lines += [row(answer, target, data, cited=cited) for answer in target.answers]
        lines.append("")
    return "\n".join([*lines, *sources(data, marks)])


def row(answer: Answer, target: Target, data: Compatibility, *, cited: object) -> str:
    """One route as a row."""
    assert callable(cited)
    known = cells(answer, data, target.id) if answer.runs != "no" or not answer.build else {}
    shown = [
        f"{markdown(str(known[name]))}{cited(known[name].source)}" if name in known else ""
        for name in ("torch", "runtime", "python", "get")
    ]
    route = f"{answer.rank}: {RUNS[answer.runs]}"
    says = f"{markdown(answer.says)}{cited(answer.source)}"
    return f"| {' | '.join([route, ', '.join(answer.platforms), *shown, says])} |"


def sources(data: Compatibility, marks: dict[str, str]) -> Iterator[str]:
    """The numbered list of sources."""
    yield from ("## Sources", "")
    for number, (name, source) in enumerate(data.sources.items(), 1):
        when = f"read {source.date}" if source.read else source.date
        yield f"{number}. {markdown(source.what)}, <{source.where}>, {when}{marks[name]}"
    yield ""


def rules_page() -> str:
    """Every rule of the linter."""
    lines = [
        "# Rules of `weir doctor --lint`",
        "",
        "`weir doctor --lint FILE...` reads Dockerfiles (with BuildKit's own parser), compose files,",
        "shell scripts (with tree-sitter's grammar of bash), devcontainers, Slurm and Apptainer files,",
        "requirements and Python. It runs nothing. An id keeps its meaning. Faults that are more than",
        "notes exit with 1.",
        "",
    ]
    for level in ("error", "warning", "note"):
        lines += [f"## {level.capitalize()}s", "", "| Rule | What | Why | Instead |", "|---|---|---|---|"]
        for name, rule in rules().items():
            if rule.level == level:
                cells = (rule.title, rule.reason, rule.fix)
                lines.append(f"| `{name}` | {' | '.join(markdown(text) for text in cells)} |")
        lines.append("")
    return "\n".join(lines)
