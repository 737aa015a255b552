"""Did you mean: the known names that a mistyped one resembles. Pure."""

import difflib
from collections.abc import Iterable

_ALIKE = 0.75  # the least similarity, from 0 to 1: one wrong character in a word of four
_ALIKE_SHORT = 0.66  # the same of a word of three: one wrong character
_MOST = 3


def close_names(typed: str, names: Iterable[str]) -> list[str]:
    """The names, three at most, that differ from a typed one by few letters or digits; the closest first."""
    wanted = _letters(typed)
    scored = [(difflib.SequenceMatcher(None, wanted, _letters(name)).ratio(), name) for name in names]
    least = _ALIKE_SHORT if len(wanted) == 3 else _ALIKE
    best = sorted((score, name) for score, name in scored if score >= least)[::-1]
    if best and best[0][0] == 1.0:  # only spaces, hyphens or case differ
        return [best[0][1]]
    return [name for _, name in best[:_MOST]]


def guess(typed: str, names: Iterable[str]) -> str:
    """The beginning of a hint, `did you mean plan? Otherwise `; nothing where no name is close."""
    close = close_names(typed, names)
    return f"did you mean {' or '.join(close)}? Otherwise " if close else ""


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text[:100].casefold()))
