"""One module a verb of `python -m buildtool`: `add_arguments(parser)` and `run(args) -> int`."""
