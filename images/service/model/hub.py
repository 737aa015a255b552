"""A model of a Hugging Face hub: its files, at one commit, from the cache or the network.

The only module that imports huggingface_hub, which reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from service.errors import HubUnreachable, ModelUnreadable, SettingsError
from service.settings import Hub

if TYPE_CHECKING:
    from types import ModuleType


class Request(Protocol):
    """What is used of the request of the library's client."""

    method: str


class Response(Protocol):
    """What is used of the answer."""

    request: Request
    headers: Mapping[str, str]


# Data that is parsed and never run: no pickle, no Python file, whatever else the repository has
NEEDED = ("config.json", "model.safetensors")
OPTIONAL = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
_COMMIT = "x-repo-commit"
_HASHES = ("etag", "x-linked-etag", "x-xet-hash")
_HASH = re.compile(r'(?:W/)?"?[A-Za-z0-9_][A-Za-z0-9._:+=-]{0,127}"?')
_VARIABLES = ("HF_HOME", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")


def fetched(hub: Hub, *, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """The folder with the model's files. Makes no request where they are in the cache.

    `endpoint` and `cache`: instead of what the environment says. Raises HubUnreachable, ModelUnreadable for a
    repository without these files, SettingsError where huggingface_hub isn't installed.
    """
    library = _library()

    def get(name: str) -> Path | None:
        there = library.try_to_load_from_cache(hub.repository, name, cache_dir=cache, revision=hub.revision)
        if isinstance(there, str):
            return Path(there)
        if there is not None:  # the library's mark for a file that this commit doesn't have
            return None
        return _download(library, hub, name, endpoint=endpoint, cache=cache)

    with _checked(library, hub):
        found = {name: get(name) for name in (*NEEDED, *OPTIONAL)}
    missing = [name for name in NEEDED if found[name] is None]
    if missing:
        raise ModelUnreadable(
            f"{hub} has no {' and no '.join(missing)}",
            "only config.json, model.safetensors and a tokenizer are fetched; convert a pytorch_model.bin",
        )
    (folder,) = {path.parent for path in found.values() if path}  # named after the commit
    return folder


@contextmanager
def _checked(library: "ModuleType", hub: Hub) -> Iterator[None]:
    """Check the hub's answers before the library makes paths of the commit and the hashes in them.

    The block raises ModelUnreadable for an answer that isn't this commit's, or whose hashes are none.
    """

    def check(response: Response) -> None:
        if response.request.method != "HEAD":
            return  # the library takes names from those alone
        commit = response.headers.get(_COMMIT, hub.revision)
        if commit != hub.revision:
            raise ModelUnreadable(f"the hub answered {hub} with the files of another commit: {commit[:80]!r}")
        for name in _HASHES:
            if (text := response.headers.get(name)) and not _HASH.fullmatch(text):
                raise ModelUnreadable(f"the hub answered {hub} with a {name} that is no hash: {text[:80]!r}")

    session = library.get_session()
    before = session.event_hooks
    session.event_hooks = {**before, "response": [*before["response"], check]}
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
    except ModelUnreadable:
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
