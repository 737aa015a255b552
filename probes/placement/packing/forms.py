"""What is known of a packed tensor without its bytes: enough to find its parts in a flat buffer. Pure.

A form is written to JSON by `probes.shared.codec`. Each part begins at a multiple of 256 bytes, which any
load of a GPU can begin at.
"""

from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 256  # bytes
_PART_BYTES: Final = {"uint8": 1, "int16": 2, "int32": 4}


def aligned(n_bytes: int) -> int:
    """The bytes taken by a part of `n_bytes`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PartForm:
    """One flat part of a packed tensor. `dtype` is torch's name of it."""

    name: str
    dtype: str
    length: int  # elements

    @property
    def n_bytes(self) -> int:
        """Bytes without alignment. Raises ValueError for a dtype that no part has."""
        if self.dtype not in _PART_BYTES or self.length < 0:
            raise ValueError(f"a packed tensor has no part of {self.length} x {self.dtype}")
        return self.length * _PART_BYTES[self.dtype]


@dataclass(frozen=True)
class PackedForm:
    """A packed tensor without its bytes: a layout's name, and what the decoder must know."""

    layout: str
    shape: tuple[int, ...]
    base: int
    table: tuple[int, ...]
    parts: tuple[PartForm, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes in a flat buffer, with alignment."""
        return sum(aligned(part.n_bytes) for part in self.parts)

    def offsets(self) -> tuple[int, ...]:
        """Where each part begins in the flat buffer, in bytes."""
        starts, at = [], 0
        for part in self.parts:
            starts.append(at)
            at += aligned(part.n_bytes)
        return tuple(starts)
