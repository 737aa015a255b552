"""The members of a tar that is to be pruned, each with its place in the file; two readers must agree."""

import tarfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from buildtool.audit.read.openfile import headers_of
from buildtool.audit.tar.tarwalk import DANGLING, FILE, NO_PADDING
from buildtool.errors import DataError
from buildtool.gpucode.links import normal_path
from buildtool.prune.rewrite import open_source

BLOCK = tarfile.BLOCKSIZE
AGAIN = "it is damaged or was cut short: make or fetch it again"


@dataclass(frozen=True)
class Member:
    """An entry of a tar: it extends from `start` to `end`, with its content at `content`."""

    info: tarfile.TarInfo
    path: str

    @property
    def start(self) -> int:
        """Where its headers begin."""
        return self.info.offset

    @property
    def content(self) -> int:
        """Where its content begins."""
        return self.info.offset_data

    @property
    def n_bytes(self) -> int:
        """Bytes of content; 0 for what isn't a regular file."""
        return self.info.size if self.info.isreg() else 0

    @property
    def end(self) -> int:
        """Behind its padding."""
        return self.content + self.n_bytes + -self.n_bytes % BLOCK


def members_of(original: Path) -> list[Member]:
    """All members. Raises DataError unless the archive is whole.

    Python's reader ends at the first header that it can't read, as if the archive ended there. The
    audit's reader doesn't, and the two must have seen the same.
    """
    strict = _walked(original)
    try:
        with tarfile.open(original, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            found = [Member(info, normal_path(info.name)) for info in tar]
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"{original} is not a plain tar: {error}", AGAIN) from error
    for member, walked in zip_longest(found, strict):
        if member is None or walked != (member.path, member.content, member.n_bytes):
            place = walked[1] if walked else member.content
            raise DataError(f"{original}: its readers disagree about the member before byte {place:,}", AGAIN)
    if any(member.info.issparse() for member in found):
        raise DataError(f"{original} has sparse members, which aren't read here")
    return found


def _walked(original: Path) -> list[tuple[str, int, int]]:
    """Path, place and bytes of every member's content, as the audit's reader sees them. Raises DataError."""
    with open_source(original) as (_, descriptor):
        reader = headers_of(descriptor, place="the archive")
        try:
            found = [
                (
                    normal_path(name.decode("utf-8", "surrogateescape")),
                    reader.offset,
                    size if kind == FILE else 0,
                )
                for name, kind, size, _ in reader
            ]
        except DataError as fault:
            raise DataError(
                f"{original} is not a plain tar, or it is damaged: {fault.message}", AGAIN
            ) from fault
    if not reader.ended or {NO_PADDING, DANGLING} & reader.notes.keys():
        raise DataError(f"{original} ends without the end marker of an archive", AGAIN)
    return found
