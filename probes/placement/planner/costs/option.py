"""The pass that is planned for, and one tier for one block: what a search chooses from. Pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from probes.placement.values import Objective, Tier

UPKEEP: Final = 0.5  # of its compute time: what a block that isn't resident must save in sum


@dataclass(frozen=True)
class Pass:
    """What the pass that is planned for does."""

    rows: int  # input rows of each block: batch x tokens, or the batch when tokens are generated one by one
    batch: int
    context: int  # tokens that attention looks back on
    objective: Objective
    captured: bool = False  # replayed as a graph: Python's time doesn't count
    generating: bool = False


@dataclass(frozen=True, eq=False)
class Option:
    """One tier for one block, or for all blocks of a kind. Two are equal if they are the same one."""

    tier: Tier
    compute_s: float = 0.0  # of the GPU
    unpack_s: float = 0.0  # of the GPU
    cpu_s: float = 0.0
    copy_s: float = 0.0  # of the copy engine, and so of the link
    shared_s: float = 0.0  # of the link: kernels read in place, or the CPU reads the same memory
    disk_s: float = 0.0
    launch_s: float = 0.0  # of Python
    vram_bytes: int = 0
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    disk_bytes: int = 0
    wire_bytes: int = 0
    slot_bytes: int = 0  # that a buffer for moving blocks must have
    scratch_bytes: int = 0  # likewise for unpacked blocks
    dense: bool = False  # packed with 3-bit codes
    kept: bool = False  # with the bits that the model has, and converted for each call
    table: bool = False  # packed and never unpacked as a whole
    pieces: int = 1  # in which it is copied and unpacked, each by way of a slot
    parts: tuple[
        tuple[float, float], ...
    ] = ()  # seconds of each piece's copy and unpacking; none: equal ones

    @cached_property
    def gpu_s(self) -> float:
        """Seconds of the GPU."""
        return self.unpack_s + self.compute_s

    @cached_property
    def moves(self) -> bool:
        """Whether something besides the GPU works for it."""
        return bool(self.copy_s or self.cpu_s or self.shared_s)

    @cached_property
    def way(self) -> tuple[Tier, bool, bool, bool, int]:
        """What distinguishes it among a block's options: the tier, the layout there, and the pieces."""
        return self.tier, self.dense, self.kept, self.table, self.pieces

    @cached_property
    def each(self) -> tuple[tuple[float, float], ...]:
        """Seconds of each piece's copy and of its unpacking."""
        return self.parts or ((self.copy_s / self.pieces, self.unpack_s / self.pieces),) * self.pieces

    @cached_property
    def lanes(self) -> tuple[float, ...]:
        """Seconds of what runs one after the other in call order, of the link, of the disk, and of Python.

        The last lane isn't one: it makes a resident block the choice where it costs no time.
        """
        return (
            self.gpu_s + self.cpu_s,
            self.copy_s + self.shared_s,
            self.disk_s,
            self.launch_s + self.cpu_s,
            0.0 if self.tier == "resident" else UPKEEP * self.compute_s,
        )

    @cached_property
    def memories(self) -> tuple[float, ...]:
        """Bytes of VRAM, of host memory in all, and of it pinned."""
        return (self.vram_bytes, self.pinned_bytes + self.pageable_bytes, self.pinned_bytes)
