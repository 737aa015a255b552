"""One packed tensor as a file: a header, then its bytes as they are in a flat buffer.

The header has digests of the entry's name and the file's own bytes, so damage is noticed, and an entry under
the name of another. Bytes are written while they are packed, and read in pieces to where they belong.
"""

import errno
import hashlib
import json
import os
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

import torch

from probes.placement.packing.disk.content import Content, digest_of
from probes.placement.packing.forms import ALIGNMENT, PackedForm
from probes.placement.packing.packed import Packed, Put, form, outline
from probes.placement.packing.staging import Buffers, bytes_of
from probes.placement.packing.tensors import Values
from probes.shared.codec import decode, encode, load

_MOST_HEADER: Final = 8 * ALIGNMENT


@dataclass(frozen=True)
class Header:
    """What is known of an entry before its bytes are read."""

    digest: str  # of the entry's key, the form's JSON and the bytes that follow
    early: str  # of the key, the form's JSON and the part `starts`, which are used before the rest is read
    form: PackedForm | None  # None: packing this tensor saves nothing


def opened(path: Path) -> BufferedReader:
    """An ordinary file, to be read. Raises OSError for anything else: nobody may write into a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        path.unlink()  # writing there would wait as well
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


@dataclass(frozen=True)
class Entry:
    """An entry that is open."""

    descriptor: int
    key: str  # that it is kept under
    start: int  # of the bytes behind the header
    header: Header

    @staticmethod
    def of(file: BufferedReader, key: str) -> "Entry":
        """Raises ValueError or KeyError for a file that isn't what was written."""
        line = file.readline(_MOST_HEADER)
        if not line.endswith(b"\n") or len(line) != _MOST_HEADER:
            raise ValueError("the header is cut")
        header = decode(Header, load(line))
        n_bytes = header.form.n_bytes if header.form else 0
        if os.fstat(file.fileno()).st_size != len(line) + n_bytes:
            raise ValueError("the file's size isn't its header's")
        return Entry(file.fileno(), key, len(line), header)

    def outline(self) -> Packed | None:
        """Raises ValueError or KeyError likewise."""
        of = self.header.form
        starts = torch.empty(0, dtype=torch.int32, device="cpu")
        if of:
            names = [part.name for part in of.parts]
            at = names.index("starts")
            starts = torch.empty(of.parts[at].length, dtype=torch.int32, device="cpu")
            self._fill(of.offsets()[at], starts)
        if _early(self.key, of, starts) != self.header.early:
            raise ValueError("the outline isn't the one that was written")
        return outline(of, starts) if of else None

    def digest(self, buffers: Buffers, put: Put) -> str:
        """That of the key, the form and the bytes, which `put` gets."""
        of = self.header.form

        def piece(start: int, memory: torch.Tensor) -> bytes:
            self._fill(start, memory)
            put(start, memory)
            return hashlib.sha256(bytes_of(memory)).digest()

        return digest_of(_about(self.key, of), buffers.each(of.n_bytes if of else 0, piece))

    def _fill(self, start: int, target: torch.Tensor) -> None:
        view, at = bytes_of(target), self.start + start
        while view:
            count = os.preadv(self.descriptor, [view], at)
            if not count:
                raise ValueError("the file was cut")
            view, at = view[count:], at + count


def written(
    descriptor: int, key: str, content: Content, values: Values, *, most_bytes: int, buffers: Buffers
) -> Packed | None:
    """Pack a content into a new file, for the entry `key`; None where that saves nothing, as its header says.

    Raises OSError for a disk that is full and for an entry of more than `most_bytes`.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="weir-store") as thread:
        writer = _Writer(descriptor, thread)
        made = content.pack(writer.put, values)
        writer.wait()
    _complete(descriptor, key, made, most_bytes, buffers)
    return made


@dataclass
class _Writer:
    """Brings packed bytes to their place in an entry, while the next ones are packed."""

    descriptor: int
    thread: ThreadPoolExecutor
    begun: "Future[None] | None" = None

    def put(self, start: int, piece: torch.Tensor) -> None:
        """Raises OSError for what was put before."""
        piece = piece.cpu()
        self.wait()
        self.begun = self.thread.submit(self._write, start, piece)

    def wait(self) -> None:
        """Raises OSError likewise."""
        if self.begun:
            self.begun.result()

    def _write(self, start: int, piece: torch.Tensor) -> None:
        view, at = bytes_of(piece), _MOST_HEADER + start
        while view:
            count = os.pwrite(self.descriptor, view, at)
            view, at = view[count:], at + count


def _complete(descriptor: int, key: str, packed: Packed | None, most_bytes: int, buffers: Buffers) -> None:
    """Write the header. Raises OSError for an entry that would be too large."""
    of = form(packed) if packed else None
    n_bytes = of.n_bytes if of else 0
    if n_bytes > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    os.ftruncate(descriptor, _MOST_HEADER + n_bytes)
    starts = packed.parts["starts"] if packed else torch.empty(0, dtype=torch.int32, device="cpu")
    early = _early(key, of, starts)
    digest = Entry(descriptor, key, _MOST_HEADER, Header("", early, of)).digest(buffers, _forget)
    line = json.dumps(encode(Header(digest, early, of))).encode().ljust(_MOST_HEADER - 1) + b"\n"
    if len(line) > _MOST_HEADER:
        raise OSError(errno.EFBIG, "the header is too long")
    os.pwrite(descriptor, line, 0)


def _early(key: str, of: PackedForm | None, starts: torch.Tensor) -> str:
    return hashlib.sha256(_about(key, of).encode() + bytes_of(starts)).hexdigest()


def _about(key: str, of: PackedForm | None) -> str:
    return json.dumps([key, encode(of)])


def _forget(_start: int, _piece: torch.Tensor) -> None:
    """Bytes are of no use where only their digest is wanted."""
