"""`buildtool doctor`: shows what this host has and what is missing, with the command that fixes it."""

import argparse

from buildtool.builder import summary
from buildtool.engine import host
from buildtool.errors import Exit
from probes.shared.output import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb takes none."""


def run(args: argparse.Namespace) -> int:  # noqa: ARG001 - every verb is called alike
    """Print the diagnosis; 3 when something that every build needs is missing."""
    rows = host.diagnose(host.gather())
    tell(summary.diagnosis(rows))
    return int(Exit.ENVIRONMENT if any(row.state is host.State.MISSING for row in rows) else Exit.OK)
