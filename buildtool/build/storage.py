"""What Weir keeps on this host, with sizes, and removing it: caches, reports, images, containers.

Only what has a name that Weir gives is Weir's: a state directory may be any folder, and an image that
somebody made from one of ours has our labels, too. What isn't certain is listed and stays.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from buildtool.build.workplace import Workplace
from buildtool.core.errors import DataError, EnvironmentMissing, ToolError
from buildtool.core.files import lock_if_free, read_cached
from buildtool.core.model import LABEL
from buildtool.core.shipped import checkout, lock_file, reports_directory, state_directory
from buildtool.engine.client import Engine, ImageRow
from buildtool.engine.reference import parse_reference
from buildtool.engine.tags import temporary_prefix
from probes.core.codec import DERIVED
from probes.core.files import has_mounts, partials
from probes.core.quoting import command
from probes.core.unknown import Unknown

_LOCK = "build.lock"  # stays, without content: if it were removed, two builds could hold it
_SHA256 = r"[0-9a-f]{64}"
# a folder of a state directory -> what is in it, and the names that Weir gives there
_CACHES = {
    "wheels": ("wheels for builds", _SHA256),
    "rootfs": ("root file systems for builds", r"[a-z][a-z0-9.-]*-[0-9a-f]{16}\.(tar|sha256|lock)"),
    "pruned": ("inputs of builds, pruned", r"[0-9a-f]{24}(\.\w+)?"),
    "inspected": ("targets of inputs of builds", r"[0-9a-f]{24}\.json"),
    "layers": ("layers by their inputs", r"[0-9a-f]{64}\.json"),
    "layout": ("images as an OCI layout", r"oci-layout|index\.json|blobs|lock"),
    "bases": ("documents of base images", _SHA256),
    "pushed": ("what registries have", r"[0-9a-f]{64}\.(json|lock)"),
    "context": ("contexts of Dockerfiles", r"[a-z0-9]+(-+[a-z0-9]+)*"),
    "proved": ("outcomes of proofs", _SHA256),
    "audited": ("outcomes of audits", _SHA256),
    "packed": ("packed weights", r"[0-9a-f]+\.(packed|origin)"),
    "containers": ("folders of containers", r"(?!)"),  # partials alone
}
_NAMED = ("named", "ids of the images that builds named", _SHA256)
_OF_CHECKOUT = {"site": "the documentation as a site", "tests": "outcomes of tests"}
_TEMPORARY = ("weir-building", "weir-pruning")  # repositories of images that aren't proved yet


class Group(Enum):
    """What is removed together: an option of `weir clean` each."""

    CACHES = "caches"  # made or fetched again when they are needed
    REPORTS = "reports"  # results and pinned inputs: gone for good
    IMAGES = "images"


@dataclass(frozen=True)
class Stored:
    """One thing that Weir keeps; `group` None is one that Weir doesn't remove, and `note` says why."""

    group: Group | None
    what: str
    place: str  # a path, or an image's name or id
    bytes: int | Unknown
    note: str = ""
    removed: bool = False
    paths: tuple[Path, ...] = field(default=(), metadata=DERIVED)


@dataclass(frozen=True)
class Places:
    """Where Weir keeps files on this host."""

    state: Path
    packed: Path
    reports: Path | None
    lock: Path | None  # that of Weir's own catalog; None where the user named another
    checkout: Path | None

    @staticmethod
    def here(env: Mapping[str, str] = os.environ) -> "Places":
        """Those of this process's environment. Raises EnvironmentMissing without a home directory."""
        root = checkout()
        cache = env.get("XDG_CACHE_HOME") or f"{env.get('HOME', '/')}/.cache"
        packed = Path(env["WEIR_STATE"]) if env.get("WEIR_STATE") else Path(cache) / "weir"
        return Places(
            state=state_directory(env).resolve(),
            packed=packed.resolve(),
            reports=reports_directory(env).parent,
            lock=None if env.get("WEIR_LOCK") else lock_file(env=env),
            checkout=root,
        )

    @property
    def states(self) -> tuple[Path, ...]:
        """The state directories, each once."""
        return tuple(dict.fromkeys((self.state, self.packed)))


def survey(places: Places, engine: Engine | ToolError) -> list[Stored]:
    """Everything that Weir keeps, the caches first; of an engine that doesn't answer, why. Never raises."""
    seen: set[tuple[int, int]] = set()  # a wheel is in a cache and, as a hard link, in a context
    rows = [row for state in places.states for row in _caches(state, seen)]
    if places.checkout and places.state == places.checkout / ".weir":
        rows += _whole(Group.CACHES, {places.state / name: what for name, what in _OF_CHECKOUT.items()}, seen)
    rows += _killed([None, *(folder for state in places.states for folder in _folders(state))], seen)
    rows += _reports(places, seen)
    rows += _named(places.state, seen)
    if isinstance(engine, ToolError):
        return [*rows, Stored(Group.IMAGES, "images", "", Unknown(engine.message))]
    return [*rows, *_engine_rows(places.state, engine)]


