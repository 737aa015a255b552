"""Requests of different callers computed together: what is joined, and the one thread that computes."""
