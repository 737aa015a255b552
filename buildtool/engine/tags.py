"""Tags of images: temporary ones until an image is proved, then the final ones, all of them or none."""

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
    """A prefix for names of this run's images; names that begin so are removed at the end of the block.

    `folder` is a scratch directory that this run holds: once it is gone, later runs with the same state
    directory know that this run has ended, and remove the names that it left. The prefix differs by host and
    state directory: one engine may serve several of them, also containers with the same path.
    """
    state = folder.parent
    sweep_partials(state)
    prefix = temporary_prefix(repository, state)
    alive = tuple(f"{prefix}{_token(path)}" for path in state.iterdir())
    engine.sweep_containers()  # an image that one of them uses keeps its names
    _remove_tags(engine, repository, lambda name: name.startswith(prefix) and not name.startswith(alive))
    of_this_run = f"{prefix}{_token(folder)}"
    try:
        yield of_this_run
    finally:
        _remove_tags(engine, repository, lambda name: name.startswith(of_this_run))


def temporary_prefix(repository: str, state: Path) -> str:
    """The prefix of the temporary names of all runs with a state directory on this host."""
    place = socket.gethostname().encode() + b"\0" + os.fsencode(state.resolve())
    return f"{repository}:{hashlib.sha256(place).hexdigest()[:10]}-"


def move_tags(engine: Engine, names: Sequence[tuple[str, Reference]]) -> list[tuple[Reference, str, str]]:
    """Give images, by digest, their names: all of them or, if that fails or is interrupted, none.

    Returns for each name the id of the image that had it before, empty for none, and of the one that has it
    now. Raises as `Engine.tag` does.
    """
    before = {name: str((engine.inspect(str(name)) or {}).get("Id", "")) for _, name in names}
    try:
        return [(name, before[name], engine.tag(image, name)) for image, name in names]
    except BaseException:
        for name, old in before.items():
            with contextlib.suppress(ToolError):
                if old:
                    engine.tag(old, name)
                else:
                    engine.remove_tag(str(name))
        raise


def _remove_tags(engine: Engine, repository: str, is_chosen: Callable[[str], bool]) -> None:
    """Remove a repository's names that are chosen. Errors are ignored: a later run removes what is left."""
    with contextlib.suppress(ToolError):
        for name in filter(is_chosen, engine.tags(repository)):
            with contextlib.suppress(ToolError):
                engine.remove_tag(name)


def _token(folder: Path) -> str:
    """What distinguishes one run's scratch folder, and the names of its images, from those of others."""
    return folder.name.removeprefix(".weir-").removesuffix(".partial")
