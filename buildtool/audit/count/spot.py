"""What a finding points at: a path, files of one ending in a directory, or a package.

Names stay bytes until they are shown or pasted: an escaped name in a command would name another file.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from probes.shared.quoting import Unquotable, shell, shell_pattern, terminal

_UNNAMED = "their names can't be pasted safely"
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")  # Debian's names (Policy, 5.6.1), Python's and conda's


class Pattern(NamedTuple):
    """The files of one directory that have one ending."""

    directory: bytes
    ending: bytes


class PackageName(NamedTuple):
    """A package of one of the image's package managers."""

    name: str


Spot = bytes | Pattern | PackageName


def shown(spot: Spot) -> str:
    """A spot for people; paths without the slash that they begin with inside the image."""
    match spot:
        case PackageName(name):
            return terminal(name)
        case Pattern(directory, ending):
            return f"{terminal(directory)}/*.{terminal(ending)}".removeprefix("/")
        case _:
            return terminal(spot)


def naming(spots: Iterable[Spot], command: Callable[[str], str]) -> str:
    """A command that names the spots, made by `command` from their words, without those that can't be pasted.

    These are counted in a comment; where none can be pasted, there is no command.
    """
    words, unnamed = [], 0
    for spot in spots:
        try:
            words.append(_word(spot))
        except Unquotable:
            unnamed += 1
    lines = [command(" ".join(words))] if words else []
    if unnamed:
        lines.append(f"# {unnamed} {'place' if unnamed == 1 else 'places'} cannot be named here: {_UNNAMED}")
    return "\n".join(lines)


def _word(spot: Spot) -> str:
    match spot:
        case PackageName(name):
            if not _PACKAGE.fullmatch(name):
                raise Unquotable("no package can have such a name")
            return name
        case Pattern(directory, ending):
            return shell_pattern(b"/" + directory, ending) if directory else f"/*.{shell(ending)}"
        case _:
            return shell(b"/" + spot)
