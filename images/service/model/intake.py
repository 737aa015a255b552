"""What is taken from a hub: its answers are judged before the library makes paths, sizes and files of them.

A hub, or whoever answers for it, chooses every header and every byte. So an answer must be of the commit
that was asked for, its hashes must be hashes, and a body may have no more bytes than were declared and than
the profile allows.
"""

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from service.errors import HubUnreachable, ModelUnreadable
from service.settings import Hub

_COMMIT = "x-repo-commit"
_HASHES = ("etag", "x-linked-etag")
_HASH = re.compile(r'(?:W/)?"?([A-Za-z0-9_][A-Za-z0-9._:+=-]{0,127})"?')
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Names another way to the file, by a library that reads from the network itself: nothing counts what it reads
_XET = "x-xet-hash"
_OTHER_BODY_BYTES = 64 << 10  # of a refusal or a redirect, which the library reads into memory
_SLOW_S = 60.0  # after which a body that comes with less than
_SLOW_BYTES_S = 1024.0  # bytes a second is given up
_PIECE_BYTES = 1 << 20
_FROM = re.compile(r"bytes=([0-9]{1,19})-")
_LEFTOVER = re.compile(r"(.+)\.[0-9a-f]{8}\.incomplete")


class Request(Protocol):
    """What is used of the request of the library's client."""

    method: str
    headers: MutableMapping[str, str]


class Response(Protocol):
    """What is used of the answer."""

    request: Request
    headers: MutableMapping[str, str]
    status_code: int
    iter_raw: Callable[..., Iterator[bytes]]


@dataclass
class Intake:
    """One file on its way: at most `most` bytes of it, and only where the disk has `free` for them."""

    hub: Hub
    name: str
    most: int
    free: Callable[[], int]
    now: Callable[[], float] = time.monotonic
    _hash: str = field(default="", init=False)

    def asks(self, request: Request) -> None:
        """Ask for bytes as they are: a few compressed ones can stand for any number."""
        request.headers["accept-encoding"] = "identity"

    def judge(self, response: Response) -> None:
        """Raise ModelUnreadable or HubUnreachable for an answer that isn't to be used; bound its body."""
        if response.request.method == "HEAD":
            self._judge_head(response)
        elif not 200 <= response.status_code < 300:
            response.iter_raw = _cut(response.iter_raw, _OTHER_BODY_BYTES)
        else:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise self._refusal(f"was sent as {encoding[:40]!r}, which wasn't asked for")
            # what the library has of the file, where the answer goes on from there; else it begins again
            asked = _FROM.fullmatch(response.request.headers.get("range", ""))
            already = int(asked[1]) if asked and response.status_code == 206 else 0
            response.iter_raw = self._counted(response.iter_raw, already)

    def check(self, path: Path) -> None:
        """Remove a file that its hash, where that is a SHA-256, doesn't name. Raises ModelUnreadable."""
        if not _SHA256.fullmatch(self._hash):
            return
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        if digest.hexdigest() != self._hash:
            for each in {path.resolve(), path}:
                each.unlink(missing_ok=True)
            raise self._refusal("isn't what its SHA-256 says; it was removed")

    def _judge_head(self, response: Response) -> None:
        """The library takes the names of its files, and the size, from such an answer alone."""
        commit = response.headers.get(_COMMIT, self.hub.revision)
        if commit != self.hub.revision:
            raise ModelUnreadable(
                f"the hub answered {self.hub} with the files of another commit: {commit[:80]!r}"
            )
        for name in _HASHES:
            if text := response.headers.get(name):
                if not (found := _HASH.fullmatch(text)):
                    raise ModelUnreadable(
                        f"the hub answered {self.hub} with a {name} that is no hash: {text[:80]!r}"
                    )
                self._hash = found[1]
        response.headers.pop(_XET, None)
        if 200 <= response.status_code < 400:
            self._judge_size(response)

    def _judge_size(self, response: Response) -> None:
        moved = response.status_code >= 300
        said = response.headers.get("x-linked-size") or (not moved and response.headers.get("content-length"))
        if not said:
            return
        if not (said.isascii() and said.isdigit() and len(said) < 20):
            raise self._refusal(f"has no size: {said[:40]!r}")
        if int(said) > self.most:
            raise self._refusal(f"has {int(said):,} bytes, and at most {self.most:,} are taken", larger=True)
        if int(said) > (free := self.free()):
            raise HubUnreachable(
                f"{self.name} of {self.hub} has {int(said):,} bytes, "
                f"and the cache's disk has room for {free:,}",
                "make room, or set HF_HOME to a directory of a larger disk (in compose also: WEIR_TMP_SIZE)",
            )
        self.most = int(said)

    def _counted(
        self, pieces: Callable[..., Iterator[bytes]], already: int
    ) -> Callable[..., Iterator[bytes]]:
        def counted(*args: object, **named: object) -> Iterator[bytes]:
            begun, came = self.now(), 0
            for piece in pieces(*args, **named):
                came += len(piece)
                if already + came > self.most:
                    raise self._refusal(
                        f"doesn't end after the {self.most:,} bytes that are taken", larger=True
                    )
                spent = self.now() - begun
                if spent > _SLOW_S and came < spent * _SLOW_BYTES_S:
                    raise HubUnreachable(
                        f"{self.name} of {self.hub} comes too slowly: {came:,} bytes in {spent:.0f} s",
                        "check the network and HF_ENDPOINT",
                    )
                yield piece

        return counted

    def _refusal(self, what: str, *, larger: bool = False) -> ModelUnreadable:
        hint = "where the model is that large, write max_size beside its revision, for example max_size: 8 GB"
        return ModelUnreadable(f"{self.name} of {self.hub} {what}", hint if larger else "")


def _cut(pieces: Callable[..., Iterator[bytes]], most: int) -> Callable[..., Iterator[bytes]]:
    def cut(*args: object, **named: object) -> Iterator[bytes]:
        left = most
        for piece in pieces(*args, **named):
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return

    return cut


def remove_leftovers(cache: Path, repository: str) -> None:
    """Remove what killed processes left of this repository's files; each would stay, under a name of its own.

    A file whose lock is held is being written by somebody else, and stays.
    """
    name = "models--" + repository.replace("/", "--")
    for path in (cache / name / "blobs").glob("*.incomplete"):
        if found := _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):  # held, or in a cache that can't be written to
                _remove_unheld(path, cache / ".locks" / name / f"{found[1]}.lock")


def _remove_unheld(path: Path, lock: Path) -> None:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
