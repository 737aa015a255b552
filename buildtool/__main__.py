"""`python3 -m buildtool`."""

from buildtool.cli import entry

entry()
