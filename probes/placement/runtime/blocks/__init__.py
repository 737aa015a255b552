"""A placed block: its bytes in one piece, its parameters here or away, its order among others, its lanes."""
