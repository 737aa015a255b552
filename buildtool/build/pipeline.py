"""The steps of a build: plan, stage, bake, prove, audit, record, name.

Each takes the result of the one before; `buildtool.cli.build` calls them in this order.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path

from buildtool.audit.audit import audit_image, progress_lines, write_reports
from buildtool.audit.options import AuditOptions
from buildtool.audit.text import SummaryRow, summary_row, text_table
from buildtool.build.lockfile import Lock
from buildtool.build.plan import DISK_FLOOR, BuildPlan, ImagePlan, disk_needed, group_wheels, unresolved
from buildtool.build.sources import Sources
from buildtool.build.wheels import WheelCache
from buildtool.build.workplace import Workplace
from buildtool.core.command import stop_children
from buildtool.core.files import read_cached, require_writable, scratch, sha256_of, write_text
from buildtool.core.model import BuiltImage, Resolved, Variant, Wheel
from buildtool.core.parallel import run_parallel
from buildtool.core.progress import Progress
from buildtool.core.shipped import IMAGES, PROBES
from buildtool.engine import buildx, proof
from buildtool.engine.client import Engine
from buildtool.engine.host import require_engine_space, require_free_space
from buildtool.engine.proof import Proof
from buildtool.engine.reference import Reference
from buildtool.engine.tags import move_tags
from buildtool.gpucode.source import TargetMissing
from buildtool.gpucode.target import TargetId
from buildtool.prune.inputs import PrunedInputs
from buildtool.prune.manifest import IMAGE_PATH
from probes.core.codec import encode
from probes.core.quoting import command, terminal
from probes.core.units import counted, decimal_bytes

APP = "payload/opt/weir/app"  # in a context
# what goes into every image -> where, below APP
PAYLOAD = {
    IMAGES / "service": "service",
    IMAGES / "profiles": "profiles",
    PROBES: "probes",
    IMAGES / "smoke.py": "smoke.py",
}
LEFT_OUT = shutil.ignore_patterns("__pycache__", "py.typed", ".*", "*~")  # bytecode, what editors leave


def make_plan(
    workplace: Workplace,
    candidates: Sequence[Sequence[Variant]],
    *,
    engine: Engine,
    epoch: int,
    update_lock: bool = False,
    every_target: bool = False,
) -> BuildPlan:
    """Find every input and decide which cards the images are for, several images at a time.

    An image has a list of candidates, the same variant for different cards: the first whose inputs have code
    for one of its cards is built. With `every_target`, they must have code for all of them. Half-written
    files of killed runs are removed first.

    Raises SourceUnreachable, EnvironmentMissing, DataError, ConfigError or TargetMissing for the first image
    that fails.
    """
    buildx.require_buildx()  # the build needs it after minutes of downloads
    workplace.sweep()
    lock = Lock.load(workplace.lock)
    if update_lock or not lock.tools or None in (lock.get(variants[0]) for variants in candidates):
        require_writable(workplace.lock.parent, "name another lock file: WEIR_LOCK=FILE")
    sources = Sources(engine, workplace.wheels, workplace.rootfs, lock, epoch, workplace.progress)
    require_disk_space(workplace, [variants[0] for variants in candidates], engine, lock)

    def planned(variant: Variant) -> ImagePlan:
        image = workplace.image(variant, sources.resolve(variant, update_lock=update_lock))
        archives = workplace.archives(image, epoch)
        targets = [
            workplace.inspections.targets(path, sha256, verify=partial(workplace.verify, image))
            for sha256, path in archives.items()
        ]
        image, remark = image.with_targets(frozenset().union(*targets), every_target=every_target)
        if remark:
            workplace.progress(f"{remark}; pruning to {', '.join(image.variant.gpu_targets)}")
        return image

    tasks = [partial(_first_served, variants, planned, workplace.progress) for variants in candidates]
    images = run_parallel(tasks, workers=4, stop=stop_children)
    return BuildPlan(tuple(images), epoch, sources.tools(update_lock=update_lock))


def locked_plan(
    workplace: Workplace, candidates: Sequence[Sequence[Variant]], *, epoch: int, every_target: bool
) -> BuildPlan:
    """The plan as far as earlier builds know its inputs; nothing is fetched, made or inspected.

    What isn't locked is planned from its first source, and cards aren't decided on before the inputs are
    known. Raises TargetMissing as `make_plan` does.
    """
    lock = Lock.load(workplace.lock)

    def planned(variant: Variant) -> ImagePlan:
        resolved = lock.get(variant)
        image = workplace.image(variant, resolved or unresolved(variant))
        inspected = [workplace.inspections.known(sha256) for sha256 in image.scanned_inputs]
        known = [targets for targets in inspected if targets is not None]
        if resolved is None or len(known) < len(inspected):
            return image
        return image.with_targets(frozenset().union(*known), every_target=every_target)[0]

    images = [_first_served(variants, planned, lambda _line: None) for variants in candidates]
    return BuildPlan(tuple(images), epoch, lock.tools)


def _first_served(
    variants: Sequence[Variant], planned: Callable[[Variant], ImagePlan], progress: Progress
) -> ImagePlan:
    """The plan of the first variant whose inputs have code for its cards. Raises TargetMissing for none."""
    for variant in variants[:-1]:
        try:
            return planned(variant)
        except TargetMissing as error:
            progress(f"{error.message}: building for the cards that the catalog names")
    return planned(variants[-1])


def require_disk_space(workplace: Workplace, variants: Sequence[Variant], engine: Engine, lock: Lock) -> None:
    """Raise EnvironmentMissing for a build that certainly doesn't fit on a disk of this host.

    Variants that are locked already have most of their inputs here, and count only as the smallest build.
    """
    missing = [variant for variant in variants if lock.get(variant) is None]
    needed = sum(disk_needed(variant, lock.get(variant)) for variant in missing)
    purpose = f"building {', '.join(variant.name for variant in variants)}"
    require_free_space(workplace.state, max(needed, DISK_FLOOR), purpose)
    require_engine_space(engine, max(needed, DISK_FLOOR), purpose, progress=workplace.progress)


def stage(workplace: Workplace, build_plan: BuildPlan) -> None:
    """Check every input, prune what is to be pruned, and make the contexts. Raises DataError, OSError."""
    for image in build_plan.images:
        begun = time.monotonic()
        wheels = (*image.resolved.wheels, *build_plan.tools)
        workplace.wheels.verify([wheel for wheel in wheels if wheel.sha256 not in image.scanned_inputs])
        rootfs = workplace.rootfs_of(image, build_plan.epoch)
        if rootfs and not image.variant.prune:
            workplace.rootfs.verify(rootfs, image.resolved.base.pin)
        stage_context(
            image.context,
            image.resolved,
            workplace.wheels,
            build_plan.tools,
            rootfs=rootfs,
            epoch=build_plan.epoch,
            pruned=_prune(workplace, image, build_plan.epoch) if image.variant.prune else None,
        )
        description = _description(image.resolved)
        workplace.progress(
            f"{image.variant.name}: inputs ready: {description} ({time.monotonic() - begun:.1f} s)"
        )


def _prune(workplace: Workplace, image: ImagePlan, epoch: int) -> PrunedInputs:
    """The image's large inputs, without GPU code for other cards than the plan's."""
    targets = tuple(map(TargetId.parse, image.variant.gpu_targets))
    verify = partial(workplace.verify, image)
    archives = workplace.archives(image, epoch).items()
    pruned = {key: workplace.prunes.bring(path, key, targets, verify=verify) for key, path in archives}
    return PrunedInputs(targets, pruned)


def bake(
    plan: BuildPlan,
    named: str | None = None,
    *,
    engine: Engine,
    progress: Progress,
    no_cache: bool = False,
    verbose: bool = False,
) -> list[BuiltImage]:
    """Build every image of the plan, named as `BuildPlan.bake` says. Raises as `buildx.bake_plan` does."""
    baked = plan.bake(zstd=engine.info().containerd_store, named=named)
    digests = buildx.bake_plan(baked, engine=engine, progress=progress, no_cache=no_cache, verbose=verbose)
    variants = [image.variant for image in plan.images]
    return [BuiltImage(variant.name, variant.ref, digests[variant.name]) for variant in variants]


def prove(workplace: Workplace, planned: ImagePlan, image: BuiltImage, engine: Engine) -> Proof:
    """Run the image and check that it is what its variant promises, once for each digest and promise.

    Raises ProofFailed.
    """
    promise = (planned.variant.ref, planned.resolved.torch_build, planned.resolved.python)
    seal = workplace.seal("proved", image.digest, promise, proof.COMMAND)
    if earlier := read_cached(seal, proof.from_seal):
        return earlier
    workplace.progress(f"{image.variant}: proving {image.ref} in a fresh container")
    ran = engine.run(image.digest, proof.COMMAND)
    judged = proof.judge(
        planned.variant, planned.resolved, exit_code=ran.exit_code, stdout=ran.stdout, stderr=ran.stderr
    )
    write_text(seal, proof.to_seal(judged))
    return judged


def audit(
    workplace: Workplace, planned: ImagePlan, image: BuiltImage, engine: Engine, reports: Path
) -> SummaryRow:
    """Audit the image and write its reports, unless the reports of this very audit are there unchanged.

    Raises as `buildtool.audit.audit.audit_image` does.
    """
    variant = planned.variant
    seal = workplace.seal(
        "audited", image.digest, image.ref, variant.name, variant.budget, variant.gpu_targets
    )
    known = read_cached(seal, _audit_from_seal)
    if known and known[1] == _digests(reports, known[1]):
        return known[0]
    workplace.progress(f"{variant.name}: auditing {image.ref}")
    report = audit_image(
        image.ref,
        engine=engine,
        options=AuditOptions(budget=variant.budget, targets=variant.gpu_targets),
        tick=progress_lines(workplace.progress, image.ref),
        digest=image.digest,
    )
    written = write_reports(report, reports, variant.name)
    row = summary_row(report)
    files = _digests(reports, [path.name for path in written])
    write_text(seal, json.dumps({"row": asdict(row), "files": files}))
    return row


def _audit_from_seal(text: str) -> tuple[SummaryRow, dict[str, str]]:
    """The row and the reports' digests of an audit. Raises what `kept` takes for damage."""
    data = json.loads(text)
    return SummaryRow(**data["row"]), {str(name): str(digest) for name, digest in data["files"].items()}


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    """The SHA-256 of files by name; None for one that isn't there."""
    return {name: sha256_of(folder / name) if (folder / name).is_file() else None for name in names}


