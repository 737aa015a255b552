"""Judges the counts: findings with their remedies, and the budget."""
