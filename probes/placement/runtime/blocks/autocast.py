"""What autocast makes of the operations on a kind of device, in torch before 2.4 too."""

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of products on `cuda` (AMD's GPUs too) or `cpu`; None where autocast is off."""
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
