"""Triton kernels that unpack weights, and that multiply with packed ones. Only this package imports Triton.

`launching` is what others call; it decides whether a device has Triton. The kernels take plain tensors and
numbers. They were run on NVIDIA GPUs and in Triton's interpreter, and never on an AMD GPU.
"""
