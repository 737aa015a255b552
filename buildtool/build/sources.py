"""Resolves a variant's inputs: tries each list of sources in order, and records why some were skipped."""

import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from buildtool.build.lockfile import Lock, spec_sha256
from buildtool.build.rootfs import RootfsCache
from buildtool.build.wheels import TOOLS_PYTHON, WheelCache
from buildtool.core.errors import DataError, SourceUnreachable, ToolError
from buildtool.core.model import Base, Bootstrap, PinnedBase, Registry, Resolved, TorchSource, Variant, Wheel
from buildtool.core.progress import Progress
from probes.core.quoting import command

STATUS = "./var/lib/dpkg/status"  # dpkg's list of packages


class _NoBase(SourceUnreachable):
    """None of a list of bases answered."""


@dataclass(frozen=True)
class Sources:
    """Resolves inputs with this host's caches and lock file; `registry_digest` asks a registry."""

    registry_digest: Callable[[str], str]
    wheels: WheelCache
    rootfs: RootfsCache
    lock: Lock
    epoch: int
    progress: Progress

    def resolve(self, variant: Variant, *, update_lock: bool = False) -> Resolved:
        """Every input of a variant by content: from the lock, else resolved now and locked.

        Raises SourceUnreachable, with each source's reason, when all sources of torch or all bases fail.
        """
        locked = None if update_lock else self.lock.get(variant)
        if locked:
            source = next(s for s in variant.torch if s.name == locked.torch_source)
            self.wheels.fetch(locked.wheels, locked.python, index=source.index)
            return self._refresh_base(variant, locked)
        notes: list[str] = []
        baseless: list[tuple[Base, ...]] = []  # lists of bases of which none answers
        for source in variant.torch:
            bases = source.base or variant.base
            if bases in baseless:
                continue
            try:
                resolved = self._try(variant, source, bases, notes, update=update_lock)
            except _NoBase:
                baseless.append(bases)
                continue
            except SourceUnreachable as error:
                notes.append(_one_line(error))
                self.progress(f"{variant.name}: {notes[-1]}; trying the next source")
                continue
            self.lock.put(resolved)
            return resolved
        tried = "\n".join(f"  - {note}" for note in notes)
        if baseless:
            raise SourceUnreachable(
                f"{variant.name}: torch was found, but no base for it:\n{tried}",
                "check the network, and the mirror that apt uses: apt-get update",
            )
        raise SourceUnreachable(
            f"{variant.name}: no source of torch answers:\n{tried}",
            "check the network and the host's pip configuration, or use a wheelhouse: PIP_FIND_LINKS=DIR",
        )

    def tools(self, *, update_lock: bool = False) -> tuple[Wheel, ...]:
        """The wheels that run inside BuildKit's builds, locked like every other input."""
        if self.lock.tools and not update_lock:
            self.wheels.fetch(self.lock.tools, TOOLS_PYTHON, index=None)
        else:
            self.lock.put_tools(self.wheels.tools())
        return self.lock.tools

    def _try(
        self,
        variant: Variant,
        source: TorchSource,
        bases: tuple[Base, ...],
        notes: list[str],
        *,
        update: bool,
    ) -> Resolved:
        python = source.python or variant.python
        wheels = self.wheels.resolve(source.for_card(variant.first_target), python, variant.wheels)
        base = self._find_base(variant, bases, notes, update=update)
        return Resolved(
            variant=variant.name,
            spec_sha256=spec_sha256(variant),
            torch_source=source.name,
            torch_build=source.build,
            python=python,
            base=base,
            wheels=wheels,
            notes=tuple(notes),
            gpu_target=variant.first_target if source.is_by_card else "",
        )

    def _find_base(
        self, variant: Variant, bases: tuple[Base, ...], notes: list[str], *, update: bool
    ) -> PinnedBase:
        """The first base that answers; with `update`, no cache is used. Failures go into `notes`.

        Raises _NoBase.
        """
        for base in bases:
            try:
                return self._pin(base, variant, update=update)
            except SourceUnreachable as error:
                notes.append(_one_line(error))
                self.progress(f"{variant.name}: {notes[-1]}; trying the next base")
        raise _NoBase(f"{variant.name}: no base answers")

    def _pin(self, base: Base, variant: Variant, *, update: bool) -> PinnedBase:
        if isinstance(base, Registry):
            if variant.system_packages and variant.dockerfile is None:
                raise SourceUnreachable(
                    f"registry base {base.ref}: `system_packages` go into bootstrapped bases alone"
                )
            try:
                return base.pinned(self.registry_digest(base.ref))
            except ToolError as error:  # whatever it is, the next base may do
                raise SourceUnreachable(f"registry base {base.ref}: {error.message}") from error
        recipe = with_packages(base, variant)
        tar, digest = self.rootfs.bring(recipe, self.epoch, update=update)
        # apt reads a name that no package has as a pattern, and installs what matches that
        if missing := {name.partition(":")[0] for name in recipe.packages} - packages_in(tar):
            raise SourceUnreachable(f"Debian {base.suite} has no package {', '.join(sorted(missing))}")
        return base.pinned(digest)

    def _refresh_base(self, variant: Variant, locked: Resolved) -> Resolved:
        """The root file system of a locked variant, made again unless the locked one is here.

        Reports and locks what is new: Debian's mirrors keep no old packages.
        """
        recipe = bootstrap_of(variant, locked)
        if recipe is None:
            return locked
        _, digest = self.rootfs.bring(recipe, self.epoch, locked_as=locked.base.pin)
        if digest == locked.base.pin:
            return locked
        self.progress(
            f"{variant.name}: Debian {recipe.suite}, made again, isn't what was locked: its mirror has other "
            "packages now; locking those"
        )
        fresh = replace(locked, base=recipe.pinned(digest))
        self.lock.put(fresh)
        return fresh


def packages_in(tar: Path) -> set[str]:
    """The packages in a root file system, by what they are called and by what they provide.

    Raises DataError for one that doesn't list them.
    """
    try:
        with tarfile.open(tar, "r:") as archive:
            file = archive.extractfile(STATUS)
            text = file.read().decode("utf-8", "replace") if file else ""
    except (tarfile.TarError, KeyError) as error:
        raise DataError(
            f"can't read {STATUS} in {tar}, by which it is checked that all packages are there",
            f"keep it out of the catalog's `cut`; if the file is damaged: {command('rm', '--', str(tar))}",
        ) from error
    lines = re.findall(r"^(?:Package|Provides): (.+)$", text, re.MULTILINE)
    return {name.split()[0] for line in lines for name in line.split(",") if name.strip()}


def with_packages(base: Bootstrap, variant: Variant) -> Bootstrap:
    """The recipe with the variant's own system packages in it."""
    extra = tuple(name for name in variant.system_packages if name not in base.packages)
    return replace(base, packages=base.packages + extra)


def bootstrap_of(variant: Variant, resolved: Resolved) -> Bootstrap | None:
    """The recipe of a resolved variant's root file system; None when its base is a registry's."""
    if resolved.base.origin != "bootstrap":
        return None
    source = next(s for s in variant.torch if s.name == resolved.torch_source)
    bases = source.base or variant.base
    recipe = next(b for b in bases if isinstance(b, Bootstrap) and b.suite == resolved.base.name)
    return with_packages(recipe, variant)


def _one_line(error: SourceUnreachable) -> str:
    return " ".join(error.message.split())[:400]
