"""Unpacks LZ4 blocks: CUDA's fat binaries had them before zstd, and cuFFT's have them still."""

_LEAST_MATCH = 4


def unpack_block(block: bytes, n_bytes: int) -> bytes:
    """The `n_bytes` that a block unpacks to. Raises ValueError for damage and for any other length."""
    out = bytearray()
    at, end = 0, len(block)
    try:
        while True:
            token, at = block[at], at + 1
            length, at = _length(block, at, token >> 4)
            if at + length > end:
                raise ValueError("literals reach past the end")
            out += block[at : at + length]
            at += length
            if at == end:
                break
            back, at = block[at] | block[at + 1] << 8, at + 2
            length, at = _length(block, at, token & 15)
            length += _LEAST_MATCH
            if not 0 < back <= len(out) or len(out) + length > n_bytes:
                raise ValueError("a match is impossible")
            start = len(out) - back
            # a match that reaches into itself repeats its beginning
            piece = out[start : start + length]
            out += piece if back >= length else (piece * (length // back + 1))[:length]
    except IndexError as error:
        raise ValueError("the block is cut off") from error
    if len(out) != n_bytes:
        raise ValueError(f"it unpacks to {len(out)} bytes, not {n_bytes}")
    return bytes(out)


def _length(block: bytes, at: int, nibble: int) -> tuple[int, int]:
    """A length whose first four bits are `nibble`, and where it ends."""
    length = nibble
    if nibble == 15:
        while (more := block[at]) == 255:
            length, at = length + 255, at + 1
        length, at = length + more, at + 1
    return length, at
