"""A model of a Hugging Face hub: its files, at one commit, from the cache or the network.

The only module that imports huggingface_hub, which reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from service.errors import HubUnreachable, ModelUnreadable, ServiceError, SettingsError
from service.model.checkpoint import MOST_TEXT_BYTES
from service.model.intake import Intake, remove_leftovers
from service.settings import Hub

if TYPE_CHECKING:
    from types import ModuleType


# Data that is parsed and never run: no pickle, no Python file, whatever else the repository has
NEEDED = ("config.json", "model.safetensors")
OPTIONAL = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
_VARIABLES = ("HF_HOME", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")


def fetched(hub: Hub, *, endpoint: str | None = None, cache: Path | None = None) -> Path:
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
            most = left if name.endswith(".safetensors") else min(left, MOST_TEXT_BYTES)
            intake = Intake(hub, name, most, lambda: shutil.disk_usage(_existing(folder)).free)
            with _watched(library, intake):
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
def _watched(library: "ModuleType", intake: Intake) -> Iterator[None]:
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
