"""A pruned file as a value: the original's ranges to copy, bytes to write between them, words to overwrite.

Writes nothing itself; `prune.trees` does.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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
HOLE_BYTES = 1 << 13  # from this length on zeros are a hole in the file that is written


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
    of code objects by target; `zeroed_bytes` of those removed became zeros where they are. Patches are at
    output positions, applied after the pieces. When nothing is to be done, `pieces` is one copy of the whole
    file and `changed` is false.
    """

    bytes_before: int
    bytes_after: int
    pieces: tuple[Piece, ...]
    patches: tuple[Patch, ...] = ()
    kept_bytes: dict[str, int] = field(default_factory=dict)
    removed_bytes: dict[str, int] = field(default_factory=dict)
    zeroed_bytes: int = 0

    @classmethod
    def unchanged(cls, size: int, kept_bytes: Mapping[str, int] | None = None) -> "PrunePlan":
        """The plan that leaves a file of `size` bytes as it is."""
        return cls(size, size, (Copy(0, size),), (), dict(kept_bytes or {}))

    @property
    def changed(self) -> bool:
        """False when the file would stay as it is."""
        return self.pieces != (Copy(0, self.bytes_before),)

    def view(self, source: Source) -> Source:
        """The new file as a source, before it is written."""
        return _Ranges(_with_patches(self)).view(source) if self.changed else source

    def then(self, other: "PrunePlan") -> "PrunePlan":
        """This plan and `other`, which was made for its result, as one."""
        if not self.changed:
            return other
        if not other.changed:
            return self
        ranges = _Ranges(_with_patches(self))
        pieces: list[Piece] = []
        for piece in other.pieces:
            pieces += ranges.cut(piece.offset, piece.n_bytes) if isinstance(piece, Copy) else [piece]
        return PrunePlan(self.bytes_before, other.bytes_after, tuple(pieces), other.patches)


def _with_patches(plan: PrunePlan) -> tuple[Piece, ...]:
    """The plan's pieces with its patches in them."""
    if not plan.patches:
        return plan.pieces
    ranges = _Ranges(plan.pieces)
    pieces: list[Piece] = []
    end = 0
    for patch in sorted(plan.patches, key=lambda patch: patch.offset):
        if patch.offset < end:
            raise ValueError(f"two patches at {patch.offset:#x}")
        pieces += [*ranges.cut(end, patch.offset - end), Literal(patch.data)]
        end = patch.offset + len(patch.data)
    return (*pieces, *ranges.cut(end, plan.bytes_after - end))


def streamed(plan: PrunePlan, content: Iterator[bytes]) -> Iterator[bytes]:
    """What a plan whose copies go forward makes of a file that streams by."""
    at, rest = 0, b""
    for piece in _with_patches(plan):
        if not isinstance(piece, Copy):
            yield from chunks_of(piece, Source.of_bytes(b""))
            continue
        end = piece.offset + piece.n_bytes
        while at < end:  # `rest` begins at `at`
            if not rest:
                rest = next(content, b"")
                if not rest:
                    raise ValueError("the file got shorter")
            first = min(max(piece.offset - at, 0), len(rest))
            part = rest[first : end - at]
            yield part
            at, rest = at + first + len(part), rest[first + len(part) :]


class _Ranges:
    """Pieces by position of the file that they make."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if piece.n_bytes]
        self._starts = [0, *accumulate(piece.n_bytes for piece in self._pieces)]

    def cut(self, start: int, n_bytes: int) -> list[Piece]:
        """The pieces that make `n_bytes` from `start` on."""
        result: list[Piece] = []
        end = start + n_bytes
        index = bisect_right(self._starts, start) - 1
        while start < end:
            piece, first = self._pieces[index], start - self._starts[index]
            last = min(piece.n_bytes, first + end - start)
            match piece:
                case Copy():
                    result.append(Copy(piece.offset + first, last - first))
                case Literal():
                    result.append(Literal(piece.data[first:last]))
                case Zeros():
                    result.append(Zeros(last - first))
            start, index = start + last - first, index + 1
        return result

    def view(self, source: Source) -> Source:
        """What the pieces make of `source`."""
        size = self._starts[-1]

        def read_at(offset: int, length: int) -> bytes:
            length = max(min(length, size - offset), 0)
            return b"".join(chunk for piece in self.cut(offset, length) for chunk in chunks_of(piece, source))

        return Source(size, read_at)


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
