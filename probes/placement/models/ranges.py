"""Whether the bfloat16 numbers of a checkpoint fit into float16, by their exponents. Reads weights; no torch.

A bfloat16 number has 8 bits of exponent and 7 of mantissa, a float16 one 5 and 10. From 2^-17 up to 65,280
every bfloat16 number is a float16 number too. A larger one would become infinite, a smaller one loses low
bits, and below 2^-25 it becomes zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from probes.core.errors import CheckpointUnreadable
from probes.placement.models.headers import FileState, StoredFile, read_checkpoint

FIRST_BEYOND: Final = 143  # the biased exponent of 2^16
FIRST_EXACT: Final = 110  # of 2^-17, whose lowest mantissa bit is 2^-24, float16's smallest number
FIRST_KEPT: Final = 102  # of 2^-25: what is below it is nearer to zero than to 2^-24
PIECE_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class Ranges:
    """What float16 does to the bfloat16 numbers of a model."""

    numbers: int = 0  # that were read
    rounded: int = 0  # of them, that may lose low bits
    vanished: int = 0  # of them, that become zero; numbers below 1e-38 count as zero already
    beyond: str = ""  # the first tensor with a finite number that float16 doesn't hold; empty: there is none

    def plus(self, other: "Ranges") -> "Ranges":
        """The sum of both."""
        return Ranges(
            self.numbers + other.numbers,
            self.rounded + other.rounded,
            self.vanished + other.vanished,
            self.beyond or other.beyond,
        )


def stored_ranges(path: Path) -> Ranges:
    """The ranges of a checkpoint: a file, a folder or an index. Stops at the first tensor beyond float16.

    Raises CheckpointUnreadable.
    """
    total = Ranges()
    for file in read_checkpoint(path):
        for piece in _ranges_of_file(file):
            total = total.plus(piece)
            if total.beyond:
                return total
    return total


def _ranges_of_file(file: StoredFile) -> Iterator[Ranges]:
    try:
        with file.path.open("rb") as opened:
            for tensor in file.tensors:
                if tensor.dtype != "BF16":
                    continue
                opened.seek(tensor.offset)
                for left in range(tensor.n_bytes, 0, -PIECE_BYTES):
                    piece = opened.read(min(left, PIECE_BYTES))
                    if len(piece) < min(left, PIECE_BYTES):
                        raise CheckpointUnreadable(
                            f"{file.path} was cut while it was read", "copy or download the file again"
                        )
                    yield ranges_of(piece, tensor.name)
            if not file.state.is_still(FileState.of(opened.fileno())):
                raise CheckpointUnreadable(f"{file.path} changed while it was read", "plan again")
    except OSError as error:
        raise CheckpointUnreadable(
            f"can't read {file.path}: {error.strerror or error}", "check the path and its permissions"
        ) from error


def ranges_of(words: bytes, name: str) -> Ranges:
    """The ranges of bfloat16 numbers, little endian. `name` is the tensor's.

    The upper byte of a number has the sign and 7 of the 8 exponent bits.
    """
    upper = words[1::2]
    vanished = _count(upper, 1, FIRST_KEPT // 2)
    rounded = _count(upper, FIRST_KEPT // 2, FIRST_EXACT // 2)
    is_beyond = bool(_count(upper, FIRST_BEYOND // 2 + 1, 127)) or (
        bool(_count(upper, FIRST_BEYOND // 2, FIRST_BEYOND // 2 + 1) or _count(upper, 127, 128))
        and any(
            FIRST_BEYOND <= (high & 127) << 1 | low >> 7 < 255
            for high, low in zip(upper, words[::2], strict=True)
        )
    )
    return Ranges(len(upper), rounded, vanished, name if is_beyond else "")


def _count(upper: bytes, first: int, end: int) -> int:
    """How many of the bytes, without their sign bits, are from `first` to below `end`."""
    counted = bytes(sign | value for sign in (0, 128) for value in range(first, end))
    return len(upper) - len(upper.translate(None, counted))
