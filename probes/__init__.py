"""Weir's in-container program: measures what memory placement costs; needs only torch and Python itself.

Only `reports`, whose pages the host draws, needs matplotlib.
"""
