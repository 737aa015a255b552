"""Weir's in-container program: what memory placement costs here. Standard library and torch only."""
