"""Weir's in-container program: measures what memory placement costs; needs only torch and Python itself.

Only `report/page`, which the host imports to draw a page, needs matplotlib.
"""
