"""What comparisons of two reports of any kind share: in what they differ, and when they are refused. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from probes.core.errors import ReportError
from probes.core.quoting import markdown

Key = tuple[str, ...]
R = TypeVar("R")


@dataclass(frozen=True)
class Difference:
    """Something in which two reports differ, with the value of each."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.what}: {self.a} / {self.b}"


def differences(a: R, b: R, facts: Sequence[tuple[str, Callable[[R], str]]]) -> tuple[Difference, ...]:
    """In which of these facts two reports of a kind differ."""
    pairs = ((what, fact(a), fact(b)) for what, fact in facts)
    return tuple(Difference(what, of_a, of_b) for what, of_a, of_b in pairs if of_a != of_b)


def refuse_unlike(unlike: Sequence[Difference], names: tuple[str, str], instead: str) -> None:
    """Raises ReportError, which names what is unlike."""
    if unlike:
        raise ReportError(
            f"{names[0]} and {names[1]} can't be compared: {'; '.join(map(str, unlike))}",
            f"{instead}, or add --force and judge for yourself",
        )


def heading(names: tuple[str, str], forced: Sequence[Difference]) -> list[str]:
    """The beginning of a comparison as Markdown: of what, and what makes the two unlike."""
    title = f"# A: {markdown(names[0])}, B: {markdown(names[1])}"
    return [title, *listed("**Unlike, compared because of --force:**", forced)]


def only_in_one(only_a: Sequence[Key], only_b: Sequence[Key]) -> list[str]:
    """The rows that only one of the two has, as Markdown."""
    a, b = ([" ".join(key) for key in keys] for keys in (only_a, only_b))
    return [*listed("Only in A:", a), *listed("Only in B:", b)]


def listed(title: str, items: Sequence[object]) -> list[str]:
    """A Markdown list under its title; nothing for no items."""
    return ["\n".join((title, *(f"- {markdown(str(item))}" for item in items)))] if items else []
