"""Names of images: a temporary one until an image is proved, then tags, all of them or none."""

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from buildtool.core.errors import ToolError
from buildtool.engine.client import Engine
from buildtool.engine.reference import Reference
from probes.core.files import sweep_partials


@contextmanager
def temporary_names(engine: Engine, repository: str, folder: Path) -> Iterator[str]:
    """What the temporary names of this run begin with; what has such a name at its end loses it.

    `folder` is a scratch directory that this run holds: by it, the next run beside it knows that this one has
    ended, and removes what it left. Each directory above has names of its own, on each host: an engine may
    serve several, or containers that have their state at the same path.
    """
    state = folder.parent
    sweep_partials(state)
    ours = temporary_prefix(repository, state)
    alive = tuple(f"{ours}{_token(path)}" for path in state.iterdir())
    engine.sweep_containers()  # an image that one of them uses keeps its names
    _forget(engine, repository, lambda name: name.startswith(ours) and not name.startswith(alive))
    mine = f"{ours}{_token(folder)}"
    try:
        yield mine
    finally:
        _forget(engine, repository, lambda name: name.startswith(mine))


def temporary_prefix(repository: str, state: Path) -> str:
    """What temporary names of a directory's runs begin with: each directory of each host has its own."""
    place = socket.gethostname().encode() + b"\0" + os.fsencode(state.resolve())
    return f"{repository}:{hashlib.sha256(place).hexdigest()[:10]}-"


def move_tags(engine: Engine, wanted: Sequence[tuple[str, Reference]]) -> list[tuple[Reference, str, str]]:
    """Give images, by digest, their names: all of them or, where that fails or is interrupted, none.

    Returns each name with the ids of the images that it named before, empty for none, and names now.
    Raises as `Engine.tag` does.
    """
    before = {name: str((engine.inspect(str(name)) or {}).get("Id", "")) for _, name in wanted}
    try:
        return [(name, before[name], engine.tag(image, name)) for image, name in wanted]
    except BaseException:
        for name, old in before.items():
            with contextlib.suppress(ToolError):
                if old:
                    engine.tag(old, name)
                else:
                    engine.forget(str(name))
        raise


def _forget(engine: Engine, repository: str, is_chosen: Callable[[str], bool]) -> None:
    """Remove the chosen names of a repository; what an engine that went away keeps, a later run removes."""
    with contextlib.suppress(ToolError):
        for name in filter(is_chosen, engine.tags(repository)):
            with contextlib.suppress(ToolError):
                engine.forget(name)


def _token(folder: Path) -> str:
    """What distinguishes one run's scratch folder, and the names of its images, from those of others."""
    return folder.name.removeprefix(".weir-").removesuffix(".partial")
