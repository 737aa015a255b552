"""One module per verb of `weir`: `add_arguments(parser)` and `run(args) -> int`."""
