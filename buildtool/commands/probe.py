"""`weir probe`: the other program's command line, so that one command does both."""

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `weir --help` needs; the probes parse the arguments themselves."""
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="VERB ...", help="a verb of the probes")


def run(words: Sequence[str]) -> int:
    """Run the probes' command line."""
    from probes import cli

    return cli.main(words)
