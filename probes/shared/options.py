"""The two most frequent kinds of options of the command lines, each said in one line."""

import argparse
from collections.abc import Callable


def flag(to: argparse._ActionsContainer, name: str, what: str) -> None:
    """Add an option without a value: true where it is given."""
    to.add_argument(name, action="store_true", help=what)


def option(
    to: argparse._ActionsContainer,
    name: str,
    metavar: str,
    what: str,
    read: Callable[[str], object] = str,
    *,
    default: object = None,
) -> None:
    """Add an option with a value. Its help ends with the default; where that is None, `what` says it."""
    end = "" if default is None else " (default: %(default)s)"
    to.add_argument(name, metavar=metavar, help=f"{what}{end}", type=read, default=default)
