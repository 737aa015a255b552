"""The command line `weir`: program.py finds the verb's module and turns failures into exit codes.

Each other module is a verb: `add_arguments(parser)` and `run(args) -> exit code`. No verb imports another;
arguments.py holds what `build` and `plan` share. To add a verb, write its module and name it in
`program.VERBS`.
"""

from buildtool.cli.program import entry, main

__all__ = ["entry", "main"]
