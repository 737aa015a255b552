"""Fetches a model of a Hugging Face hub (`fetch`): its files, at one commit, from the cache or the network.

The only module that imports huggingface_hub, which reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
The hub isn't trusted: `DownloadGuard` checks its answers before the library uses them.
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


# The files that are fetched: data that is parsed, never a pickle or code
NEEDED = ("config.json", "model.safetensors")
OPTIONAL = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
_VARIABLES = ("HF_HOME", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")
_COMMIT = "x-repo-commit"
_HASHES = ("etag", "x-linked-etag")
_HASH = re.compile(r'(?:W/)?"?([A-Za-z0-9_][A-Za-z0-9._:+=-]{0,127})"?')
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Offers the file by another library, which reads from the network itself: the bytes couldn't be counted
_XET = "x-xet-hash"
_OTHER_BODY_BYTES = 64 << 10  # of an error or a redirect, which the library reads into memory
_SLOW_S = 60.0  # after which a body is given up
_SLOW_BYTES_S = 1024.0  # that comes with fewer bytes a second
_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{1,19})-")
_LEFTOVER = re.compile(r"(.+)\.[0-9a-f]{8}\.incomplete")


class Request(Protocol):
    """The part of the HTTP client's request that is used here."""

    method: str
    headers: MutableMapping[str, str]


class Response(Protocol):
    """The part of the HTTP client's response that is used here."""

    request: Request
    headers: MutableMapping[str, str]
    status_code: int
    iter_raw: Callable[..., Iterator[bytes]]


@dataclass
class DownloadGuard:
    """Checks the download of one file: at most `max_bytes`, and no more than the disk has `free`.

    Whoever answers for the hub chooses every header and every byte. So an answer must be of the commit that
    was asked for, its hashes must be hashes, and a body has at most the bytes that were declared.

    The hooks `on_request` and `on_response` are those of the library's HTTP client.
    """

    hub: Hub
    name: str
    max_bytes: int
    free: Callable[[], int]
    now: Callable[[], float] = time.monotonic
    _hash: str = field(default="", init=False)

    def on_request(self, request: Request) -> None:
        """Ask for uncompressed bytes: a few compressed ones can expand to any number."""
        request.headers["accept-encoding"] = "identity"

    def on_response(self, response: Response) -> None:
        """Check a response and bound its body. Raises ModelUnreadable and HubUnreachable."""
        if response.request.method == "HEAD":
            self._check_head(response)
        elif not 200 <= response.status_code < 300:
            response.iter_raw = _truncated(response.iter_raw, _OTHER_BODY_BYTES)
        else:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise self._refusal(f"was sent as {encoding[:40]!r}, which wasn't asked for")
            # the bytes that the library has already, if the response continues from there
            match = _RANGE.fullmatch(response.request.headers.get("range", ""))
            already = int(match[1]) if match and response.status_code == 206 else 0
            response.iter_raw = self._counted(response.iter_raw, already)

    def check(self, path: Path) -> None:
        """Remove a file whose SHA-256 isn't the declared one, if one was declared. Raises ModelUnreadable."""
        if not _SHA256.fullmatch(self._hash):
            return
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != self._hash:
            for to_remove in {path.resolve(), path}:  # the cache has links to its files
                to_remove.unlink(missing_ok=True)
            raise self._refusal("isn't what its SHA-256 says; it was removed")

    def _check_head(self, response: Response) -> None:
        """Check the answer to a HEAD, from which alone the library takes file names and the size."""
        commit = response.headers.get(_COMMIT, self.hub.revision)
        if commit != self.hub.revision:
            raise ModelUnreadable(
                f"the hub answered {self.hub} with the files of another commit: {commit[:80]!r}"
            )
        for name in _HASHES:
            if text := response.headers.get(name):
                if not (match := _HASH.fullmatch(text)):
                    raise ModelUnreadable(
                        f"the hub answered {self.hub} with a {name} that is no hash: {text[:80]!r}"
                    )
                self._hash = match[1]
        response.headers.pop(_XET, None)
        if 200 <= response.status_code < 400:
            self._check_size(response)

    def _check_size(self, response: Response) -> None:
        is_redirect = response.status_code >= 300
        declared = response.headers.get("x-linked-size") or (
            not is_redirect and response.headers.get("content-length")
        )
        if not declared:
            return
        if not (declared.isascii() and declared.isdigit() and len(declared) < 20):
            raise self._refusal(f"has no size: {declared[:40]!r}")
        if int(declared) > self.max_bytes:
            raise self._refusal(
                f"has {int(declared):,} bytes, and at most {self.max_bytes:,} are taken", larger=True
            )
        if int(declared) > (free := self.free()):
            raise HubUnreachable(
                f"{self.name} of {self.hub} has {int(declared):,} bytes, "
                f"and the cache's disk has room for {free:,}",
                "make room, or set HF_HOME to a directory of a larger disk (in compose also: WEIR_TMP_SIZE)",
            )
        self.max_bytes = int(declared)

    def _counted(
        self, chunks: Callable[..., Iterator[bytes]], already: int
    ) -> Callable[..., Iterator[bytes]]:
        def counted(*args: object, **named: object) -> Iterator[bytes]:
            begun_s, received = self.now(), 0
            for chunk in chunks(*args, **named):
                received += len(chunk)
                if already + received > self.max_bytes:
                    raise self._refusal(
                        f"doesn't end after the {self.max_bytes:,} bytes that are taken", larger=True
                    )
                spent_s = self.now() - begun_s
                if spent_s > _SLOW_S and received < spent_s * _SLOW_BYTES_S:
                    raise HubUnreachable(
                        f"{self.name} of {self.hub} comes too slowly: {received:,} bytes in {spent_s:.0f} s",
                        "check the network and HF_ENDPOINT",
                    )
                yield chunk

        return counted

    def _refusal(self, message: str, *, larger: bool = False) -> ModelUnreadable:
        hint = "where the model is that large, write max_size beside its revision, for example max_size: 8 GB"
        return ModelUnreadable(f"{self.name} of {self.hub} {message}", hint if larger else "")


