"""`buildtool doctor`: what this host has and lacks, with the command that mends it."""

import argparse

from buildtool import host, table
from buildtool.errors import Exit
from probes.output import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb takes none."""


def run(args: argparse.Namespace) -> int:  # noqa: ARG001 - every verb is called alike
    """Print the diagnosis; 3 when something that every build needs is missing."""
    rows = host.diagnose(host.gather())
    tell(table.diagnosis(rows))
    return int(Exit.ENVIRONMENT if any(row.state is host.State.MISSING for row in rows) else Exit.OK)
