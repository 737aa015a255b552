"""Lossless packing of floating-point weights, and products computed straight from packed weights.

`tensors` packs and unpacks, `products` multiplies, `estimate` predicts sizes, `disk` keeps packed tensors in
files. `estimate`, `forms` and `grid` don't import torch; the package's own `__init__` imports nothing, so the
planner can use them without it.
"""
