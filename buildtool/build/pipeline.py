"""The steps of a build: plan, write (or stage and bake, by a Dockerfile), load, prove, audit, record, name.

Each takes the result of the one before; `buildtool.cli.build` calls them in this order.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from buildtool.build import payload
from buildtool.build.image_writer import write_image
from buildtool.build.layer_store import LayerStore
from buildtool.build.lockfile import Lock
from buildtool.build.plan import DISK_FLOOR, BuildPlan, ImagePlan, disk_needed, group_wheels, unresolved
from buildtool.build.registry_base import fetch_base, registry_digest
from buildtool.build.sources import Sources
from buildtool.build.wheels import WheelCache
from buildtool.build.workplace import Workplace
from buildtool.core.command import stop_children
from buildtool.core.errors import BuildFailed, DataError, ProofFailed
from buildtool.core.files import read_cached, require_writable, scratch, sha256_of, write_text
from buildtool.core.model import LABEL, BuiltImage, Resolved, Variant, Wheel
from buildtool.core.parallel import run_parallel
from buildtool.core.progress import Progress
from buildtool.core.shipped import IMAGES
from buildtool.core.table import text_table
from buildtool.engine import buildx, proof
from buildtool.engine.client import Engine, RunResult
from buildtool.engine.host import require_engine_space, require_free_space
from buildtool.engine.proof import Proof
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.engine.tags import move_tags
from buildtool.gpucode.source import TargetMissing
from buildtool.gpucode.target import TargetId
from buildtool.image.written import WrittenImage, archive_chunks
from buildtool.keep.keep_list import KeepList
from buildtool.prune.inputs import PrunedInputs
from buildtool.prune.manifest import IMAGE_PATH
from probes.core.codec import encode
from probes.core.quoting import command, terminal
from probes.core.units import counted, decimal_bytes

if TYPE_CHECKING:
    from buildtool.audit.audit import Saver
    from buildtool.audit.text import SummaryRow


def make_plan(
    workplace: Workplace,
    candidates: Sequence[Sequence[Variant]],
    *,
    engine: Engine | None,
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
    is_baked = any(variants[0].dockerfile for variants in candidates)
    if is_baked:
        buildx.require_buildx()  # the build needs it after minutes of downloads
    workplace.sweep()
    lock = Lock.load(workplace.lock)
    if (
        update_lock
        or (is_baked and not lock.tools)
        or None in (lock.get(variants[0]) for variants in candidates)
    ):
        require_writable(workplace.lock.parent, "name another lock file: WEIR_LOCK=FILE")
    sources = Sources(registry_digest, workplace.wheels, workplace.rootfs, lock, epoch, workplace.progress)
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
    return BuildPlan(tuple(images), epoch, sources.tools(update_lock=update_lock) if is_baked else ())


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


def require_disk_space(
    workplace: Workplace, variants: Sequence[Variant], engine: Engine | None, lock: Lock
) -> None:
    """Raise EnvironmentMissing for a build that certainly doesn't fit on a disk of this host.

    Variants that are locked already have most of their inputs here, and count only as the smallest build.
    """
    missing = [variant for variant in variants if lock.get(variant) is None]
    needed = sum(disk_needed(variant, lock.get(variant)) for variant in missing)
    purpose = f"building {', '.join(variant.name for variant in variants)}"
    require_free_space(workplace.state, max(needed, DISK_FLOOR), purpose)
    if engine:
        require_engine_space(engine, max(needed, DISK_FLOOR), purpose, progress=workplace.progress)


def write(workplace: Workplace, plan: BuildPlan, *, anew: bool = False) -> dict[str, WrittenImage]:
    """Write the images that need no Dockerfile, by variant. Raises as `image_writer.write_image` does."""
    images = {}
    for planned in plan.written:
        begun = time.monotonic()
        base = planned.resolved.base
        image = write_image(
            workplace,
            planned,
            base=fetch_base(base, workplace.layers, workplace.progress)
            if base.origin == "registry"
            else None,
            pruned=_prune(workplace, planned, plan.epoch) if planned.variant.prune else None,
            epoch=plan.epoch,
            anew=anew,
        )
        images[planned.variant.name] = image
        stored = sum(layer.n_bytes for layer in image.layers)
        workplace.progress(
            f"{planned.variant.name}: {image.digest[:19]}, {decimal_bytes(stored)} in "
            f"{counted(len(image.layers), 'layer')}: {_description(planned.resolved)} "
            f"({time.monotonic() - begun:.1f} s)"
        )
    return images


def write_kept(
    workplace: Workplace,
    planned: ImagePlan,
    whole: WrittenImage,
    keep: tuple[Path, KeepList],
    *,
    epoch: int,
    anew: bool = False,
) -> WrittenImage:
    """Write the slim image of a keep-list, which comes with its path. Raises as `write_slim` does."""
    from buildtool.build.slim_image import write_slim

    path, lines = keep
    image = write_slim(workplace, planned, whole, lines, name=path.name, epoch=epoch, anew=anew)
    stored = sum(layer.n_bytes for layer in image.layers)
    workplace.progress(f"{planned.variant.name}: {image.digest[:19]}, slim, {decimal_bytes(stored)}")
    return image


def load(
    workplace: Workplace, images: Mapping[str, WrittenImage], named: str, *, engine: Engine
) -> dict[str, str]:
    """Give the engine the images, under temporary names that `named` is the beginning of; their ids there.

    Layers that it has of earlier builds aren't sent again. Raises as `Engine.load` does.
    """
    store = workplace.layers
    ids: dict[str, str] = {}
    held = store.held_by(engine.has) if images else frozenset()
    for variant, image in images.items():
        name = f"{named}-{variant}"
        known = next(filter(engine.has, image.ids), None)
        if known:
            with contextlib.suppress(DataError):  # somebody removes it meanwhile
                ids[variant] = engine.tag(known, parse_new_name(name))
                continue
        sent = sum(layer.n_bytes for layer in image.layers if layer.digest not in held)
        workplace.progress(f"{variant}: giving it to the engine, {decimal_bytes(sent)}")
        ids[variant] = _load(image, name, held, store=store, engine=engine)
    return ids


def _load(image: WrittenImage, name: str, held: frozenset[str], *, store: LayerStore, engine: Engine) -> str:
    """Load one image and return its id; with all its layers where the engine lacks one after all."""
    for without in (held, frozenset[str]()) if held else (held,):
        try:
            full_name = parse_new_name(name).canonical
            engine.load(archive_chunks(image, full_name, store.content, without=without))
        except BuildFailed:
            if not without:
                raise
        record = engine.inspect(name)
        if record is not None and record["Id"] in image.ids:
            return str(record["Id"])
    raise ProofFailed(f"the engine holds another image as {name} than the one it was given")


def stage(workplace: Workplace, plan: BuildPlan) -> None:
    """Check the inputs of images that BuildKit makes, prune what is to be pruned, and make their contexts.

    Raises DataError, OSError.
    """
    for image in plan.baked:
        begun = time.monotonic()
        wheels = (*image.resolved.wheels, *plan.tools)
        workplace.wheels.verify([wheel for wheel in wheels if wheel.sha256 not in image.scanned_inputs])
        rootfs = workplace.rootfs_of(image, plan.epoch)
        if rootfs and not image.variant.prune:
            workplace.rootfs.verify(rootfs, image.resolved.base.pin)
        stage_context(
            image.context,
            image.resolved,
            workplace.wheels,
            plan.tools,
            rootfs=rootfs,
            epoch=plan.epoch,
            pruned=_prune(workplace, image, plan.epoch) if image.variant.prune else None,
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
) -> dict[str, str]:
    """Build every image of the plan that has a Dockerfile, named as `BuildPlan.bake` says; ids by variant.

    Raises as `buildx.bake_plan` does.
    """
    if not plan.baked:
        return {}
    baked = plan.bake(named)
    return buildx.bake_plan(baked, engine=engine, progress=progress, no_cache=no_cache, verbose=verbose)


class Runner(Protocol):
    """What can run an image: an engine, or `runtimes.LocalRunner`."""

    def run(self, ref: str, command: list[str]) -> RunResult:
        """Run a command in an image, by its id there or its digest."""


def prove(
    workplace: Workplace, planned: ImagePlan, image: BuiltImage, runner: Runner, *, below: str = ""
) -> Proof:
    """Run the image and check that it is what its variant promises, once for each digest and promise.

    `below` names all of the image but the layer of the service (`WrittenImage.below`). Where an image with
    the same was proved before, torch and rocminfo don't run again. Raises ProofFailed, and as the runner
    does.
    """
    promise = (planned.variant.ref, planned.resolved.torch_build, planned.resolved.python)
    seal = workplace.seal("proved", image.digest, promise, proof.COMMAND)
    if earlier := read_cached(seal, proof.from_seal):
        return earlier
    script = sha256_of(IMAGES / "smoke.py")  # which is in the service's layer
    layers = workplace.seal("proved", below, promise, script)
    seen = read_cached(layers, proof.seen_from_seal) if below else None
    what = "the service, with layers proved before," if seen else image.ref
    workplace.progress(f"{image.variant}: proving {what} in a fresh container")
    ran = runner.run(image.image_id or image.digest, proof.SERVICE_ALONE if seen else proof.COMMAND)
    judged = proof.judge(
        planned.variant,
        planned.resolved,
        exit_code=ran.exit_code,
        stdout=ran.stdout,
        stderr=ran.stderr,
        below=seen,
    )
    write_text(seal, proof.to_seal(judged))
    if below and not seen and (facts := proof.facts_of(ran.stdout)):
        write_text(layers, proof.to_seal(proof.Seen(facts, image.digest)))
    return judged


def audit(
    workplace: Workplace, planned: ImagePlan, image: BuiltImage, source: "Saver", reports: Path
) -> "SummaryRow":
    """Audit the image and write its reports, unless the reports of this very audit are there unchanged.

    `source` gives its archive: the engine, or `Written`. Raises as `buildtool.audit.audit.audit_image` does.
    """
    from buildtool.audit.audit import audit_image, progress_lines, write_reports
    from buildtool.audit.options import AuditOptions
    from buildtool.audit.text import summary_row

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
        engine=source,
        options=AuditOptions(budget=variant.budget, targets=variant.gpu_targets),
        tick=progress_lines(workplace.progress, image.ref),
        digest=image.digest,
    )
    written = write_reports(report, reports, variant.name)
    row = summary_row(report)
    files = _digests(reports, [path.name for path in written])
    write_text(seal, json.dumps({"row": asdict(row), "files": files}))
    return row


@dataclass(frozen=True)
class Written:
    """An image that was written here, as an engine would save it."""

    image: WrittenImage
    store: LayerStore

    def save(self, _ref: str) -> Iterator[bytes]:
        """Its archive, in chunks."""
        return archive_chunks(self.image, "built:latest", self.store.content)


def _audit_from_seal(text: str) -> "tuple[SummaryRow, dict[str, str]]":
    """The row and the reports' digests of an audit. Raises what `kept` takes for damage."""
    from buildtool.audit.text import SummaryRow

    data = json.loads(text)
    return SummaryRow(**data["row"]), {str(name): str(digest) for name, digest in data["files"].items()}


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    """The SHA-256 of files by name; None for one that isn't there."""
    return {name: sha256_of(folder / name) if (folder / name).is_file() else None for name in names}


