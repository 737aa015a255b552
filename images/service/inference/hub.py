"""A model of a Hugging Face hub: its files, at one commit, from the cache or the network.

The only module that imports huggingface_hub, which reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from service.errors import HubUnreachable, ModelUnreadable, ServiceError, SettingsError
from service.inference.checkpoint import MAX_TEXT_BYTES
from service.settings import Hub

if TYPE_CHECKING:
    from types import ModuleType


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
class DownloadGuard:
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
            response.iter_raw = _truncated(response.iter_raw, _OTHER_BODY_BYTES)
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


def _truncated(pieces: Callable[..., Iterator[bytes]], most: int) -> Callable[..., Iterator[bytes]]:
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


# Data that is parsed and never run: no pickle, no Python file, whatever else the repository has
NEEDED = ("config.json", "model.safetensors")
OPTIONAL = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
_VARIABLES = ("HF_HOME", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")


def fetch(hub: Hub, *, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """The folder with the model's files. Makes no request where they are in the cache.

    `endpoint` and `cache`: instead of what the environment says. Raises HubUnreachable, ModelUnreadable for a
    repository without these files or with more than `hub.max_bytes` of them, SettingsError where
    huggingface_hub isn't installed.
    """
    library = _library()
    from huggingface_hub import constants

    folder = cache or Path(constants.HF_HUB_CACHE)
    remove_leftovers(folder, hub.repository)
    left = hub.max_bytes

    def get(name: str) -> Path | None:
        nonlocal left
        there = library.try_to_load_from_cache(hub.repository, name, cache_dir=cache, revision=hub.revision)
        if there is not None and not isinstance(
            there, str
        ):  # the library's mark for a file that isn't in the commit
            return None
        if isinstance(there, str):
            path: Path | None = Path(there)
        else:
            most = left if name.endswith(".safetensors") else min(left, MAX_TEXT_BYTES)
            intake = DownloadGuard(hub, name, most, lambda: shutil.disk_usage(_existing(folder)).free)
            with _guarded(library, intake):
                path = _download(library, hub, name, endpoint=endpoint, cache=cache)
            if path:
                intake.check(path)
        if path:
            left -= path.stat().st_size
        return path

    found = {name: get(name) for name in (*NEEDED, *OPTIONAL)}
    missing = [name for name in NEEDED if found[name] is None]
    if missing:
        raise ModelUnreadable(
            f"{hub} has no {' and no '.join(missing)}",
            "only config.json, model.safetensors and a tokenizer are fetched; convert a pytorch_model.bin",
        )
    (snapshot,) = {path.parent for path in found.values() if path}  # named after the commit
    return snapshot


def _existing(folder: Path) -> Path:
    """The folder, or what is there of the way to it."""
    return next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))


@contextmanager
def _guarded(library: "ModuleType", intake: DownloadGuard) -> Iterator[None]:
    """Have the hub's answers judged before the library takes names, sizes and bytes from them."""
    session = library.get_session()
    before = session.event_hooks
    session.event_hooks = {
        "request": [*before["request"], intake.asks],
        "response": [*before["response"], intake.judge],
    }
    try:
        yield
    finally:
        session.event_hooks = before


def _library() -> "ModuleType":
    for name in _VARIABLES:
        if not os.environ.get(name):  # compose sets an empty one, which the library takes for this directory
            os.environ.pop(name, None)
    try:
        import huggingface_hub  # takes a while, and only such a model needs it
    except ImportError as error:
        raise SettingsError(
            "the profile names a model of a hub, but huggingface_hub isn't installed here",
            "pip install huggingface_hub, or mount the model's files: WEIR_MODEL_DIR",
        ) from error
    return huggingface_hub


def _download(
    library: "ModuleType", hub: Hub, name: str, *, endpoint: str | None, cache: Path | None
) -> Path | None:
    """One file; None where this commit doesn't have it."""
    from huggingface_hub import errors

    get: Callable[..., str] = library.hf_hub_download
    try:
        return Path(get(hub.repository, name, revision=hub.revision, endpoint=endpoint, cache_dir=cache))
    except ServiceError:
        raise
    except errors.LocalEntryNotFoundError as error:  # which is an EntryNotFoundError as well
        raise HubUnreachable(
            f"{hub} isn't in the cache, and the hub can't be reached: {_reason(error)}",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE; or mount a cache and set HF_HOME to it",
        ) from error
    except errors.EntryNotFoundError:
        return None
    except errors.GatedRepoError as error:
        raise HubUnreachable(
            f"{hub.repository} is only for those who were given access", "set HF_TOKEN to a token that was"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubUnreachable(
            f"{hub.repository} has no commit {hub.revision}", "see the hub's list of its commits"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubUnreachable(
            f"the hub has no {hub.repository}, or doesn't show it", "a private one needs HF_TOKEN"
        ) from error
    except Exception as error:  # of the network, the disk or the library, in its kinds of many libraries
        raise HubUnreachable(f"{name} of {hub} can't be fetched: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The kind of what went wrong first. Not its text, which may hold an address that is signed."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return type(error).__name__ + (
        f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
    )
