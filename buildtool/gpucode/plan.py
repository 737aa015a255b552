"""A pruned file as a value: the original's ranges to copy, bytes to write between them, words to overwrite.

Writes nothing itself; `prune.trees` does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from buildtool.gpucode.source import CHUNK_BYTES, Source


@dataclass(frozen=True)
class Copy:
    """`n_bytes` of the original, from `offset`."""

    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Literal:
    """New bytes."""

    data: bytes

    @property
    def n_bytes(self) -> int:
        """Length of the bytes."""
        return len(self.data)


@dataclass(frozen=True)
class Zeros:
    """Zero bytes, as padding."""

    n_bytes: int


Piece = Copy | Literal | Zeros


@dataclass(frozen=True)
class Patch:
    """Bytes to write at `offset`: of the output in a plan, of the original before the layout is known."""

    offset: int
    data: bytes

    @classmethod
    def word(cls, offset: int, value: int) -> "Patch":
        """A little-endian 64-bit value."""
        return cls(offset, value.to_bytes(8, "little"))


@dataclass(frozen=True)
class PrunePlan:
    """What a pruned file will be made of.

    `bytes_before`, `bytes_after`: the file's length. `kept_bytes`, `removed_bytes`: unpacked bytes
    of code objects by target. Patches are at output positions, applied after the pieces. When nothing
    is to be done, `pieces` is one copy of the whole file and `changed` is false.
    """

    bytes_before: int
    bytes_after: int
    pieces: tuple[Piece, ...]
    patches: tuple[Patch, ...] = ()
    kept_bytes: dict[str, int] = field(default_factory=dict)
    removed_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """False when the file would stay as it is."""
        return self.pieces != (Copy(0, self.bytes_before),)


def total_bytes(pieces: Iterable[Piece]) -> int:
    """Length of the pieces together."""
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