def record(planned: ImagePlan, image: BuiltImage, proven: Proof | None, reports: Path) -> None:
    """Write `<variant>.build.json`: what the image was made from and what its proof showed, if any."""
    parts = {"image": encode(image), "inputs": encode(planned.resolved), "proof": proven and encode(proven)}
    data = {"schema_version": 1, **parts}
    write_text(reports / f"{image.variant}.build.json", json.dumps(data, indent=1) + "\n")


def keep(
    workplace: Workplace, images: Mapping[str, WrittenImage], proofs: Mapping[str, Proof | None]
) -> None:
    """Name the images in the layout of the state directory, with what was proved of them.

    Raises as `write_text` does.
    """
    said = {name: {f"{LABEL}.proof": _said(proof)} for name, proof in proofs.items()}
    workplace.layers.name(images, said)


def keep_unproved(workplace: Workplace, images: Mapping[str, WrittenImage], variant: str) -> None:
    """Name an image that failed its proof in that layout, to be looked at. Raises as `write_text` does."""
    if variant in images:
        name = proof.unproved(variant)
        workplace.layers.name({name: images[variant]}, {name: {f"{LABEL}.proof": "failed"}})


def _said(proof: Proof | None) -> str:
    """What an annotation says of a proof: it isn't in the image, whose digest is the same without one."""
    return f"torch {proof.torch_version} computes" if proof else "not proved"


