"""The command line `weir`: a module a verb."""

from buildtool.cli.program import entry, main

__all__ = ["entry", "main"]
