"""What the linter reports: a rule that a line breaks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from buildtool.core.errors import EnvironmentMissing

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


@contextmanager
def extra_needed() -> Iterator[None]:
    """Around imports of what the extra `lint` brings. Raises EnvironmentMissing where it isn't installed."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentMissing(
            f"--lint needs {error.name}, which is not installed", "pip install 'gpu-weir[lint]'"
        ) from error
