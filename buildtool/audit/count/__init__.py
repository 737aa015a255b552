"""Counts an image's bytes by owner, kind, layer and place."""