def record(planned: ImagePlan, image: BuiltImage, proven: Proof, reports: Path) -> None:
    """Write `<variant>.build.json`: what the image was made from and what its proof showed."""
    parts = {"image": image, "inputs": planned.resolved, "proof": proven}
    data = {"schema_version": 1, **{name: encode(part) for name, part in parts.items()}}
    write_text(reports / f"{image.variant}.build.json", json.dumps(data, indent=1) + "\n")


def name_all(
    workplace: Workplace, names: Sequence[tuple[BuiltImage, Sequence[Reference]]], engine: Engine
) -> None:
    """Give the images their names, all of them or none, and report names taken from images of others.

    Raises as `buildtool.engine.tags.move_tags` does.
    """
    moves = [(image.digest, name) for image, own in names for name in own]
    for name, old, new in move_tags(engine, moves):
        last_given = workplace.named(name)
        if old not in ("", new, read_cached(last_given, str)):
            back = command("docker", "tag", old, str(name))
            workplace.progress(
                f"until now {name} was an image that no build with {workplace.state} made; to have it back: "
                + back
            )
        write_text(last_given, new)


# ---- contexts: what the engine gets to build from ----------------------------------------------------------


def stage_context(
    final: Path,
    resolved: Resolved,
    cache: WheelCache,
    tools: tuple[Wheel, ...],
    *,
    rootfs: Path | None,
    epoch: int,
    pruned: PrunedInputs | None = None,
) -> None:
    """Make the context directory `final` anew, completely or not at all.

    Files of the caches are hard-linked where that is possible. `pruned` inputs take the place of their
    originals, and the list of what was removed becomes part of the payload.
    """
    with scratch(final.parent) as folder:
        context = folder / final.name
        _fill(context, resolved, cache, tools, epoch=epoch, pruned=pruned)
        if rootfs:
            _link(pruned.path(resolved.base.pin, rootfs) if pruned else rootfs, context / "rootfs.tar")
        if final.exists():  # moved, not removed: an interrupted removal would leave half of it there
            final.replace(folder / "old")
        context.replace(final)