# ---- files -------------------------------------------------------------------------------------------------


def _caches(state: Path, seen: set[tuple[int, int]]) -> Iterator[Stored]:
    for name, (what, pattern) in _CACHES.items():
        yield from _folder(Group.CACHES, state / name, what, pattern, seen)


def _named(state: Path, seen: set[tuple[int, int]]) -> Iterator[Stored]:
    name, what, pattern = _NAMED
    yield from _folder(Group.IMAGES, state / name, what, pattern, seen)


def _folder(
    group: Group, folder: Path, what: str, pattern: str, seen: set[tuple[int, int]]
) -> Iterator[Stored]:
    """What has names of Weir's in a folder, and the folder's other entries, which stay."""
    if folder.is_symlink():
        yield Stored(None, what, str(folder), Unknown("it isn't followed"), "a link to another place")
        return
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        yield Stored(group, what, str(folder), Unknown(error.strerror or str(error)))
        return
    own = tuple(path for path in entries if re.fullmatch(pattern, path.name) and _is_made(path))
    held = {path for path, _ in partials(folder)}
    if own:
        yield Stored(group, what, str(folder), size_of(own, seen), paths=own)
    for path in entries:
        if path not in own and path not in held and os.path.lexists(path):  # else another run's, now gone
            yield Stored(None, "not of Weir's making", str(path), size_of([path], seen))


def _is_made(path: Path) -> bool:
    """Whether what has a name that Weir gives is of the kind that it makes: no link, and a whole context."""
    return not path.is_symlink() and (path.parent.name != "context" or (path / "payload").is_dir())


def _whole(group: Group, folders: Mapping[Path, str], seen: set[tuple[int, int]]) -> Iterator[Stored]:
    """Files and folders that are Weir's with everything in them."""
    for path, what in folders.items():
        if path.is_symlink():
            yield Stored(None, what, str(path), Unknown("it isn't followed"), "a link to another place")
        elif path.exists():
            yield Stored(group, what, str(path), size_of([path], seen), paths=(path,))


def _killed(folders: Iterable[Path | None], seen: set[tuple[int, int]]) -> Iterator[Stored]:
    for folder in folders:
        left = tuple(path for path, held in partials(folder) if not held)
        if left:
            yield Stored(
                Group.CACHES, "files of killed runs", str(left[0].parent), size_of(left, seen), paths=left
            )


def _reports(places: Places, seen: set[tuple[int, int]]) -> Iterator[Stored]:
    found: dict[Path, str] = {}
    if places.reports and places.reports.is_dir() and not places.reports.is_symlink():
        for path in sorted(places.reports.iterdir()):
            with suppress(FileNotFoundError):  # removed meanwhile
                names = [path] if not path.is_dir() or path.is_symlink() else sorted(path.iterdir())
                found |= {each: "reports" for each in names if not each.name.startswith(".")}
    if places.lock:
        found[places.lock] = "the pinned inputs of builds"
    yield from _whole(Group.REPORTS, found, seen)


def _folders(state: Path) -> Iterator[Path]:
    """A state directory, and the folders in it that Weir makes."""
    yield state
    for name in (*_CACHES, _NAMED[0]):
        if not (state / name).is_symlink():
            yield state / name


