"""The content that probes move: arithmetic, so any piece of it can be checked without a copy.

Word i (64 bits, from the start of the buffer) is step * i + start modulo 2^64. It is never all zeros.
"""

from dataclasses import dataclass

from probes.errors import ContentMismatch
from probes.shared.units import binary_bytes

WORD_BYTES = 8
# 2^64 over the golden ratio, made odd: neighbours differ in every byte (Knuth's multiplicative hashing)
STEP = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def signed(value: int) -> int:
    """The 64-bit two's complement reading of an integer, as torch's int64 holds it."""
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS // 2 else value


@dataclass(frozen=True)
class Pattern:
    """An arithmetic progression modulo 2^64."""

    start: int
    step: int = STEP

    def plus(self, amount: int) -> "Pattern":
        """The pattern whose words are all larger by `amount`."""
        return Pattern(self.start + amount, self.step)

    def total(self, first_word: int, words: int) -> int:
        """The sum of words first_word .. first_word+words-1, as an int64 sum wraps."""
        indices = words * first_word + words * (words - 1) // 2
        return signed(self.step * indices + self.start * words)


def mismatch(what: str, n_bytes: int) -> ContentMismatch:
    """The error for content that isn't what the operation leaves."""
    return ContentMismatch(
        f"{what} of {binary_bytes(n_bytes)}: the content that arrived is not what was sent",
        "the memory, the link or the driver is faulty; see the kernel's log (dmesg)",
    )
