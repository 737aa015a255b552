"""Lossless packing of floating-point weights, and products computed straight from packed weights.

- `format`: the form of a packed tensor (its parts and their sizes), predicted sizes, grids and tiles. No
  torch, so the planner uses it.
- `packed`: a packed tensor and its layouts. `codecs`: how exponents become codes of 4 or 3 bits, and back.
- `tensors`: `pack` and `unpack`. `products`: `linear` and single rows of a packed matrix.
- `launch` starts the kernels of `kernels` and `expert_kernels` where a device has Triton.
- `cache`: packed tensors on disk, by content. `staging`: host memory that pieces of tensors pass through.
- `threads`: threads that work on one memory, and survive a fork. No torch.
"""
