"""The order of a build: inputs, plan, bake, proof, audit. Each step is a function of the one before."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from buildtool import buildx, context, plan, proof
from buildtool.audit.audit import audit_image, write_reports
from buildtool.audit.render import SummaryRow, summary_row
from buildtool.command import stop_children
from buildtool.engine import Engine, disk_here
from buildtool.errors import EnvironmentMissing
from buildtool.files import free_bytes, kept, locked, sha256_of, sweep_partials, write_text
from buildtool.fingerprint import tool_fingerprint
from buildtool.gpucode.target import TargetId
from buildtool.lock import Lock
from buildtool.model import BuiltImage, Catalog, Resolved, Variant, Wheel
from buildtool.parallel import at_once
from buildtool.pruned import PruneCache, PrunedInputs, served_targets
from buildtool.rootfs import RootfsCache
from buildtool.sources import Sources, bootstrap_of
from buildtool.wheels import WheelCache
from probes.facts import Unknown
from probes.units import decimal_bytes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Workplace:
    """Where a build keeps its things on the host."""

    state: Path
    lock: Path
    say: Say = field(repr=False)

    def seal(self, kind: str, *settings: object) -> Path:
        """Where it is kept what was seen on an image: one place for each digest, settings and tool.

        `settings` are all that the observation depends on, the image's digest among them, by their `repr`.
        """
        key = hashlib.sha256(repr((tool_fingerprint(), *settings)).encode()).hexdigest()
        return self.state / kind / key

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other builds out of this state directory: they would replace contexts that are being read."""
        waiting = "another build is at work in the same state directory; waiting for it to end"
        with locked(self.state / "build.lock", lambda: self.say(waiting)):
            yield

    def sweep(self) -> None:
        """Remove what killed runs left half-written, in every folder that a build writes into."""
        for folder in (None, self.lock.parent, self.state, *self.state.glob("*")):
            sweep_partials(folder)

    @property
    def wheels(self) -> WheelCache:
        """The wheel cache."""
        return WheelCache(self.state / "wheels", self.say)

    @property
    def rootfs(self) -> RootfsCache:
        """The cache of root file systems."""
        return RootfsCache(self.state / "rootfs", self.say)

    @property
    def prunes(self) -> PruneCache:
        """The cache of inputs without GPU code for other cards."""
        return PruneCache(self.state / "pruned", self.say)


def prepare(
    workplace: Workplace,
    catalog: Catalog,
    variants: Sequence[Variant],
    *,
    engine: Engine,
    update_lock: bool,
    targets_asked: bool = False,
) -> list[plan.Target]:
    """Find every input and stage the contexts; variants in parallel, since each waits for other things.

    With `targets_asked` a GPU target that a variant's stack lacks is an error, else it is left out.
    Raises SourceUnreachable, EnvironmentMissing, DataError, ConfigError for the first variant that fails.
    What killed runs left half-written is removed first.
    """
    buildx.require_buildx()  # the build needs it after minutes of downloads
    workplace.sweep()
    epoch = catalog.source_date_epoch
    wheels = workplace.wheels
    lock = Lock.load(workplace.lock)
    sources = Sources(engine, wheels, workplace.rootfs, lock, epoch, workplace.say)
    require_disk(workplace, variants, engine, lock)
    tasks = [partial(sources.resolve, variant, update_lock=update_lock) for variant in variants]
    resolved = at_once(tasks, workers=4, stop=stop_children)
    tools = sources.tools(update_lock=update_lock)
    return [
        _stage(workplace, variant, found, tools=tools, epoch=epoch, asked=targets_asked)
        for variant, found in zip(variants, resolved, strict=True)
    ]


def build(
    targets: Sequence[plan.Target], *, engine: Engine, epoch: int, say: Say, no_cache: bool = False
) -> list[BuiltImage]:
    """Bake the targets into the engine. Raises as `buildx.bake` does."""
    baked = plan.plan_bake(targets, epoch=epoch, zstd=engine.info().containerd_store)
    return buildx.bake(baked, targets, engine=engine, say=say, no_cache=no_cache)


def prove(workplace: Workplace, target: plan.Target, image: BuiltImage, engine: Engine) -> proof.Proof:
    """Run the image and hold it to its promises, once for each digest and promise. Raises ProofFailed."""
    promised = (target.variant.ref, target.resolved.torch_build, target.resolved.python)
    seal = workplace.seal("proved", image.digest, promised, proof.COMMAND)
    if earlier := kept(seal, proof.from_seal):
        return earlier
    workplace.say(f"{image.variant}: proving {image.ref} in a fresh container")
    ran = engine.run(image.digest, proof.COMMAND)
    judged = proof.judge(
        target.variant, target.resolved, exit_code=ran.exit_code, stdout=ran.stdout, stderr=ran.stderr
    )
    write_text(seal, proof.to_seal(judged))
    return judged


