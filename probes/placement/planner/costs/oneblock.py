"""One block on one machine in one kind of pass: what the costs of all its tiers are made of. Pure."""

from typing import Final

from probes.placement.models.description import BlockDescription
from probes.placement.packing.grid import is_matrix
from probes.placement.packing.tiles import MOST_ROWS
from probes.placement.planner.costs.blockbytes import (
    cache_bytes,
    given_bytes,
    is_packed,
    main_dtype,
    packed_bytes,
    unpacked_bytes,
)
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.costs.gputime import GpuTime
from probes.placement.planner.costs.option import Pass
from probes.placement.planner.costs.pythontime import PythonTime

FUSED_DTYPES: Final = ("bfloat16", "float16")
# Of the GPU before an eager unpacking: 14 layers took 1.65 ms, captured 1.59, H100
UNPACK_GAP_S: Final = 5e-6


class OneBlock:
    """A block with its bytes and with what the GPU and Python take for it."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self.block, self.machine, self.work = block, machine, work
        self.gpu, self.python = GpuTime(block, machine, work), PythonTime(block, machine, work)
        self.n_bytes, self.given_bytes = unpacked_bytes(block), given_bytes(block)
        self.packed_bytes = sum(map(packed_bytes, block.tensors))
        self.cache_bytes = cache_bytes(block, work)
        self.converts = any(tensor.given for tensor in block.tensors)
        self.unpack_gap_s = 0.0 if work.captured else UNPACK_GAP_S

    @property
    def may_be_dense(self) -> bool:
        """Whether there are 3-bit codes for it, which only kernels unpack in time."""
        return self.machine.triton and main_dtype(self.block) == "bfloat16"

    def copied_s(self, n_bytes: float) -> float:
        """Seconds of the link for so many bytes, in all calls of a pass."""
        return self.block.fetches * (self.machine.link_alpha_s + n_bytes / self.machine.link_rate)

    def fuses(self) -> bool:
        """Whether products are computed straight from the packed weights."""
        dtypes = {tensor.dtype for tensor in self.block.tensors if tensor.use == "product"}
        return (
            all(is_matrix(tensor.shape) for tensor in self.block.tensors if is_packed(tensor))
            and self.work.objective == "fast"
            and not self.converts
            and self.machine.fused_rate > 0
            and self.work.rows <= MOST_ROWS
            and dtypes <= set(FUSED_DTYPES)
        )
