"""What a machine can do at most: arithmetic, memory, links. Everything else is a share of it."""
