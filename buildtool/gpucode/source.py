"""Reads a file's bytes by position, never past its end. Everything here reads this way, from any source."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from buildtool.gpucode.errors import GpuCodeError

ReadAt = Callable[[int, int], bytes]  # (offset, length) -> bytes, fewer only at the end of the file

CHUNK_BYTES = 1 << 20
FIRST_BYTES = 4096  # read at first where little may be needed: what follows may be the next of very many


@dataclass(frozen=True)
class Source:
    """`size` bytes that `read_at` gives."""

    size: int
    read_at: ReadAt

    @classmethod
    def of_bytes(cls, data: bytes | memoryview) -> "Source":
        """Bytes in memory as a source."""
        view = memoryview(data)
        return cls(len(view), lambda offset, length: bytes(view[offset : offset + length]))

    def exactly(self, offset: int, length: int, what: str) -> bytes:
        """`length` bytes from `offset`. Raises GpuCodeError naming `what` when they aren't all there."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise GpuCodeError(f"{what} reaches past the end of the file ({self.size} bytes)", place=offset)
        data = self.read_at(offset, length)
        if len(data) != length:
            raise GpuCodeError(f"{what} could not be read: the file got shorter", place=offset)
        return data

    def chunks(self, offset: int, length: int, what: str) -> Iterator[bytes]:
        """The same bytes, 1 MiB at a time."""
        for start in range(offset, offset + length, CHUNK_BYTES):
            yield self.exactly(start, min(CHUNK_BYTES, offset + length - start), what)

    def skip_zeros(self, offset: int, end: int) -> int:
        """The first place from `offset` on that isn't zero, or `end`."""
        most = FIRST_BYTES
        while offset < end:
            chunk = self.exactly(offset, min(most, end - offset), "padding")
            rest = chunk.lstrip(b"\0")
            if rest:
                return offset + len(chunk) - len(rest)
            offset, most = offset + len(chunk), min(2 * most, CHUNK_BYTES)
        return end
