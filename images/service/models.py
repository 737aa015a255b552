"""The models of this process: which there are, loading, swapping and unloading them while others answer."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from service.errors import ModelUnreadable, RequestError, ServiceError
from service.inference.classifier import Classifier

DEFAULT = "finbert"  # the model of a directory that holds one, and of no directory
RETRY_AFTER_S = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

State = Literal["LOADING", "READY", "UNAVAILABLE"]
Load = Callable[[str], Awaitable[Classifier]]  # by name; raises ServiceError

log = logging.getLogger("service")


@dataclass
class ModelEntry:
    """One model. While it is loaded again, the classifier from before goes on answering."""

    state: State = "LOADING"
    reason: str = ""
    classifier: Classifier | None = None


def names_in(directory: Path, *, hub: bool = False) -> tuple[str, ...]:
    """The models of a directory: its own as DEFAULT, or those of its folders by their names; else DEFAULT.

    `hub`: DEFAULT comes from there, and the directory may have others. A folder whose name can't be part of a
    URL is left out. Raises ModelUnreadable when it can't be read, or has a DEFAULT beside the hub's.
    """
    found = _names_in(directory)
    if not hub:
        return found
    if (directory / "config.json").exists() or (directory / DEFAULT / "config.json").exists():
        raise ModelUnreadable(
            f"{directory} holds a model, and the profile names one of a hub",
            "mount another directory, or remove `model` from the profile",
        )
    return (DEFAULT, *(name for name in found if name != DEFAULT))


def _names_in(directory: Path) -> tuple[str, ...]:
    try:
        if (directory / "config.json").exists() or not directory.is_dir():
            return (DEFAULT,)
        found = sorted(path.parent.name for path in directory.glob("*/config.json"))
    except OSError as error:
        raise ModelUnreadable(f"{directory} can't be read: {error}") from error
    return tuple(name for name in found if _NAME.fullmatch(name)) or (DEFAULT,)


def folder_of(directory: Path, name: str) -> Path:
    """Where a model's files are: the directory itself for DEFAULT, unless it has a folder of that name."""
    inside = directory / name
    return directory if name == DEFAULT and not inside.is_dir() else inside


class Models:
    """Used from the event loop's thread alone. A request keeps the classifier that it began with."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._entries: dict[str, ModelEntry] = {}
        self._start: tuple[str, ...] | None = None  # the names that the first `load_all` was given
        self._queued: dict[str, asyncio.Task[None]] = {}  # loads that wait for their turn
        self._lock = asyncio.Lock()  # one load at a time: two models in flight need memory for both

    def put(self, name: str, classifier: Classifier) -> None:
        """A model that is loaded already."""
        self._entries[name] = ModelEntry("READY", "", classifier)

    @property
    def ready(self) -> bool:
        """Whether all models of the start have loaded, and some model answers.

        A further one that loads, or can't be loaded, leaves the others ready.
        """
        waiting = [name for name in self._start or () if name in self._entries and not self.is_ready(name)]
        return bool(self.loaded) and not waiting

    @property
    def loaded(self) -> tuple[Classifier, ...]:
        """Every model that answers."""
        return tuple(entry.classifier for entry in self._entries.values() if entry.classifier)

    def index(self) -> dict[str, ModelEntry]:
        """All models by name."""
        return dict(self._entries)

    def is_ready(self, name: str) -> bool:
        """Whether this model answers."""
        entry = self._entries.get(name)
        return entry is not None and entry.classifier is not None

    def require(self, name: str = "") -> Classifier:
        """The model, the first one when no name is given. Raises RequestError: 404 or, while loading, 503."""
        if not name and self._entries:
            name = DEFAULT if DEFAULT in self._entries else next(iter(self._entries))
        entry = self._entries.get(name)
        if entry is None and self._entries:
            known = ", ".join(f"/v2/models/{each}" for each in self._entries) or "none"
            raise RequestError(404, f"there is no model {name[:64]!r}; there are: {known}")
        if entry is None or entry.classifier is None:
            why = (
                f"the model isn't loaded: {entry.reason}"
                if entry and entry.reason
                else "the model is being loaded"
            )
            raise RequestError(503, why, retry_after_s=RETRY_AFTER_S)
        return entry.classifier

    async def load(self, name: str) -> None:
        """Load a model, or load it again. Raises ServiceError; the one from before stays then.

        A load that has begun goes on when its caller is cancelled, since its thread does: another one beside
        it would need memory for both. One that waits for its turn serves all who ask meanwhile.
        """
        if not _NAME.fullmatch(name):
            raise ModelUnreadable(
                f"{name[:64]!r} can't be a model's name", "letters, digits, '.', '_' and '-'"
            )
        task = self._queued.get(name)
        if task is None:
            task = self._queued[name] = asyncio.create_task(self._load_in_turn(name))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, or nobody asks
        await asyncio.shield(task)

    async def _load_in_turn(self, name: str) -> None:
        try:
            async with self._lock:
                self._queued.pop(name)
                await self._load_now(name)
        finally:
            if self._queued.get(name) is asyncio.current_task():  # cancelled before its turn
                del self._queued[name]

    async def _load_now(self, name: str) -> None:
        new = name not in self._entries
        entry = self._entries.setdefault(name, ModelEntry())
        entry.state = "LOADING"
        try:
            entry.classifier = await self._load(name)
            entry.state, entry.reason = "READY", ""
        except Exception as error:
            if isinstance(error, ServiceError):
                reason = error
            else:
                log.exception("loading %s failed", name)
                reason = ModelUnreadable(
                    f"{name} can't be loaded: {type(error).__name__}", "the log says more"
                )
            entry.reason = reason.message
            entry.state = "READY" if entry.classifier else "UNAVAILABLE"
            if new and self._entries.get(name) is entry:
                del self._entries[name]  # whoever asked for it hears why; names that callers make up are many
            raise reason from error

    async def load_all(self, names: tuple[str, ...]) -> None:
        """Load these models in turn, and forget all others. Raises ServiceError at the first failure."""
        if self._start is None:
            self._start = names
        for name in names:
            self._entries.setdefault(name, ModelEntry())
        for name in names:
            await self.load(name)
        for name in self._entries.keys() - set(names):
            del self._entries[name]

    def unload(self, name: str) -> None:
        """Forget a model; requests that have begun end with it. Raises RequestError (404)."""
        if name not in self._entries:
            raise RequestError(404, f"there is no model {name[:64]!r}")
        del self._entries[name]
