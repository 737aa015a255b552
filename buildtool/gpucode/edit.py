"""Describes a file as edits of another one: what to copy, what to write instead.

Only values; writes nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from buildtool.gpucode.source import CHUNK_BYTES, Source


@dataclass(frozen=True)
class Copy:
    """`n_bytes` of the original, from `offset`."""

    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Literal:
    """Bytes of its own."""

    data: bytes

    @property
    def n_bytes(self) -> int:
        """Their number."""
        return len(self.data)


@dataclass(frozen=True)
class Zeros:
    """Padding."""

    n_bytes: int


Piece = Copy | Literal | Zeros


@dataclass(frozen=True)
class Patch:
    """Bytes to overwrite at `offset`; of the original or of the output, as its container defines."""

    offset: int
    data: bytes

    @classmethod
    def word(cls, offset: int, value: int) -> "Patch":
        """A little-endian 64-bit value."""
        return cls(offset, value.to_bytes(8, "little"))


def total_bytes(pieces: Iterable[Piece]) -> int:
    """What the pieces add up to."""
    return sum(piece.n_bytes for piece in pieces)


def chunks_of(piece: Piece, source: Source) -> Iterator[bytes]:
    """A piece's bytes, at most 1 MiB at a time."""
    match piece:
        case Copy():
            yield from source.chunks(piece.offset, piece.n_bytes, "a copied range")
        case Literal():
            yield piece.data
        case Zeros():
            for start in range(0, piece.n_bytes, CHUNK_BYTES):
                yield bytes(min(CHUNK_BYTES, piece.n_bytes - start))
