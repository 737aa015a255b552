"""Finds a variant's inputs: walks each list of sources until one answers, and records why others didn't."""

from dataclasses import dataclass, replace

from buildtool.builder.lockfile import Lock, spec_sha256
from buildtool.builder.rootfs import RootfsCache
from buildtool.builder.wheels import TOOLS_PYTHON, WheelCache
from buildtool.engine.client import Engine
from buildtool.errors import SourceUnreachable
from buildtool.model import Base, Bootstrap, PinnedBase, Registry, Resolved, TorchSource, Variant, Wheel
from buildtool.progress import Say


@dataclass(frozen=True)
class Sources:
    """Where inputs come from on this host."""

    engine: Engine
    wheels: WheelCache
    rootfs: RootfsCache
    lock: Lock
    epoch: int
    say: Say

    def resolve(self, variant: Variant, *, update_lock: bool = False) -> Resolved:
        """Every input of a variant by content: from the lock, else found now and locked.

        Raises SourceUnreachable when a whole list of sources fails, naming each one's reason.
        """
        locked = None if update_lock else self.lock.get(variant)
        if locked:
            source = next(s for s in variant.torch if s.name == locked.torch_source)
            self.wheels.fetch(locked.wheels, locked.python, index=source.index)
            return self._refresh_base(variant, locked)
        notes: list[str] = []
        for source in variant.torch:
            try:
                found = self._try(variant, source, notes)
            except SourceUnreachable as error:
                notes.append(_one_line(error))
                self.say(f"{variant.name}: {notes[-1]}; trying the next source")
                continue
            self.lock.put(found)
            return found
        raise SourceUnreachable(
            f"{variant.name}: no source of torch answers:\n" + "\n".join(f"  - {note}" for note in notes),
            "check the network and the host's pip configuration, or use a wheelhouse: PIP_FIND_LINKS=DIR",
        )

    def tools(self, *, update_lock: bool = False) -> tuple[Wheel, ...]:
        """The wheels that run inside a build, locked like every other input."""
        if self.lock.tools and not update_lock:
            self.wheels.fetch(self.lock.tools, TOOLS_PYTHON, index=None)
        else:
            self.lock.put_tools(self.wheels.tools())
        return self.lock.tools

    def _try(self, variant: Variant, source: TorchSource, notes: list[str]) -> Resolved:
        python = source.python or variant.python
        wheels = self.wheels.resolve(source.for_card(variant.first_target), python, variant.wheels)
        base = self._find_base(variant, source, notes)
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

    def _find_base(self, variant: Variant, source: TorchSource, notes: list[str]) -> PinnedBase:
        tried: list[str] = []
        for base in source.base or variant.base:
            try:
                found = self._pin(base, variant)
            except SourceUnreachable as error:
                tried.append(_one_line(error))
                self.say(f"{variant.name}: {tried[-1]}; trying the next base")
            else:
                notes.extend(tried)
                return found
        raise SourceUnreachable(f"{variant.name}: no base answers: {'; '.join(tried)}")

    def _pin(self, base: Base, variant: Variant) -> PinnedBase:
        if isinstance(base, Registry):
            return base.pinned(self.engine.registry_digest(base.ref))
        return base.pinned(self.rootfs.bring(with_packages(base, variant), self.epoch)[1])

    def _refresh_base(self, variant: Variant, locked: Resolved) -> Resolved:
        """The root file system of a locked variant, made again if missing; reports newer Debian packages."""
        recipe = bootstrap_of(variant, locked)
        if recipe is None:
            return locked
        _, digest = self.rootfs.bring(recipe, self.epoch)
        if digest == locked.base.pin:
            return locked
        self.say(f"{variant.name}: Debian {recipe.suite} has newer packages than the lock; locking those")
        fresh = replace(locked, base=recipe.pinned(digest))
        self.lock.put(fresh)
        return fresh


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