def size_of(paths: Iterable[Path], seen: set[tuple[int, int]]) -> int | Unknown:
    """The bytes of files and trees; a file with several names counts once, and no link is followed.

    `seen` are the files (device, inode) that were counted, and grows. What another run removes meanwhile
    counts for nothing. Unknown where a folder can't be read.
    """
    total = 0
    pending = list(paths)
    try:
        while pending:
            path = pending.pop()
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    pending += path.iterdir()
                elif (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    total += status.st_size
    except OSError as error:
        return Unknown(f"{error.filename}: {error.strerror or error}")
    return total


# ---- the engine --------------------------------------------------------------------------------------------


def _engine_rows(state: Path, engine: Engine) -> Iterator[Stored]:
    """Containers, images and the build cache; a request that fails gives a row that says why."""
    try:
        for name in engine.left_containers():
            yield Stored(
                Group.IMAGES, "container of a killed run", name[:12], Unknown("the engine doesn't say")
            )
        found = {
            row.Id: row for name in ("variant", "pruned") for row in engine.images(label=f"{LABEL}.{name}")
        }
        temporary = tuple(temporary_prefix(name, state) for name in _TEMPORARY)
        for row in found.values():
            yield from _image_rows(row, state, temporary)
    except ToolError as error:
        yield Stored(Group.IMAGES, "images", "", Unknown(error.message))
    try:
        cached: int | Unknown = engine.build_cache_bytes()
    except ToolError as error:
        cached = Unknown(error.message)
    if cached:
        yield Stored(
            None,
            "build cache of the engine",
            "",
            cached,
            "of all builds: BuildKit doesn't say whose; to remove it: docker builder prune",
        )


def _image_rows(row: ImageRow, state: Path, temporary: tuple[str, ...]) -> Iterator[Stored]:
    """An image's names. The labels alone prove nothing: an image made from one of ours has them, too."""
    names = [name for name in row.RepoTags if not name.startswith("<none>")]
    for name in names:
        if name.startswith(temporary) or _is_ours(row, name, state):
            yield Stored(Group.IMAGES, "image", name, row.Size)
        else:
            note = f"perhaps made from one of Weir's; to remove it: {command('docker', 'rmi', name)}"
            yield Stored(None, "image", name, row.Size, note)
    if not names:
        short = row.Id.removeprefix("sha256:")[:12]
        note = f"without a name; to remove it: {command('docker', 'rmi', short)}"
        yield Stored(None, "image", short, row.Size, note)


def _is_ours(row: ImageRow, name: str, state: Path) -> bool:
    """Whether a build from here gave this image that name, or the name is the one that builds give it."""
    variant = row.Labels.get(f"{LABEL}.variant")
    try:
        reference = parse_reference(name)
        if read_cached(Workplace(state, state, _silent).named(reference), str) == row.Id:
            return True
        return (
            variant is not None and reference.canonical == parse_reference(f"weir/{variant}:latest").canonical
        )
    except ToolError:  # no build gives a name or a label like that
        return False


def _silent(_line: str) -> None:
    """Report no progress."""


# ---- removing ----------------------------------------------------------------------------------------------


@contextmanager
def no_build_running(places: Places) -> Iterator[None]:
    """Keep builds from beginning during the block. Raises EnvironmentMissing where one is running."""
    with ExitStack() as held:
        for state in places.states:
            locks = [lock for lock in (state / _LOCK, state / "layout/lock") if lock.exists()]
            free = all(held.enter_context(lock_if_free(lock)) for lock in locks)
            living = next(
                (path for folder in _folders(state) for path, is_held in partials(folder) if is_held), None
            )
            if not free or living:
                raise EnvironmentMissing(
                    f"a build, or another run of weir, is using {state}; nothing was removed",
                    "wait for its end, then run the same command again",
                )
        yield


def remove(rows: Sequence[Stored], groups: frozenset[Group], engine: Engine | ToolError) -> list[Stored]:
    """Remove the rows of these groups; each row with what became of it. Call it within `no_build_running`.

    What can't be removed stays, with the reason in its note; the rest is removed nevertheless.
    """
    chosen = [row for row in rows if row.group in groups]
    done = {id(row): _removed(row, engine) for row in chosen if not row.paths}
    images_left = any(not row.removed for row in done.values())
    for row in chosen:
        if row.paths and row.group is Group.IMAGES and images_left:
            done[id(row)] = replace(row, note="kept for the images that are left")
        elif row.paths:
            done[id(row)] = _removed(row, engine)
    return [done.get(id(row), row) for row in rows]


def _removed(row: Stored, engine: Engine | ToolError) -> Stored:
    try:
        if row.paths:
            for path in row.paths:
                while os.path.lexists(path):
                    with suppress(FileNotFoundError):  # another run removes it, too
                        _remove_path(path)
            with suppress(OSError):  # other things are in it
                Path(row.place).rmdir()
        elif isinstance(engine, ToolError) or (isinstance(row.bytes, Unknown) and not row.place):
            raise DataError(f"the engine didn't answer: {row.bytes}")
        elif row.what.startswith("container"):
            engine.sweep_containers()
        else:
            engine.remove_tag(row.place)
    except OSError as error:
        return replace(row, note=f"not removed: {error.filename or row.place}: {error.strerror or error}")
    except ToolError as error:
        return replace(row, note=f"not removed: {error.message}")
    return replace(row, removed=True)


def _remove_path(path: Path) -> None:
    """Remove a file or a tree; links in it are removed, not followed. Raises OSError."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
    elif path.is_mount() or has_mounts(path):
        raise OSError(None, "something is mounted in it", str(path))
    else:
        shutil.rmtree(path)
