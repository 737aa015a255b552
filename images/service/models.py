"""The models of this process: finding, loading, swapping and unloading them while others answer."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from service.errors import RETRY_AFTER_S, ModelUnreadable, RequestError, ServiceError
from service.inference.classifier import Classifier

DEFAULT = "finbert"  # the model of a directory that holds one, and of no directory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

State = Literal["LOADING", "READY", "UNAVAILABLE"]
Load = Callable[[str], Awaitable[Classifier]]  # by name; raises ServiceError

log = logging.getLogger("service")


@dataclass
class ModelEntry:
    """One model. While it is loaded again, the previous classifier goes on answering."""

    state: State = "LOADING"
    reason: str = ""
    classifier: Classifier | None = None


def names_in(directory: Path, *, hub: bool = False) -> tuple[str, ...]:
    """Return the names of a directory's models: DEFAULT if it is one model or none, else its folders' names.

    `hub`: DEFAULT comes from a hub, and the directory may hold others. A folder whose name can't be part of a
    URL is left out. Raises ModelUnreadable if the directory can't be read, or holds a DEFAULT beside the
    hub's.
    """
    names = _names_in(directory)
    if not hub:
        return names
    if (directory / "config.json").exists() or (directory / DEFAULT / "config.json").exists():
        raise ModelUnreadable(
            f"{directory} holds a model, and the profile names one of a hub",
            "mount another directory, or remove `model` from the profile",
        )
    return (DEFAULT, *(name for name in names if name != DEFAULT))


def _names_in(directory: Path) -> tuple[str, ...]:
    try:
        if (directory / "config.json").exists() or not directory.is_dir():
            return (DEFAULT,)
        names = sorted(path.parent.name for path in directory.glob("*/config.json"))
    except OSError as error:
        raise ModelUnreadable(f"{directory} can't be read: {error}") from error
    return tuple(name for name in names if _NAME.fullmatch(name)) or (DEFAULT,)


def folder_of(directory: Path, name: str) -> Path:
    """Return where a model's files are: in the directory for DEFAULT, unless it has a folder of that name."""
    folder = directory / name
    return directory if name == DEFAULT and not folder.is_dir() else folder


class Models:
    """The models by name. Used in one thread; a request keeps the classifier that it began with."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._entries: dict[str, ModelEntry] = {}
        self._initial: tuple[str, ...] | None = None  # the names of the first `load_all`
        self._queued: dict[str, asyncio.Task[None]] = {}  # loads that wait for their turn
        self._lock = asyncio.Lock()  # one load at a time, so that memory is needed for one more model only

    def put(self, name: str, classifier: Classifier) -> None:
        """Add a loaded model."""
        self._entries[name] = ModelEntry("READY", "", classifier)

    @property
    def ready(self) -> bool:
        """Whether all models of the first `load_all` have been loaded, and some model answers.

        A model that is loaded later, or fails to, doesn't change that.
        """
        waiting = [name for name in self._initial or () if name in self._entries and not self.is_ready(name)]
        return bool(self.loaded) and not waiting

    @property
    def loaded(self) -> tuple[Classifier, ...]:
        """All models that answer."""
        return tuple(entry.classifier for entry in self._entries.values() if entry.classifier)

    def index(self) -> dict[str, ModelEntry]:
        """Return all models by name."""
        return dict(self._entries)

    def is_ready(self, name: str) -> bool:
        """Return whether this model answers."""
        entry = self._entries.get(name)
        return entry is not None and entry.classifier is not None

    def require(self, name: str = "") -> Classifier:
        """Return a model; without a name the default one. Raises RequestError: 404, or 503 if not loaded."""
        if not name and self._entries:
            name = DEFAULT if DEFAULT in self._entries else next(iter(self._entries))
        entry = self._entries.get(name)
        if entry is None and self._entries:
            known = ", ".join(f"/v2/models/{each}" for each in self._entries) or "none"
            raise RequestError(404, f"there is no model {name[:64]!r}; there are: {known}")
        if entry is None or entry.classifier is None:
            failed = entry is not None and entry.reason
            message = f"the model isn't loaded: {failed}" if failed else "the model is being loaded"
            raise RequestError(503, message, retry_after_s=RETRY_AFTER_S)
        return entry.classifier

    async def load(self, name: str) -> None:
        """Load a model, or load it again. Raises ServiceError; the previous one stays then.

        A load that has begun goes on when its caller is cancelled, because its thread does. One that waits
        for its turn is shared by all who ask for it meanwhile.
        """
        if not _NAME.fullmatch(name):
            raise ModelUnreadable(
                f"{name[:64]!r} can't be a model's name", "letters, digits, '.', '_' and '-'"
            )
        task = self._queued.get(name)
        if task is None:
            task = self._queued[name] = asyncio.create_task(self._load_in_turn(name))
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # retrieved, else asyncio logs it
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
                failure = error
            else:
                log.exception("loading %s failed", name)
                failure = ModelUnreadable(
                    f"{name} can't be loaded: {type(error).__name__}", "the log says more"
                )
            entry.reason = failure.message
            entry.state = "READY" if entry.classifier else "UNAVAILABLE"
            if new and self._entries.get(name) is entry:
                del self._entries[name]  # callers may make up any number of names
            raise failure from error

    async def load_all(self, names: tuple[str, ...]) -> None:
        """Load these models one after the other, then forget all others. Raises ServiceError at a failure."""
        if self._initial is None:
            self._initial = names
        for name in names:
            self._entries.setdefault(name, ModelEntry())
        for name in names:
            await self.load(name)
        for name in self._entries.keys() - set(names):
            del self._entries[name]

    def unload(self, name: str) -> None:
        """Forget a model; requests that have begun finish with it. Raises RequestError (404)."""
        if name not in self._entries:
            raise RequestError(404, f"there is no model {name[:64]!r}")
        del self._entries[name]
