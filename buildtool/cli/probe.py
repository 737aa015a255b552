"""`weir probe`: the other program's command line, so that one command does both."""

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verbs of the probes, for completion; their command lines are passed on unparsed."""
    from probes.cli import program

    program.add_arguments(parser)


def run(words: Sequence[str]) -> int:
    """Run the probes' command line."""
    from probes.cli import program

    return program.main(words)
