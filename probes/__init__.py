"""Weir's in-container program: what memory placement costs. Needs the standard library and torch alone.

Only `report/page`, which the host imports to draw a page, needs matplotlib.
"""
