"""Builds a model whose weights go from a checkpoint to their tiers, one tensor at a time."""
