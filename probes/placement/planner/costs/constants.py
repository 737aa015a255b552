"""What a plan needs to know of a machine, as one value. Pure.

Rates are what programs reach, not peaks. They come from a probe report (`reported.py`) or from a named
profile (`profiles.py`), and `origin` says which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from probes.shared.units import binary_bytes

PROFILE_SPREAD = 0.40  # half the width of the interval around a time predicted from data sheets, relative
ASSUMED_HOST: Final = 64 << 30  # bytes of host memory of a machine of which nobody knows
REPORT_SPREAD = 0.15  # around one predicted from this machine's own measurements


@dataclass(frozen=True)
class Constants:
    """One machine: a GPU, its link and its host. Bytes, bytes a second, seconds, operations a second."""

    name: str
    origin: str  # "measured: report.json", "predicted: profile wx4100"
    vram_bytes: int
    vram_rate: float  # kernels reading VRAM
    unpack_rate: float  # packed bytes read plus unpacked bytes written, with 4-bit codes
    ranked_rate: float  # the same with 3-bit codes, whose escapes are counted
    activation_rate: float  # kernels besides products reading and writing activations, mostly in a cache
    operations_rate: float  # the same by torch operations, where no kernel writes the wanted dtype
    fused_rate: float  # packed bytes read by a product straight from them; 0: there is no such product
    experts_rate: float  # experts' products reading their weights, one kernel for all of them
    fused_rows_rate: float  # the same of several rows in matrices of few outputs: bound by their decoding
    link_rate: float  # copies of pinned memory to VRAM
    link_alpha_s: float  # and what each copy takes beyond its bytes
    pageable_rate: float
    zero_copy_rate: float  # kernels reading pinned host memory
    flops: Mapping[str, float]  # multiplications and additions, by dtype: float16, bfloat16, float32
    cpu_rate: float  # products on the CPU reading weights at batch 1
    cpu_flops: float
    disk_rate: float
    operation_s: float  # of the host, for each operation that torch launches
    kernel_s: float  # of the device, for each kernel besides products, beyond its bytes
    product_s: float  # likewise for each product
    product_step_s: float  # of a product of few rows, for each number of an input row: one multiplier's turn
    unpack_item_s: float  # of the device, for each tensor that is unpacked, beyond its bytes
    context_bytes: int  # of VRAM, by the driver
    workspace_bytes: int  # of VRAM, by the libraries that multiply
    bfloat16: bool  # has units for it
    triton: bool
    unified: bool = False  # VRAM and host memory are one
    pinned_share: float = 1.0  # of the host's memory that may be pinned
    host_bytes: int | None = None  # of memory, if known
    spread: float = PROFILE_SPREAD
    notes: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU at all: else everything is on the CPU."""
        return self.vram_bytes > 0

    @property
    def converts(self) -> bool:
        """Whether bfloat16 weights have to be converted: the GPU has no units for them."""
        return self.has_gpu and not self.bfloat16

    def rate_of_products(self, dtype: str) -> float:
        """Operations a second in a dtype; in one that isn't listed, those of float32."""
        return self.flops.get(dtype, self.flops["float32"])


def with_host(machine: Constants, host: int | None) -> tuple[Constants, int | None]:
    """The machine and its host's budget; where neither is known, one is assumed, and a note says so."""
    if host is not None or machine.host_bytes is not None:
        return machine, host
    note = f"{binary_bytes(ASSUMED_HOST)} of host memory are assumed: --host says how much there is"
    return replace(machine, notes=(*machine.notes, note)), ASSUMED_HOST
