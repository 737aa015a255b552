"""`python -m buildtool`."""

from buildtool.cli import entry

entry()
