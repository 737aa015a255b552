"""`python3 -m buildtool`."""

from buildtool.cli.program import entry

entry()
