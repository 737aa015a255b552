"""What a file of an image says of itself: its digests and, where it is an ELF file, what identifies it.

Files stream by once. An ELF file is kept meanwhile in a file without a name, since its tables come last.
"""

import hashlib
import mmap
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO

from buildtool.core.errors import DataError
from buildtool.gpucode import elf
from buildtool.gpucode.source import GpuCodeError, Source
from buildtool.image.streams import peek
from buildtool.sbom.libraries import LIBRARIES, ElfFacts, Library, file_version

_DISTRIBUTION = (b"usr/lib/", b"lib/")  # where a distribution's own libraries are, which its packages name
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3
_SHT_PROGBITS, _SHT_STRTAB, _SHF_EXECINSTR = 1, 3, 4
_MOST_NOTE_BYTES = 64 << 10  # of all segments of a file
_MOST_SEARCHED = 1 << 30  # bytes of a file's constants and names; libtorch_cpu.so has 0.2 GB of them
_MOST_PLACES = 100  # of one text
_AROUND = 200  # bytes around a library's mark in which its version stands


@dataclass(frozen=True)
class FileFacts:
    """Digests of a file in hex; `shared` of an ELF file that other programs load."""

    sha256: str
    sha1: str
    shared: ElfFacts | None = None


EMPTY = FileFacts(hashlib.sha256().hexdigest(), hashlib.sha1(usedforsecurity=False).hexdigest())


def inspect(path: bytes, _size: int, pieces: Iterator[bytes]) -> FileFacts:
    """Read a file's content: `buildtool.image.layer.Inspect`.

    Raises DataError where an ELF file can't be kept meanwhile.
    """
    head, pieces = peek(pieces, elf.HEADER_BYTES)
    is_shared = elf.is_elf64(head) and head[16:18] == elf.ET_DYN.to_bytes(2, "little")
    if not is_shared or path.startswith(_DISTRIBUTION):
        return digests(pieces)
    try:
        with tempfile.TemporaryFile(prefix="weir-elf-") as kept:
            facts = digests(pieces, kept)
            kept.flush()
            in_name = file_version(path.rpartition(b"/")[2].decode("utf-8", "replace"))
            return replace(facts, shared=_elf_facts(kept, in_name))
    except OSError as error:
        raise DataError(
            f"a library of the image can't be kept in {tempfile.gettempdir()}: {error.strerror}",
            "free some space there, or name another directory: TMPDIR=DIR",
        ) from error


def digests(pieces: Iterator[bytes], copy: IO[bytes] | None = None) -> FileFacts:
    """A file's digests alone; its content goes into `copy`, if there is one."""
    sha256, sha1 = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)  # which SPDX demands
    for piece in pieces:
        sha256.update(piece)
        sha1.update(piece)
        if copy:
            copy.write(piece)
    return FileFacts(sha256.hexdigest(), sha1.hexdigest())


def _elf_facts(file: IO[bytes], in_name: str) -> ElfFacts:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        source = Source(len(content), lambda offset, length: content[offset : offset + length])
        try:
            headers = elf.read_elf(source)
            soname = "".join(elf.dynamic_names(source, headers, elf.DT_SONAME)[:1])
            build_id = _build_id(source, headers)
        except GpuCodeError as error:
            return ElfFacts(unread=error.message)
        spans = _searched(headers, len(content))
        found = ((library.name, _release(content, spans, library)) for library in LIBRARIES if library.mark)
        marks = tuple((name, version) for name, version in found if version is not None)
        return ElfFacts(soname, build_id, marks, _has_word(content, spans, in_name.encode()))


def _build_id(source: Source, headers: elf.Elf) -> str:
    """The build id in hex, by the notes of the loaded segments; empty where there is none."""
    left = _MOST_NOTE_BYTES
    for segment in headers.segments:
        if segment.type != _PT_NOTE or segment.file_bytes > left:
            continue
        left -= segment.file_bytes  # 65,000 segments may have the same notes
        notes, at = source.exactly(segment.offset, segment.file_bytes, "notes"), 0
        while at + 12 <= len(notes):
            n_name, n_bytes, kind = struct.unpack_from("<III", notes, at)
            start = at + 12 + (n_name + 3) // 4 * 4
            if kind == _NT_GNU_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0":
                return notes[start : start + min(n_bytes, 64)].hex()
            at = start + (n_bytes + 3) // 4 * 4
    return ""


def _searched(headers: elf.Elf, size: int) -> list[tuple[int, int]]:
    """Where a file's constants and its names are, each byte once; all of it where it has no sections."""
    spans = [
        (section.offset, section.file_end)
        for section in headers.sections
        if section.type in (_SHT_PROGBITS, _SHT_STRTAB)
        and section.flags & elf.SHF_ALLOC
        and not section.flags & _SHF_EXECINSTR
    ]
    left, kept, done = _MOST_SEARCHED, list[tuple[int, int]](), 0
    for start, end in sorted(spans) or [(0, size)]:
        begin = max(start, done)  # 65,000 sections may have the same bytes
        done = max(done, min(end, begin + left))
        if begin < done:
            kept.append((begin, done))
            left -= done - begin
    return kept


def _release(content: mmap.mmap, spans: list[tuple[int, int]], library: Library) -> str | None:
    """The release of a library whose mark is in a file, empty where the mark has none; None without it."""
    for at, start, end in _places(content, spans, library.mark):
        if not library.version:
            return ""
        around = content[max(start, at - _AROUND) : min(end, at + _AROUND)]
        if version := library.version_in(around):
            return version
    return None


def _has_word(content: mmap.mmap, spans: list[tuple[int, int]], word: bytes) -> bool:
    """Whether a text such as `1.5.7` is there with nothing before or behind it that would be part of it."""
    if b"." not in word:
        return False
    joined = b".0123456789"
    return any(
        content[at - 1 : at] not in joined and content[at + len(word) : at + len(word) + 1] not in joined
        for at, _, _ in _places(content, spans, word)
        if at
    )


def _places(content: mmap.mmap, spans: list[tuple[int, int]], text: bytes) -> Iterator[tuple[int, int, int]]:
    """Where a text is, the first hundred places, each with the span around it."""
    left = _MOST_PLACES
    for start, end in spans:
        at = content.find(text, start, end)
        while at >= 0 and left:
            left -= 1
            yield at, start, end
            at = content.find(text, at + 1, end)
