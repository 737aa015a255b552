"""Tar headers with one number replaced by another text, the checksum right again unless it is the number."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from image_maker import END, file, folder, gnu_long, header, padded, pax, symlink

_GNU, _STAR = b"ustar  \0", b"ustar\x0000"
_SEEDS = (
    b"", b"0", b"8", b"9", b"18", b"-1", b"+1", b"1_0", b"0o7", b"0x7", b"1e3", b" 7", b"7 ", b"\t7", b"7\n",
    b"00000000", b"77777777", b"0000007", b"1\x002", b"\x001", b"1 \x002", b"1 2", b"7\xb2", b"\xd9\xa1",
    b"00000000018", b"00000001274", b"00000001275\0", b"77777777777", b"777777777777", b"99999999999",
    b"\x80", b"\xff", b"\xc0", b"\xbf", b"\x80" + bytes(9) + b"\x02\xbc", b"\xff" * 12,
    b"\x80" + b"\xff" * 11,
    b"\x80\0\0\0\x7f" + b"\xff" * 7, b"\x80\0\0\0\x80" + bytes(7), b"\xff\xff\xff\xff\x80" + bytes(7),
    b"\xff" * 4 + b"\x7f" + b"\xff" * 7, b"\x80" + bytes(10) + b"\x01", b"\0" * 12, b" " * 12,
)  # fmt: skip


@dataclass(frozen=True)
class Field:
    """Where a number stands in a block: of which member, and in how many bytes."""

    member: bytes
    start: int
    width: int
    checksum: bool = False

    def with_value(self, value: bytes) -> bytes:
        """The member with this text in the field, cut or padded with NULs."""
        end = self.start + self.width
        block = self.member[: self.start] + value[: self.width].ljust(self.width, b"\0") + self.member[end:]
        if self.checksum:
            return block
        total = sum(block[:512]) - sum(block[148:156]) + 256
        return block[:148] + f"{total:06o}\0 ".encode() + block[156:]


def _fields() -> Mapping[str, Field]:
    plain = header(b"a", 700) + padded(b"x" * 700)
    gnu = header(b"a", 700, magic=_GNU) + padded(b"x" * 700)
    sparse = header(b"a", 700, b"S", magic=_GNU) + padded(b"x" * 700)
    star = header(b"a", 700, tail=b"p".ljust(163, b"\0") + b"tar\0", magic=_STAR) + padded(b"x" * 700)
    long, records = gnu_long(b"n" * 150) + file("b"), pax({"path": "p" * 150}) + file("b")
    spans = {"mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "size": (124, 12), "time": (136, 12)}
    spans |= {"major": (329, 8), "minor": (337, 8)}
    return {
        **{name: Field(plain, *span) for name, span in spans.items()},
        "checksum": Field(plain, 148, 8, checksum=True),
        "size of a directory": Field(folder("d"), 124, 12),
        "size of a link": Field(symlink("l", "a"), 124, 12),
        "size of a GNU name": Field(long, 124, 12),
        "size of a PAX header": Field(records, 124, 12),
        "GNU access time": Field(gnu, 345, 12),
        "GNU change time": Field(gnu, 357, 12),
        "GNU offset": Field(gnu, 369, 12),
        "sparse offset": Field(sparse, 386, 12),
        "sparse length": Field(sparse, 398, 12),
        "sparse map goes on": Field(sparse, 482, 1),
        "sparse real size": Field(sparse, 483, 12),
        "star access time": Field(star, 476, 12),
        "star change time": Field(star, 488, 12),
    }


FIELDS = _fields()
PAX_NUMBERS = ("size", "uid", "gid", "mtime", "GNU.sparse.realsize")
NAMES = (*FIELDS, "PAX record's length", *(f"PAX {key}" for key in PAX_NUMBERS))


def mutated(name: str, count: int) -> Iterator[bytes]:
    """Members, without the archive's end, whose number `name` has each of `count` texts."""
    for value in _values(name, count):
        if name in FIELDS:
            yield FIELDS[name].with_value(value)
        elif name.startswith("PAX record"):
            body = value + b" path=name\n"
            yield header(b"x", len(body), b"x") + padded(body) + file("b", b"y" * 700)
        else:
            records: dict[str, str | bytes] = {name.removeprefix("PAX "): value}
            if "sparse" in name:
                records |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
            yield pax(records) + file("b", b"y" * 700)


def archive_of(member: bytes, n_bytes: int = 0) -> bytes:
    """The member and an honest one behind it; from `n_bytes` on, as often as it takes."""
    return member * max(1, n_bytes // len(member)) + file("after", b"z") + END


def _values(name: str, count: int) -> Iterator[bytes]:
    yield from _SEEDS[:count]
    chance = random.Random(name)
    for number in range(count - len(_SEEDS)):
        width = chance.randint(1, 12)
        match number % 5:
            case 0:
                yield bytes(chance.randrange(256) for _ in range(width))
            case 1:
                yield bytes(chance.choice(b"0123456789 \0+-_xo.") for _ in range(width))
            case 2:  # near what fits
                yield f"{chance.randrange(1400):0{width}o}".encode() + chance.choice(
                    (b"", b" ", b"\0", b"\0x")
                )
            case 3:
                seed = bytearray(chance.choice(_SEEDS) or b"0")
                seed[chance.randrange(len(seed))] = chance.randrange(256)
                yield bytes(seed)
            case _:
                yield (
                    bytes([chance.choice((0x80, 0xFF, 0xC0, 0xA0))])
                    + chance.choice((b"\0", b"\xff")) * chance.randint(0, 9)
                    + chance.randrange(1 << 16).to_bytes(2, "big")
                )
