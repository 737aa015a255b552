"""The command lines as they are: the parsers that both programs build, caught before a verb runs.

Used by the reference pages and by the test of every command that the documentation shows. Nothing here names
a module but the two command lines, and nothing depends on how they build their parsers.
"""

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

Main = Callable[[Sequence[str]], int]


class Refused(Exception):
    """A command line that its program doesn't accept; the message is the program's."""


class _Caught(BaseException):
    """Ends a program at the moment when it parses its arguments. Nothing catches it by accident."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def programs() -> dict[str, Main]:
    """The two command lines by the words that start them."""
    from buildtool.cli import program as host
    from probes.cli import program as probes

    return {"weir": host.main, "python3 -m buildtool": host.main, "python3 -m probes": probes.main}


def parse(main: Main, words: Sequence[str]) -> None:
    """Let a program parse a command line, and nothing more. Raises Refused with the program's message."""
    original = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, args: Sequence[str] | None = None) -> argparse.Namespace:
        original(parser, args)
        raise _Caught(parser)

    said = io.StringIO()
    try:
        with (
            patch.object(argparse.ArgumentParser, "parse_args", parse_only),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
        ):
            main(words)
    except _Caught:
        return
    except SystemExit as ended:
        if ended.code in (0, None):  # --help
            return
    raise Refused(said.getvalue().strip() or "the program ended without reading its arguments")


def parser_of(main: Main, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser that a program builds for a command line."""

    def catch(parser: argparse.ArgumentParser, *_args: object, **_options: object) -> argparse.Namespace:
        raise _Caught(parser)

    try:
        with patch.object(argparse.ArgumentParser, "parse_args", catch):
            main(words)
    except _Caught as caught:
        return caught.parser
    raise Refused(f"the program has no parser for {words}")


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser's verbs; empty where it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What each verb does, in a line."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {choice.dest: choice.help or "" for choice in action._choices_actions}
    return {}


def verbs(main: Main) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every verb of a program with its own parser, which has arguments only when it is asked for."""
    for verb in subparsers(parser_of(main, ["--help"])):
        caught = parser_of(main, [verb, "--help"])
        yield verb, subparsers(caught).get(verb, caught)
