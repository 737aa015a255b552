"""Python's time for one block: an eager pass waits for it, one that is replayed as a graph doesn't. Pure.

Counted in operations (docs/decisions/0058-time-of-eager-passes.md).
"""

from typing import Final

from probes.placement.models.description import BlockDescription
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.costs.option import Pass

# For a call of a block whose weights come and go, for its copy, its unpacking, and a product with a packed
# tensor beyond one with a plain tensor.
CALL: Final = 0.2
CALL_TENSOR: Final = 0.13  # more, for each of its tensors
COPY: Final = 1.3
UNPACK: Final = 0.6
PACKED_PRODUCT: Final = 1.1
# Of a copy's time: operations take that much longer while the link is busy. Layers of Qwen2.5-3B took 456 us
# of Python each, and 487 beside copies of another stream, H200 (docs/decisions/0073-python-beside-copies.md).
BESIDE_COPY: Final = 0.07
GENERATING: Final = 35  # operations of `generate` around a token, more than around a pass
GUESSED_OPERATIONS: Final = 2  # for each tensor of a block that says nothing


def operations(block: BlockDescription) -> int:
    """How many operations torch launches for a block in one pass."""
    return (block.operations or GUESSED_OPERATIONS * len(block.tensors)) * block.calls


class PythonTime:
    """Seconds of Python for one block in one kind of pass."""

    def __init__(self, block: BlockDescription, machine: Constants, work: Pass) -> None:
        self._machine, self._work = machine, work
        around = block.around + GENERATING * (work.generating and block.around > 0)
        self.resident = self.of(operations(block) + around)
        self._call = CALL + CALL_TENSOR * len(block.tensors)

    def of(self, count: float) -> float:
        """For so many operations, which a graph doesn't take."""
        return 0.0 if self._work.captured else count * self._machine.operation_s

    def beside(self, copy_s: float) -> float:
        """More for everything that Python does while the link carries something for so many seconds."""
        return 0.0 if self._work.captured else BESIDE_COPY * copy_s

    def of_call(self, more: float = 0.0) -> float:
        """For a call that weights are brought for, with so many operations more."""
        return self.of(self._call + more)
