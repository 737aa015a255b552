"""Callers over HTTP in one event loop, and what they send. Knows nothing of levels or statistics."""
