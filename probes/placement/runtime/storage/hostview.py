"""Pinned host memory as a tensor of the GPU, which reads it over the link. Nothing is copied."""

import torch

from probes.errors import Unsupported
from probes.machine.torchfacts import first_line


class _HostView:
    """Pinned host memory as the CUDA array interface shows it to torch.

    Keeps the owner alive: torch holds this object as long as the tensor made from it exists.
    """

    def __init__(self, owner: torch.Tensor) -> None:
        # bfloat16 has no name in this interface; bytes have one, and can be seen as anything
        types = {torch.int64: "<i8", torch.uint8: "|u1"}
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": tuple(owner.shape),
            "typestr": types[owner.dtype],
            "data": (owner.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def zero_copy(pinned: torch.Tensor) -> torch.Tensor:
    """A device tensor over the same bytes in host memory, which must be contiguous.

    Raises Unsupported when the memory isn't pinned (a HIP kernel would fault on it), torch can't take the
    interface (it asks numpy for help), or made a copy.
    """
    if not pinned.is_pinned() or not pinned.is_contiguous():
        raise Unsupported("only contiguous pinned memory can be read in place by the GPU")
    try:
        whole = pinned if pinned.dtype == torch.int64 else pinned.view(torch.uint8)
        view = torch.as_tensor(_HostView(whole), device="cuda").view(pinned.dtype)
    except (RuntimeError, TypeError) as error:
        reason = f"this torch can't make a zero-copy tensor: {first_line(error)}"
        raise Unsupported(reason, "if it says that numpy is missing, add numpy to the image") from error
    if view.data_ptr() != pinned.data_ptr():
        raise Unsupported("torch copied the memory instead of aliasing it: no zero-copy tensors here")
    return view
