"""`weir completion`: a script for the shell, made from the parsers of both command lines."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from buildtool.cli.program import VERBS, build_parser
from buildtool.core.errors import Exit
from buildtool.core.files import path_or_name
from probes.core.invocation import PROGRAM
from probes.core.output import write

_SHELLS = ("bash", "zsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("shell", choices=_SHELLS, help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    write(script(args.shell))
    return int(Exit.OK)


def script(shell: str) -> str:
    """The completion script of `weir` for a shell, whatever command started this process."""
    parser = build_parser(VERBS, PROGRAM)
    for action in _actions(parser):
        if action.type in (Path, path_or_name):
            vars(action)["complete"] = shtab.FILE  # an attribute of shtab's that argparse doesn't declare
    return f"{shtab.complete(parser, shell)}\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
