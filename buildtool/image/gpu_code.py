"""Counts GPU code inside a file that streams by: reads its tables and skips the code, and keeps no file."""

import struct
from collections import Counter
from collections.abc import Mapping

from buildtool.gpucode import elf
from buildtool.gpucode.forward import BUNDLE_MAGIC, COMPRESSED_MAGIC, OBJECT_MAGIC, OFFLOAD_MAGIC, Stream
from buildtool.gpucode.scan import FoundCode, code_reader
from buildtool.gpucode.source import GpuCodeError

_PAGE = 4096
BUNDLES = (BUNDLE_MAGIC, COMPRESSED_MAGIC)
_HEAD_BYTES = 16 * _PAGE


class GpuCodeCounter:
    """Feed a file's content in order, then ask for `stored_bytes_by_processor`."""

    def __init__(self, size: int) -> None:
        self._head = b""
        self._totals: Counter[str] = Counter()
        self.fixed: set[str] = set()  # processors with code that a prune leaves there, or puts zeros over
        self._error: GpuCodeError | None = None
        self._stream = Stream(code_reader(size, self._add))

    def feed(self, piece: bytes) -> None:
        """The next piece of content."""
        if len(self._head) < _HEAD_BYTES:
            self._head += piece[: _HEAD_BYTES - len(self._head)]
        if self._error is None:
            try:
                self._stream.feed(piece)
            except GpuCodeError as error:
                self._error = error

    def stored_bytes_by_processor(self) -> Mapping[str, int]:
        """Processor (`gfx90a`, `sm_80`) -> bytes of its code in the file. Raises GpuCodeError."""
        if self._error is not None:
            raise self._error
        self._stream.finish()
        return self._totals

    @property
    def alignment(self) -> int:
        """The largest alignment of the file's segments: a prune shortens the file by multiples of it."""
        start = int.from_bytes(self._head[32:40], "little")
        n_bytes = int.from_bytes(self._head[56:58], "little") * elf.SEGMENT_BYTES
        table = self._head[start : start + n_bytes]
        if not elf.is_elf64(self._head) or len(table) != n_bytes:
            return _PAGE
        aligns: list[int] = [
            fields[7] for fields in struct.iter_unpack(elf.SEGMENT_FORMAT, table) if fields[0] == elf.PT_LOAD
        ]
        return max([_PAGE, *aligns])

    def _add(self, place: FoundCode) -> None:
        bare = place.magic in (OBJECT_MAGIC, OFFLOAD_MAGIC) and place.start > 0  # a runtime's own kernels
        elsewhere = place.magic in BUNDLES and place.start % _PAGE  # clang aligns its section's to pages
        for code in place.codes:
            if not code.is_blank:
                processor = code.target.processor if code.target else code.name
                self._totals[processor] += code.stored_bytes
                if bare or elsewhere:
                    self.fixed.add(processor)
