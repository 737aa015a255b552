"""Numbers and checksums in tar headers and PAX records, read as strictly as Go's archive/tar reads them.

Every number of a tar header that the audit uses is read here, on the quick path and on the careful one.
"""

import re
from functools import lru_cache
from typing import Final
from zlib import adler32

LARGEST: Final = (1 << 63) - 1
_PADDING: Final = b" \0"
_OCTAL: Final = b"01234567"
_HIGH: Final = bytes(range(128, 256))
# mode, uid, gid, modification time; the size is read apart, and the checksum isn't a number of the member's
_OTHERS: Final = tuple(map(slice, (100, 108, 116, 136), (108, 116, 124, 148)))
_DEVICES: Final = tuple(map(slice, (329, 337), (337, 345)))  # major and minor; V7 headers have none
_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")
_TIME: Final = re.compile(rb"([+-]?[0-9]+)(?:\.[0-9]*)?")


@lru_cache(4096)  # headers repeat sizes and checksums: a hit takes a fifth of the time
def octal(field: bytes) -> int:
    """The number in a field of octal digits, padded with spaces and NULs; 0 for a blank one.

    Raises ValueError for any other byte, among them signs, underscores and the digits 8 and 9, which
    `int` would read or misread.
    """
    digits = field.strip(_PADDING)
    if digits.strip(_OCTAL):
        raise ValueError(f"{field!r} is not an octal number")
    return int(digits or b"0", 8)


def number(field: bytes) -> int:
    """The number in a header's field: octal up to its first NUL, or base 256 (two's complement).

    What follows the NUL is ignored, as in Go. Raises ValueError for anything else and outside 64 bits.
    """
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << 8 * len(field) - 1) - 1)
        value -= 1 << 8 * len(field) - 1 if field[0] & 0x40 else 0
        if not -LARGEST - 1 <= value <= LARGEST:
            raise ValueError(f"{field!r} is beyond 64 bits")
        return value
    digits = field.strip(_PADDING).partition(b"\0")[0]
    if digits.endswith(b" "):
        raise ValueError(f"{field!r} is not an octal number")
    return octal(digits)


def has_junk(field: bytes) -> bool:
    """Does anything except padding follow the number that `number` reads?"""
    return not field[0] & 0x80 and b"\0" in field.strip(_PADDING)


def check_numbers(block: bytes) -> None:
    """Raises ValueError where an unused number of a header can't be read: engines refuse it."""
    known = block[257:263] == b"ustar\0" or block[257:265] == b"ustar  \0"
    fields = _OTHERS + _DEVICES if known else _OTHERS
    for field in fields:
        number(block[field])


def has_right_checksum(block: bytes) -> bool:
    """Is the checksum that of the header, as unsigned bytes or, as some old writers had it, signed ones?"""
    if block[148] & 0x80:
        return False
    try:
        stated = number(block[148:156])
    except ValueError:
        return False
    summed = unsigned_sum(block)
    if stated == summed:
        return True
    rest = block[:148] + block[156:]
    return stated == summed - 256 * (len(rest) - len(rest.translate(None, _HIGH)))


def unsigned_sum(block: bytes) -> int:
    """The sum of a header's bytes, those of the checksum field counted as spaces.

    Adler-32 adds bytes in C, modulo a prime that three parts of a header can't reach.
    """
    parts = (block[:148], block[156:400], block[400:])
    return sum((adler32(part) & 0xFFFF) - 1 for part in parts) + 256


def pax_integer(value: bytes) -> int:
    """A PAX record's number: decimal digits, perhaps with a sign. Raises ValueError, also beyond 64 bits."""
    if not _INTEGER.fullmatch(value):
        raise ValueError(f"{value[:24]!r} is not a decimal number")
    digits = value.lstrip(b"+-").lstrip(b"0")
    if len(digits) > 19:  # before `int`, whose time is quadratic
        raise ValueError("a number beyond 64 bits")
    number = int(digits or b"0") * (-1 if value[:1] == b"-" else 1)
    if not -LARGEST - 1 <= number <= LARGEST:
        raise ValueError("a number beyond 64 bits")
    return number


def check_pax_time(value: bytes) -> None:
    """Raises ValueError where a PAX record's time isn't decimal seconds."""
    found = _TIME.fullmatch(value)
    if not found:
        raise ValueError(f"{value[:24]!r} is not a time")
    pax_integer(found[1])
