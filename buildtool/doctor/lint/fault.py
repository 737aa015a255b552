"""What the linter reports: a rule that a line breaks."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Rule:
    """One rule: what is wrong, why that matters, and what to write instead."""

    level: Level
    title: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Word:
    """A text at a line of a file, lines from 1."""

    text: str
    line: int


@dataclass(frozen=True, order=True)
class Fault:
    """A line that breaks a rule. `detail` is what stands there."""

    line: int
    rule: str
    detail: str