def _fill(
    context: Path,
    resolved: Resolved,
    cache: WheelCache,
    tools: tuple[Wheel, ...],
    *,
    epoch: int,
    pruned: PrunedInputs | None,
) -> None:
    """Everything in a context except the root file system."""
    groups = group_wheels(resolved.wheels)
    by_folder = {"torch": groups.torch, "heavy": groups.heavy, "small": groups.small}
    for folder, wheels in by_folder.items():
        _link_all(wheels, cache, context / "wheels" / folder, pruned=pruned)
    _link_all(tools, cache, context / "tools")
    for script in (IMAGES / "tools").glob("*.py"):
        shutil.copyfile(script, context / "tools" / script.name)
    for origin, name in PAYLOAD.items():
        _copy(origin, context / APP / name)
    if pruned:
        (context / "payload" / IMAGE_PATH).write_text(pruned.manifest(), encoding="utf-8")
    _set_modes_and_times(context / "payload", epoch)
    _set_modes_and_times(context / "tools", epoch, links=False)


def _link_all(
    wheels: tuple[Wheel, ...], cache: WheelCache, folder: Path, *, pruned: PrunedInputs | None = None
) -> None:
    folder.mkdir(parents=True)
    for wheel in wheels:
        path = cache.path(wheel)
        _link(pruned.path(wheel.sha256, path) if pruned else path, folder / wheel.filename)