def audited(
    workplace: Workplace, target: plan.Target, image: BuiltImage, engine: Engine, reports: Path
) -> SummaryRow:
    """Audit the image and write its reports, unless the very reports of this audit are there already.

    Raises as `buildtool.audit.audit.audit_image` does.
    """
    variant = target.variant
    seal = workplace.seal(
        "audited", image.digest, image.ref, variant.name, variant.budget, variant.gpu_targets
    )
    known = kept(seal, _audit_of_seal)
    if known and known[1] == _digests(reports, known[1]):
        return known[0]
    workplace.say(f"{variant.name}: auditing {image.ref}")
    report = audit_image(
        image.ref,
        engine=engine,
        budget=variant.budget,
        targets=variant.gpu_targets,
        say=workplace.say,
        digest=image.digest,
    )
    written = write_reports(report, reports, variant.name)
    row = summary_row(report)
    files = _digests(reports, [path.name for path in written])
    write_text(seal, json.dumps({"row": asdict(row), "files": files}))
    return row


def record(target: plan.Target, image: BuiltImage, proved: proof.Proof, reports: Path) -> None:
    """Write down what the image was made from and what it was seen doing: `<variant>.build.json`."""
    resolved = asdict(target.resolved) | {"torch_build": target.resolved.torch_build.value}
    seen = asdict(proved) | {"torch_build": proved.torch_build.value}
    data = {"schema_version": 1, "image": asdict(image), "inputs": resolved, "proof": seen}
    write_text(reports / f"{image.variant}.build.json", json.dumps(data, indent=1) + "\n")


def _audit_of_seal(text: str) -> tuple[SummaryRow, dict[str, str]]:
    """The row and the reports' digests of an audit. Raises what `kept` takes for damage."""
    data = json.loads(text)
    return SummaryRow(**data["row"]), {str(name): str(digest) for name, digest in data["files"].items()}


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    """The SHA-256 of files by name; None for one that isn't there."""
    return {name: sha256_of(folder / name) if (folder / name).is_file() else None for name in names}


def require_disk(workplace: Workplace, variants: Sequence[Variant], engine: Engine, lock: Lock) -> None:
    """Refuse before anything is made when a disk surely can't hold it. Raises EnvironmentMissing.

    The engine's disk counts where it is one of this host's.
    """
    missing = [v for v in variants if lock.get(v) is None]
    needed = sum(plan.disk_needed(variant, lock.get(variant)) for variant in missing)
    places = [workplace.state]
    images = disk_here(engine.info())
    if isinstance(images, Unknown):
        workplace.say(f"the engine's disk isn't checked: {images.reason}")
    else:
        places.append(images)
    for place in places:
        free = free_bytes(place)
        if free < max(needed, plan.DISK_FLOOR):
            raise EnvironmentMissing(
                f"{place} has {decimal_bytes(free)} free; building {', '.join(v.name for v in variants)} "
                f"may take {decimal_bytes(max(needed, plan.DISK_FLOOR))}",
                "free some space (docker system df; docker builder prune), or move the cache: WEIR_STATE=DIR",
            )


def _stage(
    workplace: Workplace,
    variant: Variant,
    resolved: Resolved,
    *,
    tools: tuple[Wheel, ...],
    epoch: int,
    asked: bool,
) -> plan.Target:
    begun = time.monotonic()
    workplace.wheels.verify((*resolved.wheels, *tools))
    recipe = bootstrap_of(variant, resolved)
    rootfs = workplace.rootfs.path(recipe, epoch) if recipe else None
    if rootfs and not variant.prune:
        workplace.rootfs.verify(rootfs, resolved.base.pin)
    pruned = _prune(workplace, variant, resolved, rootfs=rootfs, asked=asked) if variant.prune else None
    if pruned:
        variant = replace(variant, gpu_targets=tuple(map(str, pruned.targets)))
    folder = context.stage(
        workplace.state / "context",
        resolved,
        workplace.wheels,
        tools,
        rootfs=rootfs,
        epoch=epoch,
        pruned=pruned,
    )
    workplace.say(f"{variant.name}: inputs ready: {_told(resolved)} ({time.monotonic() - begun:.1f} s)")
    return plan.Target(variant, resolved, folder)


def _prune(
    workplace: Workplace, variant: Variant, resolved: Resolved, *, rootfs: Path | None, asked: bool
) -> PrunedInputs:
    """The variant's big inputs without foreign GPU code; targets that none of them has are left out."""
    groups = plan.group_wheels(resolved.wheels)
    archives = {w.sha256: workplace.wheels.path(w) for w in (*groups.torch, *groups.heavy)}
    if rootfs:
        archives[resolved.base.pin] = rootfs
    wanted = tuple(sorted(map(TargetId.parse, variant.gpu_targets)))

    def verify(path: Path, sha256: str) -> None:
        if path == rootfs:  # wheels have been verified
            workplace.rootfs.verify(path, sha256)

    while True:
        found = {
            key: workplace.prunes.bring(path, key, wanted, verify=verify) for key, path in archives.items()
        }
        had = [code for one in found.values() for code in one.had]
        left = served_targets(variant.name, wanted, had, asked=asked, say=workplace.say)
        if left == wanted:
            return PrunedInputs(wanted, found)
        wanted = left


def _told(resolved: Resolved) -> str:
    stored = sum(wheel.stored_bytes for wheel in resolved.wheels)
    return (
        f"base {resolved.base.origin} {resolved.base.name}, torch {resolved.torch_version or 'of the base'} "
        f"({resolved.torch_source}), {len(resolved.wheels)} wheels of {decimal_bytes(stored)}"
    )
