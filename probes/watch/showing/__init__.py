"""A watch as words, on a screen, and as metrics."""
