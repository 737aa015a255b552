"""Looks for GPU code in a file that streams by, without keeping the stream.

Only a file that shows a container's magic leaves anything behind: an unnamed, mostly empty temporary
file with the pages that say where the code lies, or all from the magic on where that takes more.
"""

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Self

from buildtool.gpucode.errors import GpuCodeError
from buildtool.gpucode.scan import scan_file

_ELF = b"\x7fELF"
_PAGE = 4096
_BUNDLE_MAGIC = (
    b"__CLANG_OFFLOAD_BUNDLE__"  # clang puts it at the start of a page, with its table in that page
)
_OTHER_MAGICS = (b"CCOB", b"\x10\xff\x10\xad")  # at the start of a page too, but must be read whole
_NVIDIA_MAGIC = b"\x50\xed\x55\xba"  # anywhere
_CODE_MACHINES = (b"\xe0\x00", b"\xbe\x00")  # e_machine of AMDGPU and CUDA
_LARGEST_BYTES = 4 << 30  # of temporary file; twice the largest library seen
_NAMES_BYTES = 16 << 20  # before the section headers, where linkers put the sections' names


class GpuProbe:
    """Feed a file's content in order, then ask for `stored_bytes_by_processor`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0  # of the carried bytes in the file: always the start of a page
        self._carry = b""
        self._head = b""
        self._edge = b""  # the last bytes before, in which an NVIDIA magic may begin
        self._tables_at = size
        self._code = False  # all of the file is code: its headers say for what
        self._bundles = False
        self._whole = False
        self._written = 0
        self._trouble = ""
        self._hopeless = False
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
        if self._hopeless:
            return
        window = self._carry + piece
        whole_pages = len(window) & -_PAGE
        self._carry = window[whole_pages:]
        if whole_pages:
            self._take(window[:whole_pages])

    def stored_bytes_by_processor(self) -> Mapping[str, int]:
        """Processor (`gfx90a`, `sm_80`) -> bytes of its code in the file. Raises GpuCodeError."""
        if self._carry and not self._hopeless:
            self._take(self._carry)
        if self._trouble:
            raise GpuCodeError(self._trouble)
        totals: Counter[str] = Counter()
        if self._spool:
            os.ftruncate(self._spool.fileno(), self._size)
            for code in scan_file(self._size, self._read_at).objects:
                totals[code.processor] += code.stored_bytes
        if sum(totals.values()) > self._size or (self._bundles and not totals):
            raise GpuCodeError("its sections and its bundles of GPU code don't fit together")
        return totals

    def _take(self, pages: bytes) -> None:
        if self._at == 0:
            self._begin(pages)
        if self._hopeless:
            return
        try:
            if not (self._code or self._whole):
                self._look(pages)
            tables = self._at + len(pages) > self._tables_at
            if self._whole or (tables and (self._bundles or self._code)):
                self._write(pages, self._at)
        except OSError as error:
            self._trouble, self._hopeless = f"no temporary file to look into it: {error.strerror}", True
        self._edge = pages[-len(_NVIDIA_MAGIC) + 1 :]
        self._at += len(pages)

    def _begin(self, pages: bytes) -> None:
        self._head = pages[: 16 * _PAGE]
        self._hopeless = not pages.startswith((_ELF, _NVIDIA_MAGIC, _BUNDLE_MAGIC, *_OTHER_MAGICS))
        if pages.startswith(_ELF):
            self._code = pages[18:20] in _CODE_MACHINES
            names = 0 if self._code else _NAMES_BYTES
            self._tables_at = int.from_bytes(pages[40:48], "little") - names

    def _look(self, pages: bytes) -> None:
        """Keep the pages where bundles begin; from the first other container on, keep everything."""
        if not self._bundles and (_NVIDIA_MAGIC in pages or _NVIDIA_MAGIC in self._edge + pages[:3]):
            self._whole = True
            self._write(self._edge, self._at - len(self._edge))
        for at in range(0, len(pages), _PAGE):
            first = pages[at : at + 4]
            if first == b"__CL" and pages.startswith(_BUNDLE_MAGIC, at):
                self._bundles = True
                self._write(pages[at : at + _PAGE], self._at + at)
            elif first in _OTHER_MAGICS:
                self._whole = True

    def _write(self, content: bytes, at: int) -> None:
        if self._spool is None:
            self._spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed in __exit__
            self._write(self._head, 0)
        self._written += len(content)
        if self._written > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, "it would take more than 4 GiB")
        view = memoryview(content)
        while view:
            written = os.pwrite(self._spool.fileno(), view, at)
            view, at = view[written:], at + written

    def _read_at(self, offset: int, length: int) -> bytes:
        assert self._spool is not None
        return os.pread(self._spool.fileno(), length, offset)
