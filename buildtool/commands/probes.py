"""`buildtool probes`: the other program's command line, so that one command does both."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb: all of them are the probes'."""
    parser.epilog = "VERB is one of those of `python -m probes`, which lists them with --help."
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="VERB ...", help="passed on as it is")


def run(args: argparse.Namespace) -> int:
    """Run the probes' command line."""
    from probes import cli

    return cli.main(args.words)
