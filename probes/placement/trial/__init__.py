"""The scenarios' model, placed in each of the ways that they compare."""
