"""Counts GPU code inside a file that streams by, without keeping the stream.

Only for a file with a container's magic something is kept: an unnamed sparse temporary file with the pages
that hold the tables, or with all from the magic on where the tables are elsewhere.
"""

import errno
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Self

from buildtool.gpucode import elf
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import GpuCodeError, Source

_ELF = b"\x7fELF"
_PAGE = 4096
_HEAD_BYTES = 16 * _PAGE
# at the start of a page; a bundle's table is in that page, the others must be read to their end
_BUNDLE_MAGIC, _OTHER_MAGICS = b"__CLANG_OFFLOAD_BUNDLE__", (b"CCOB", b"\x10\xff\x10\xad")
_FIRST_BYTES = b"_C\x10"  # of one of these magics
_NVIDIA_MAGIC = b"\x50\xed\x55\xba"  # nvcc writes it after `.align 8`
_TAIL_BYTES = 32  # more than any magic
_CODE_MACHINES = (b"\xe0\x00", b"\xbe\x00")  # e_machine of AMDGPU and CUDA
_LARGEST_BYTES = 4 << 30  # of temporary file; twice the largest library seen
_NAMES_BYTES = 16 << 20  # before the section headers, where linkers put the sections' names


class GpuCodeCounter:
    """Feed a file's content in order, then ask for `stored_bytes_by_processor`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0  # of the next piece in the file
        self._carry = b""  # what came before the head was complete
        self._head = b""
        self._tail = b""  # the last bytes before the next piece, in which a magic may begin
        self._tables_at = size
        self._is_code = False  # the file is a code object itself: its headers name the target
        self._has_bundles = False
        self._keeps_rest = False
        self._spans: list[tuple[int, int]] = []  # spans of the file to keep
        self._written = 0
        self._error = ""
        self._skipped = False
        self._spool: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spool:
            self._spool.close()

    def feed(self, piece: bytes) -> None:
        """The next piece of content."""
        if self._skipped:
            return
        if not self._head:
            self._carry += piece
            if len(self._carry) < _HEAD_BYTES:
                return
            piece, self._carry = self._carry, b""
        self._take(piece)

    def stored_bytes_by_processor(self) -> Mapping[str, int]:
        """Processor (`gfx90a`, `sm_80`) -> bytes of its code in the file. Raises GpuCodeError."""
        if self._carry:
            self._take(self._carry)
        if self._error:
            raise GpuCodeError(self._error)
        totals: Counter[str] = Counter()
        if self._spool:
            os.ftruncate(self._spool.fileno(), self._size)
            for target, stored_bytes in scan_file(Source(self._size, self._read_at)).items():
                totals[target.partition(":")[0]] += stored_bytes
        if sum(totals.values()) > self._size or (self._has_bundles and not totals):
            raise GpuCodeError("its sections and its bundles of GPU code don't fit together")
        return totals

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

    def _take(self, piece: bytes) -> None:
        try:
            if not self._head:
                self._begin(piece)
            if not (self._skipped or self._is_code or self._keeps_rest):
                self._find_containers(self._tail + piece[:_TAIL_BYTES], self._at - len(self._tail))
                self._find_containers(piece, self._at)
            for start, end in self._spans:
                begin = max(start, self._at)
                self._write(memoryview(piece)[begin - self._at : end - self._at], begin)
        except OSError as error:
            self._error, self._skipped = f"no temporary file to inspect it: {error.strerror}", True
        self._at += len(piece)
        self._tail = piece[-_TAIL_BYTES:]
        self._spans = [span for span in self._spans if span[1] > self._at]

    def _begin(self, piece: bytes) -> None:
        self._head = piece[:_HEAD_BYTES]
        self._skipped = not piece.startswith((_ELF, _NVIDIA_MAGIC, _BUNDLE_MAGIC, *_OTHER_MAGICS))
        if piece.startswith(_ELF):
            self._is_code = piece[18:20] in _CODE_MACHINES
            names = 0 if self._is_code else _NAMES_BYTES
            self._tables_at = int.from_bytes(piece[40:48], "little") - names
        if self._is_code:
            self._keep_span(self._tables_at, self._size)

    def _find_containers(self, block: bytes, base: int) -> None:
        """Find containers that begin in a block at offset `base`; keep all but bundles to the file's end.

        Every byte of an image's libraries passes here: slices with a step are what makes it quick enough.
        """
        if not self._has_bundles:
            self._find_nvidia(block, base)
        offset = -base % _PAGE
        for number, first in enumerate(block[offset::_PAGE]):
            if first in _FIRST_BYTES:
                at = offset + number * _PAGE
                if block.startswith(_BUNDLE_MAGIC, at):
                    if not self._has_bundles:
                        self._keep_span(self._tables_at, self._size)
                    self._has_bundles = True
                    self._keep_span(base + at, base + at + _PAGE)
                elif block.startswith(_OTHER_MAGICS, at):
                    self._keep_rest(base + at)

    def _find_nvidia(self, block: bytes, base: int) -> None:
        offset = (3 - base) % 8
        fourths = block[offset::8]  # where the magic's rarest byte would be
        match = fourths.find(_NVIDIA_MAGIC[3])
        while match >= 0:
            at = offset + 8 * match - 3
            if at >= 0 and block.startswith(_NVIDIA_MAGIC, at):
                self._keep_rest(base + at)
                break
            match = fourths.find(_NVIDIA_MAGIC[3], match + 1)

    def _keep_rest(self, start: int) -> None:
        if not self._keeps_rest:
            self._keeps_rest = True
            self._spans.clear()
            self._keep_span(start, self._size)

    def _keep_span(self, start: int, end: int) -> None:
        """Keep a span of the file; the part of it that is in the tail is written now."""
        before = self._at - start
        if 0 < before <= len(self._tail):
            self._write(memoryview(self._tail)[-before:], start)
        self._spans.append((start, end))

    def _write(self, content: bytes | memoryview, at: int) -> None:
        if self._spool is None:
            self._spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed in __exit__
            self._write(self._head, 0)
        self._written += len(content)
        if self._written > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, f"it would take more than {_LARGEST_BYTES:,} bytes")
        view = memoryview(content)
        while view:
            written = os.pwrite(self._spool.fileno(), view, at)
            view, at = view[written:], at + written

    def _read_at(self, offset: int, length: int) -> bytes:
        assert self._spool is not None
        return os.pread(self._spool.fileno(), length, offset)