def _link(origin: Path, target: Path) -> None:
    try:
        os.link(origin, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(origin, target)


def _copy(origin: Path, target: Path) -> None:
    if origin.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, target)
    elif origin.is_dir():
        shutil.copytree(
            origin,
            target,
            ignore=LEFT_OUT,
            copy_function=shutil.copyfile,
        )


def _set_modes_and_times(folder: Path, epoch: int, *, links: bool = True) -> None:
    """Set modes and times of a folder and all below it; with `links` off, not of hard links into caches.

    A file's time is derived from its content: BuildKit sends a file again only when its size or time differs,
    so if all had the same time, an edit of the same length would never reach the engine.
    """
    for path in sorted((folder, *folder.rglob("*")), reverse=True):
        if not links and path.is_file() and path.stat().st_nlink > 1:
            continue
        path.chmod(0o755 if path.is_dir() else 0o644)
        before_ns = 0 if path.is_dir() else int(sha256_of(path)[:12], 16)  # 48 bits: 3 days in nanoseconds
        time_ns = max(0, epoch * 10**9 - before_ns)
        os.utime(path, ns=(time_ns, time_ns))


# ---- what the command line prints --------------------------------------------------------------------------


def _description(resolved: Resolved) -> str:
    stored = sum(wheel.stored_bytes for wheel in resolved.wheels)
    return (
        f"base {resolved.base.origin} {resolved.base.name}, torch {resolved.torch_version or 'of the base'} "
        f"({resolved.torch_source}), {counted(len(resolved.wheels), 'wheel')} of {decimal_bytes(stored)}"
    )


def built_text(plans: Sequence[ImagePlan], images: Sequence[BuiltImage], proofs: Sequence[Proof]) -> str:
    """A table of where each image came from and what its proof showed, and why other sources weren't used."""
    rows = [
        (
            image.ref,
            image.digest[:19],
            f"{planned.resolved.base.origin}: {planned.resolved.base.name}",
            f"{proof.torch_version} ({proof.torch_build.value}, from {planned.resolved.torch_source})",
            proof.python,
            proof.rocminfo,
        )
        for planned, image, proof in zip(plans, images, proofs, strict=True)
    ]
    headers = ("image", "manifest digest", "base", "torch", "python", "rocminfo")
    notes = [
        f"  {planned.variant.name}: skipped {note}" for planned in plans for note in planned.resolved.notes
    ]
    return "\n".join([text_table(headers, rows), *map(terminal, notes)])


def audited_text(rows: Sequence[SummaryRow]) -> str:
    """A table of the images: bytes, budget, largest finding."""
    headers = ("image", "torch build", "layers", "unpacked", "compressed", "budget", "biggest finding")
    return text_table(headers, [astuple(row) for row in rows])
