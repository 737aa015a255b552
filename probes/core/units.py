"""The only formatting of quantities, for both programs. Stored: bytes (int), ns (int) or s (float)."""

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_SHORT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kKmMgGtT])i?b?", re.ASCII)  # 64G, 4gb
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kKMGT]i?B|B|)", re.ASCII)


def _scaled(n_bytes: float, step: int, names: tuple[str, ...]) -> str:
    value, name = float(n_bytes), names[0]
    for name in names:
        if abs(value) < step or name == names[-1]:
            break
        value /= step
    return f"{value:.0f} {name}" if name == "B" else f"{value:.2f} {name}"


def decimal_bytes(n_bytes: float) -> str:
    """Bytes with decimal units (1 MB = 10^6), used for image sizes and bandwidths."""
    return _scaled(n_bytes, 1000, _DECIMAL)


def binary_bytes(n_bytes: float) -> str:
    """Bytes with binary units (1 MiB = 2^20), used for memory and buffers."""
    return _scaled(n_bytes, 1024, _BINARY)


def typed_bytes(n_bytes: int) -> str:
    """Bytes as the value of an option, for a command to paste: `4GiB`, `11654MiB` or `1000B`."""
    for shift, name in ((30, "GiB"), (20, "MiB")):
        if n_bytes and n_bytes % (1 << shift) == 0:
            return f"{n_bytes >> shift}{name}"
    return f"{n_bytes}B"


def gb_per_s(n_bytes: int, seconds: float) -> float:
    """Bandwidth in GB/s, 1 GB = 10^9 bytes. Raises ZeroDivisionError for no time at all."""
    return n_bytes / seconds / 1e9


def duration(seconds: float) -> str:
    """A time span with the unit that reads best: ns, us, ms, s."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(seconds) * factor >= 1.0:
            return f"{seconds * factor:.3g} {name}"
    return f"{seconds * 1e9:.0f} ns"


def parse_bytes(text: str) -> int:
    """`4GiB`, `512 MiB`, `4GB` (10^9) or a plain number, in bytes. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        short = _SHORT.fullmatch(text.strip())
        example = f"{short[1]}{short[2].upper()}iB" if short else "4GiB, 512MiB or 4000000000"
        raise ValueError(f"{text[:40]!r} is not a size; write it as {example}")
    number, unit = match.groups()
    power = " KMGT".index(unit.removesuffix("B")[:1].upper())  # no letter: the first
    return int(float(number) * (1024 if "i" in unit else 1000) ** power)


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`, `3 libraries`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
