"""`weir completion`: a script for the shell, or the manual page, made from the parsers of both programs."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from buildtool.cli.program import VERBS, build_parser
from buildtool.core.errors import Exit
from buildtool.core.files import path_or_name
from buildtool.core.man_page import man_page
from probes.core.invocation import PROGRAM, tool_version
from probes.core.output import write

_SHELLS = ("bash", "fish", "zsh")
_MAN = "man"
_TITLE = "container images and memory placement for PyTorch services"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "shell",
        choices=(*_SHELLS, _MAN),
        help="the shell that reads the script; or `man`, for the manual page",
    )


def run(args: argparse.Namespace) -> int:
    """Print the script or the page."""
    write(manual() if args.shell == _MAN else script(args.shell))
    return int(Exit.OK)


def script(shell: str) -> str:
    """The completion script of `weir` for a shell, whatever command started this process."""
    parser = build_parser(VERBS, PROGRAM)
    for action in _actions(parser):
        if action.type in (Path, path_or_name):
            vars(action)["complete"] = shtab.FILE  # an attribute of shtab's that argparse doesn't declare
    return f"{shtab.complete(parser, shell)}\n"


def manual() -> str:
    """The manual page weir(1)."""
    return man_page(build_parser(VERBS, PROGRAM), _TITLE, f"gpu-weir {tool_version()}")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