def name_all(
    workplace: Workplace, names: Sequence[tuple[BuiltImage, Sequence[Reference]]], engine: Engine
) -> None:
    """Give the images their names, all of them or none, and report names taken from images of others.

    Raises as `buildtool.engine.tags.move_tags` does.
    """
    moves = [(image.image_id, name) for image, own in names for name in own]
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
    for name, content in payload.payload_files().items():
        path = context / "payload" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
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


def built_text(
    plans: Sequence[ImagePlan], images: Sequence[BuiltImage], proofs: Sequence[Proof | None]
) -> str:
    """A table of where each image came from and what its proof showed, and why other sources weren't used."""
    rows = [
        (
            image.ref,
            image.digest[:19],
            f"{planned.resolved.base.origin}: {planned.resolved.base.name}",
            *(_shown(proof, planned.resolved) if proof else _promised(planned.resolved)),
        )
        for planned, image, proof in zip(plans, images, proofs, strict=True)
    ]
    headers = ("image", "manifest digest", "base", "torch", "python", "rocminfo")
    notes = [
        f"  {planned.variant.name}: skipped {note}" for planned in plans for note in planned.resolved.notes
    ]
    return "\n".join([text_table(headers, rows), *map(terminal, notes)])


def _shown(proof: Proof, resolved: Resolved) -> tuple[str, str, str]:
    torch = f"{proof.torch_version} ({proof.torch_build.value}, from {resolved.torch_source})"
    return torch, proof.python, proof.rocminfo


def _promised(resolved: Resolved) -> tuple[str, str, str]:
    torch = f"{resolved.torch_version or resolved.torch_build.value} (not proved)"
    return torch, f"{resolved.python} (not proved)", "not proved"


def audited_text(rows: "Sequence[SummaryRow]") -> str:
    """A table of the images: bytes, budget, largest finding."""
    headers = ("image", "torch build", "layers", "unpacked", "compressed", "budget", "biggest finding")
    return text_table(headers, [astuple(row) for row in rows])
