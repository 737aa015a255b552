"""A file's bytes by position, never past its end: what this package reads from; and its errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from buildtool.core.errors import ConfigError, DataError, Exit, ToolError


class BadTarget(ConfigError):
    """Text that doesn't name a GPU target."""


class GpuCodeError(DataError):
    """A file's GPU code can't be read. `place` is the byte offset in the file, when known."""

    def __init__(self, message: str, hint: str = "", *, place: int | None = None) -> None:
        where = f" (at byte {place:#x})" if place is not None else ""
        super().__init__(message + where, hint)
        self.place = place


class BadElf(GpuCodeError):
    """An ELF file contradicts itself or reaches past its end."""


class BadBundle(GpuCodeError):
    """A bundle of code objects contradicts itself, reaches past its end or fails its checksum."""


class PruneRefused(ToolError):
    """The file could be read, but cutting it might break it. The file is untouched."""


class TargetMissing(PruneRefused):
    """A prune would leave nothing for a target that was asked for."""

    exit_code = Exit.USAGE


class VerifyFailed(ToolError):
    """What was written isn't what was planned. The original is untouched."""


@contextmanager
def prefix_errors(thing: object) -> Iterator[None]:
    """Prefix messages of this package's errors with `thing`, the file or image that they are about."""
    try:
        yield
    except (GpuCodeError, PruneRefused, VerifyFailed) as error:
        if str(thing) not in error.message:
            error.message = f"{thing}: {error.message}"
        raise


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
        """The bytes that `exactly` returns, 1 MiB at a time."""
        for start in range(offset, offset + length, CHUNK_BYTES):
            yield self.exactly(start, min(CHUNK_BYTES, offset + length - start), what)

    def skip_zeros(self, offset: int, end: int) -> int:
        """The position of the first byte from `offset` on that isn't zero, or `end`."""
        most = FIRST_BYTES
        while offset < end:
            chunk = self.exactly(offset, min(most, end - offset), "padding")
            rest = chunk.lstrip(b"\0")
            if rest:
                return offset + len(chunk) - len(rest)
            offset, most = offset + len(chunk), min(2 * most, CHUNK_BYTES)
        return end
