"""A manual page in roff (man(7)) from argparse parsers: name, synopsis, verbs with their options, exit codes.

It holds no date and no width of a terminal, so that the same parsers always give the same page.
"""

import argparse
import re
from collections.abc import Iterator

_SPACES = re.compile(r"\s+")


def man_page(parser: argparse.ArgumentParser, title: str, version: str) -> str:
    """The page, in section 1, of a program with verbs; `title` is what it does in one line."""
    lines = [
        f'.TH {_roff(parser.prog.upper())} 1 "" "{_roff(version)}" "User commands"',
        ".SH NAME",
        rf"{_roff(parser.prog)} \- {_roff(title)}",
        ".SH SYNOPSIS",
        *_synopsis(parser),
        ".SH DESCRIPTION",
        _roff(parser.description or ""),
        *_arguments(parser),
        ".SH VERBS",
        *_verbs(parser),
    ]
    if parser.epilog:
        lines += [".SH EXIT STATUS", _roff(parser.epilog.removeprefix("Exit codes: "))]
    return "\n".join(line for line in lines if line) + "\n"


def _verbs(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A subsection for each verb, and for each verb below that."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield f".SS {_roff(below.prog)}"
                yield _roff(below.description or "")
                yield from _synopsis(below)
                yield from _arguments(below)
                yield from _verbs(below)


def _synopsis(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The usage on one line, which the reader's program breaks."""
    formatter = argparse.HelpFormatter(parser.prog, width=100_000)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    yield ".PP"
    yield rf"\fB{_roff(formatter.format_help())}\fR"


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A tagged paragraph for each argument but the verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        yield ".TP"
        yield rf"\fB{_roff(_written(action))}\fR"
        yield _roff(_help(parser, action))


def _written(action: argparse.Action) -> str:
    """An argument as it is typed: `--json FILE`."""
    named = action.metavar if isinstance(action.metavar, str) else None
    chosen = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    value = named or chosen or action.dest.upper()
    if not action.option_strings:
        return value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """An argument's help with its default filled in."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _roff(text: str) -> str:
    """Text on one line that roff prints as it is."""
    plain = _SPACES.sub(" ", text).strip().replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq")
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain
