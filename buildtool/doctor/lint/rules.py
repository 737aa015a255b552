"""What all rules share: their texts in data/rules.yaml, faults, and the lists that rule functions join."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, Literal, ParamSpec

from buildtool.core.errors import EnvironmentMissing
from buildtool.core.yaml_text import Limits, parse
from probes.core.codec import decode

Level = Literal["error", "warning", "note"]

FILE = Path(__file__).parents[1] / "data" / "rules.yaml"
LIMITS = Limits(depth=8, nodes=50_000)


@dataclass(frozen=True)
class Rule:
    """A rule's texts: what is wrong, why that matters, and what to write instead."""

    level: Level
    title: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Word:
    """A text at a line of a file; lines count from 1."""

    text: str
    line: int


@dataclass(frozen=True, order=True)
class Fault:
    """A line that breaks a rule. `rule` is the rule's id, `detail` what stands there."""

    line: int
    rule: str
    detail: str


P = ParamSpec("P")


class Checks(Generic[P]):
    """The rule functions for one kind of subject. `add` is a decorator; calling the object runs them all."""

    def __init__(self) -> None:
        self._functions: list[Callable[P, Iterator[Fault]]] = []

    def add(self, function: Callable[P, Iterator[Fault]]) -> Callable[P, Iterator[Fault]]:
        """Run this function for every subject."""
        self._functions.append(function)
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Fault]:
        """All faults of one subject."""
        for function in self._functions:
            yield from function(*args, **kwargs)


@cache
def rules() -> Mapping[str, Rule]:
    """The rules' texts by id. Raises ConfigError or DataError for a damaged installation."""
    data = parse(FILE.read_text(encoding="utf-8"), str(FILE), LIMITS).data
    return {name: decode(Rule, texts, name) for name, texts in data.items()} if isinstance(data, dict) else {}


@contextmanager
def extra_needed() -> Iterator[None]:
    """Around imports of what the extra `lint` brings. Raises EnvironmentMissing where it isn't installed."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentMissing(
            f"--lint needs {error.name}, which is not installed", "pip install 'gpu-weir[lint]'"
        ) from error
