"""Zstd frames that hold one cubin each, with nothing around them: cuBLASLt has hundreds in its data.

Of a frame the first block is unpacked, to see what it begins with. The headers of its blocks say where it
ends (RFC 8878), so the rest is skipped.
"""

from dataclasses import dataclass

from buildtool.core.compression import FAULTS, zstd
from buildtool.gpucode.elf import EM_CUDA, HEADER_BYTES
from buildtool.gpucode.forward import FRAME_MAGIC, OBJECT_MAGIC, Read, Reader
from buildtool.gpucode.source import BadBundle

_RLE, _PACKED = 1, 2  # kinds of blocks; the one before is raw, the one after none
_BLOCK_HEADER_BYTES = 3
_MOST_BLOCK_BYTES = 1 << 17
_CHECKSUM_BYTES = 4
# what a block is unpacked behind: a header of a frame with a window of one block, of unknown length
_ALONE = FRAME_MAGIC + b"\x00\x38"
_LEAST_BYTES = 4096  # that looking at a frame counts for
_LEAST_BLOCK_BYTES = 512
_FREE_BYTES = 16 << 20


class Work:
    """How much of a file may be looked at as frames: all of it once, and a bit.

    Frames that are meant don't overlap; a file of nothing but their beginnings would take hours.
    """

    def __init__(self, size: int) -> None:
        self._left = size + _FREE_BYTES

    def take(self, n_bytes: int, start: int) -> None:
        """Count `n_bytes` that are looked at. Raises BadBundle for too much."""
        self._left -= n_bytes
        if self._left < 0:
            raise BadBundle("too many places look like compressed GPU code", place=start)


@dataclass(frozen=True)
class _Header:
    n_bytes: int
    has_checksum: bool


def read_frame(start: int, size: int, head: bytes, work: Work) -> Reader[tuple[int, bytes] | None]:
    """Length of the frame at `start` and its cubin's ELF header; None where it holds something else.

    `head` are its first bytes, HEADER_BYTES where there are as many. Raises BadBundle for one that begins
    with a cubin and isn't whole.
    """
    header = _header_of(head)
    at = start + header.n_bytes if header else size
    block = _block_of(head[at - start :]) if header else None
    if header is None or block is None:
        work.take(_LEAST_BYTES, start)
        return None
    kind, n_bytes, is_last = block
    end = at + _BLOCK_HEADER_BYTES + n_bytes
    work.take(max(end - start, _LEAST_BYTES), start)
    if kind == _RLE or end > size:
        return None
    first = yield Read(start, end - start, "compressed GPU code")
    assert isinstance(first, bytes)
    code = _unpacked(first[at - start :])
    if not _is_cubin(code):
        return None
    while not is_last:
        at, end = end, end + _BLOCK_HEADER_BYTES
        if end > size:
            raise BadBundle("compressed GPU code is cut off", place=start)
        answer = yield Read(at, _BLOCK_HEADER_BYTES, "a compressed block")
        assert isinstance(answer, bytes)
        block = _block_of(answer)
        if block is None:
            raise BadBundle("compressed GPU code has an impossible block", place=at)
        _, n_bytes, is_last = block
        work.take(max(n_bytes, _LEAST_BLOCK_BYTES), start)
        end += n_bytes
    end += _CHECKSUM_BYTES * header.has_checksum
    if end > size:
        raise BadBundle("compressed GPU code is cut off", place=start)
    return end - start, code


def _header_of(head: bytes) -> _Header | None:
    """A frame's header; None where it isn't one, or needs a dictionary."""
    about = head[len(FRAME_MAGIC)] if len(head) > len(FRAME_MAGIC) else 0xFF
    is_single = about >> 5 & 1
    if about & 0b1011:  # reserved, dictionary
        return None
    length_bytes = {0: is_single, 1: 2, 2: 4, 3: 8}[about >> 6]
    return _Header(len(FRAME_MAGIC) + 1 + (not is_single) + length_bytes, bool(about & 0b100))


def _block_of(head: bytes) -> tuple[int, int, bool] | None:
    """Kind of a block, its bytes behind this header, whether it is the last; None for no block."""
    value = int.from_bytes(head[:_BLOCK_HEADER_BYTES], "little")
    kind, n_bytes = value >> 1 & 3, value >> 3
    if len(head) < _BLOCK_HEADER_BYTES or kind > _PACKED or n_bytes > _MOST_BLOCK_BYTES:
        return None
    return kind, 1 if kind == _RLE else n_bytes, bool(value & 1)


def _unpacked(block: bytes) -> bytes:
    """The first bytes of a frame's first block, as many as an ELF header has; none for damage."""
    try:
        return zstd.ZstdDecompressor().decompress(_ALONE + block, HEADER_BYTES)
    except FAULTS:
        return b""


def _is_cubin(code: bytes) -> bool:
    is_whole = len(code) == HEADER_BYTES and code.startswith(OBJECT_MAGIC)
    return is_whole and int.from_bytes(code[18:20], "little") == EM_CUDA
