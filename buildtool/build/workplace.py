"""The directory where builds keep caches, contexts, the lock and what was observed of images."""

import functools
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from buildtool.build.layer_store import LayerStore
from buildtool.build.plan import ImagePlan
from buildtool.build.rootfs import RootfsCache
from buildtool.build.sources import bootstrap_of
from buildtool.build.wheels import WheelCache
from buildtool.core.errors import DataError
from buildtool.core.files import locked, scratch
from buildtool.core.model import Resolved, Variant
from buildtool.core.progress import Progress
from buildtool.core.shipped import CATALOG, lock_file, state_directory
from buildtool.engine import tags
from buildtool.engine.client import Engine
from buildtool.engine.reference import Reference
from buildtool.image.layer_writer import COMPRESSIONS
from buildtool.prune.inputs import Inspections, PruneCache
from probes.core.files import sweep_partials
from probes.core.quoting import command

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# results of another version of this tool are not reused
PACKAGES = tuple(Path(__file__).parents[2] / name for name in ("buildtool", "probes"))


@dataclass(frozen=True)
class Workplace:
    """One state directory and one lock file, and the caches in them."""

    state: Path
    lock: Path
    progress: Progress = field(repr=False)
    verbose: bool = False  # print every line of the programs that fetch inputs
    compression: str = "zstd"  # of layers, a key of COMPRESSIONS

    def seal(self, kind: str, *settings: object) -> Path:
        """The file that keeps an observation of an image: one for each `settings` and version of this tool.

        `settings` are all that the observation depends on, the image's digest among them, by their `repr`.
        """
        key = hashlib.sha256(repr((tool_fingerprint(), *settings)).encode()).hexdigest()
        return self.state / kind / key

    def named(self, name: Reference) -> Path:
        """The file with the id of the image that a build from here gave this name last."""
        return self.state / "named" / hashlib.sha256(name.canonical.encode()).hexdigest()

    @contextmanager
    def temporary_names(self, engine: Engine) -> Iterator[str]:
        """The prefix of images' names until they are proved: see `buildtool.engine.tags.temporary_names`."""
        with scratch(self.state) as folder, tags.temporary_names(engine, "weir-building", folder) as start:
            yield start

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock this state directory against other builds, which would replace contexts that are being read.

        What is kept here goes into images: whatever the umask is, no other user may change what is made
        during the block. Where one could before, a line of progress says so.
        """
        waiting = "another build is using the same state directory; waiting for it to finish"
        with ExitStack() as held:
            own = os.umask(OTHERS_WRITE)
            held.callback(os.umask, own)
            os.umask(own | OTHERS_WRITE)
            try:
                held.enter_context(locked(self.state / "build.lock", lambda: self.progress(waiting)))
            except DataError as error:
                raise DataError(error.message, "name a directory for caches: WEIR_STATE=DIR") from error
            if doubt := next(writable_by_others(self.state), None):  # one line is enough
                self.progress(f"warning: {doubt}, who can change what goes into images from {self.state}")
            yield

    def sweep(self) -> None:
        """Remove half-written files of killed runs from every folder that a build writes into."""
        for folder in (None, self.lock.parent, self.state, *self.state.glob("*")):
            sweep_partials(folder)

    @property
    def wheels(self) -> WheelCache:
        """The wheel cache."""
        return WheelCache(self.state / "wheels", self.progress, verbose=self.verbose)

    @property
    def rootfs(self) -> RootfsCache:
        """The cache of root file systems."""
        return RootfsCache(self.state / "rootfs", self.progress, verbose=self.verbose)

    @property
    def prunes(self) -> PruneCache:
        """The cache of inputs without GPU code for other cards."""
        return PruneCache(self.state / "pruned", self.progress)

    @property
    def layers(self) -> LayerStore:
        """The layers and images that builds write."""
        return LayerStore(self.state, COMPRESSIONS[self.compression])

    @property
    def inspections(self) -> Inspections:
        """Which targets the inputs have code for, as far as known."""
        return Inspections(self.state / "inspected", self.progress)

    def image(self, variant: Variant, resolved: Resolved) -> ImagePlan:
        """The plan of an image for its variant's cards, with its place for the context."""
        return ImagePlan(variant, resolved, self.state / "context" / variant.name)

    def rootfs_of(self, image: ImagePlan, epoch: int) -> Path | None:
        """The root file system that an image is built on; None where a registry has its base."""
        recipe = bootstrap_of(image.variant, image.resolved)
        return self.rootfs.path(recipe, epoch) if recipe else None

    def archives(self, image: ImagePlan, epoch: int) -> dict[str, Path]:
        """The inputs that GPU code is looked for in, by SHA-256; none without pruning."""
        places = {wheel.sha256: self.wheels.path(wheel) for wheel in image.resolved.wheels}
        if rootfs := self.rootfs_of(image, epoch):
            places[image.resolved.base.pin] = rootfs
        return {sha256: places[sha256] for sha256 in image.scanned_inputs}

    def verify(self, image: ImagePlan, path: Path, sha256: str) -> None:
        """Check one of `archives` against its hash. Raises DataError, having removed what is damaged."""
        if sha256 == image.resolved.base.pin:
            self.rootfs.verify(path, sha256)
        else:
            self.wheels.verify([wheel for wheel in image.resolved.wheels if wheel.sha256 == sha256])


def default_workplace(
    progress: Progress, catalog: Path = CATALOG, *, verbose: bool = False, compression: str = "zstd"
) -> Workplace:
    """Where builds keep their caches and a catalog's lock: see `buildtool.core.shipped`."""
    return Workplace(state_directory(), lock_file(catalog), progress, verbose, compression)


def writable_by_others(directory: Path) -> Iterator[str]:
    """Sentences on folders that other users can change: the directory, those in it, and those above it.

    In a folder above with the sticky bit, such as /tmp, nobody can replace what another one made.
    """
    place = directory.resolve()
    below = [place, *(path for path in sorted(place.iterdir()) if path.is_dir() and not path.is_symlink())]
    for path in (*below, *place.parents):
        try:
            status = path.stat()
        except FileNotFoundError:  # another build's, which has ended
            continue
        private = status.st_gid in (0, status.st_uid)  # a group of one
        open_to = status.st_mode & (stat.S_IWOTH if private else OTHERS_WRITE)
        if status.st_uid not in (0, os.geteuid()):
            yield f"{path} belongs to another user ({status.st_uid}; another place: WEIR_STATE=DIR)"
        elif open_to and (path in below or not status.st_mode & stat.S_ISVTX):
            yield f"{path} can be written by other users ({command('chmod', 'go-w', str(path))})"


@functools.cache
def tool_fingerprint() -> str:
    """SHA-256 over every file of both programs: between releases the version number stays the same."""
    return fingerprint(PACKAGES)


def fingerprint(folders: tuple[Path, ...]) -> str:
    """SHA-256 over names and contents of the sources below `folders`."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"{folder.name}/{path.relative_to(folder)}"
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()