def _truncated(chunks: Callable[..., Iterator[bytes]], max_bytes: int) -> Callable[..., Iterator[bytes]]:
    def truncated(*args: object, **named: object) -> Iterator[bytes]:
        left = max_bytes
        for chunk in chunks(*args, **named):
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                return

    return truncated


def remove_leftovers(cache: Path, repository: str) -> None:
    """Remove this repository's half-fetched files of killed processes, which nothing else would remove.

    A file whose lock is held is being written by another process, and stays.
    """
    name = "models--" + repository.replace("/", "--")
    for path in (cache / name / "blobs").glob("*.incomplete"):
        if match := _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):  # locked, or in a cache that can't be written to
                _remove_unlocked(path, cache / ".locks" / name / f"{match[1]}.lock")


def _remove_unlocked(path: Path, lock: Path) -> None:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def fetch(hub: Hub, *, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """Return the folder with the model's files, fetching those that aren't in the cache.

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
        cached = library.try_to_load_from_cache(hub.repository, name, cache_dir=cache, revision=hub.revision)
        if cached is not None and not isinstance(cached, str):  # the library's mark: not in this commit
            return None
        path: Path | None
        if cached is not None:
            path = Path(cached)
        else:
            max_bytes = left if name.endswith(".safetensors") else min(left, MAX_TEXT_BYTES)
            guard = DownloadGuard(hub, name, max_bytes, lambda: shutil.disk_usage(_existing(folder)).free)
            with _guarded(library, guard):
                path = _download(library, hub, name, endpoint=endpoint, cache=cache)
            if path:
                guard.check(path)
        if path:
            left -= path.stat().st_size
        return path

    paths = {name: get(name) for name in (*NEEDED, *OPTIONAL)}
    missing = [name for name in NEEDED if paths[name] is None]
    if missing:
        raise ModelUnreadable(
            f"{hub} has no {' and no '.join(missing)}",
            "only config.json, model.safetensors and a tokenizer are fetched; convert a pytorch_model.bin",
        )
    (snapshot,) = {path.parent for path in paths.values() if path}  # named after the commit
    return snapshot


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


@contextmanager
def _guarded(library: "ModuleType", guard: DownloadGuard) -> Iterator[None]:
    """Have `guard` check the hub's responses before the library takes names, sizes and bytes from them."""
    session = library.get_session()
    before = session.event_hooks
    session.event_hooks = {
        "request": [*before["request"], guard.on_request],
        "response": [*before["response"], guard.on_response],
    }
    try:
        yield
    finally:
        session.event_hooks = before


def _library() -> "ModuleType":
    for name in _VARIABLES:
        if not os.environ.get(
            name
        ):  # empty ones of compose, which the library takes for the current directory
            os.environ.pop(name, None)
    try:
        import huggingface_hub  # slow, and needed for a model of a hub only
    except ImportError as error:
        raise SettingsError(
            "the profile names a model of a hub, but huggingface_hub isn't installed here",
            "pip install huggingface_hub, or mount the model's files: WEIR_MODEL_DIR",
        ) from error
    return huggingface_hub


def _download(
    library: "ModuleType", hub: Hub, name: str, *, endpoint: str | None, cache: Path | None
) -> Path | None:
    """Fetch a file; None if this commit doesn't have it. Raises HubUnreachable, and what the guard raises."""
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
    except Exception as error:  # of the network, the disk or the library, which has many kinds
        raise HubUnreachable(f"{name} of {hub} can't be fetched: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return the type of the error's first cause. Not its text, which may hold a signed URL."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return type(error).__name__ + (
        f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
    )
