"""The linter's broken files, with their faults marked."""

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MARK = re.compile(r"\s*⟵ ([\w-]+)")


@dataclass(frozen=True)
class Marked:
    """A file and the faults that its author marked, as (line, rule)."""

    name: str
    source: str
    text: str
    faults: tuple[tuple[int, str], ...]


def broken() -> list[Marked]:
    """The files of lint_broken.txt."""
    parts = re.split(
        r"^=== (.+?) \| (.+)\n", (HERE / "lint_broken.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
    )[1:]
    return [marked(name, source, body) for name, source, body in zip(*[iter(parts)] * 3, strict=True)]


def marked(name: str, source: str, body: str) -> Marked:
    lines = body.strip("\n").split("\n")
    faults = [(number, rule) for number, line in enumerate(lines, 1) for rule in MARK.findall(line)]
    clean = [re.split(r"\s*⟵", line)[0] if "⟵" in line else line for line in lines]
    return Marked(name, source, "\n".join(clean) + "\n", tuple(sorted(faults)))
