"""`weir build`: what `make images` does, from variants.yaml to proved images and their audit."""

import argparse
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buildtool.build import conda, pipeline, publish, squashfs
from buildtool.build.layer_store import require_layout_or_nothing
from buildtool.build.plan import BuildPlan
from buildtool.build.runtimes import LocalRunner, NoRuntime
from buildtool.build.workplace import Workplace, default_workplace
from buildtool.cli.arguments import (
    BuildOptions,
    add_container_arguments,
    add_variant_arguments,
    build_options,
    extra_names,
    require_platform,
)
from buildtool.core.errors import ConfigError, EngineUnavailable, Exit, ProofFailed
from buildtool.core.files import PathKind, kind_of_path, relative_to_cwd, require_writable
from buildtool.core.model import BuiltImage
from buildtool.core.progress import Progress, ProgressLog
from buildtool.core.shipped import reports_directory
from buildtool.engine import provision, registry
from buildtool.engine.client import Engine
from buildtool.engine.proof import Proof
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.image.layer_writer import COMPRESSIONS
from buildtool.image.written import Referrer, WrittenImage
from buildtool.keep.keep_list import KeepList, is_line, merge_into, read_keep_list
from probes.core.files import sweep_partials
from probes.core.output import echo, flag, option
from probes.core.quoting import command, terminal
from probes.core.units import counted, decimal_bytes

if TYPE_CHECKING:
    from buildtool.audit.audit import Saver
    from buildtool.sbom.keys import PrivateKey

# options that write an image, or what is in it, beside what an engine gets
OUTPUTS = (
    ("--layout", "DIR", "write the image as an OCI layout, for podman, skopeo, apptainer and others"),
    (
        "--sqsh",
        "FILE",
        "write the image as a squashfs file, for enroot and charliecloud (needs squashfs-tools)",
    ),
    ("--conda", "FILE", "write a conda environment with the image's versions (environment.yml)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_variant_arguments(parser)
    flag(parser, "--update-lock", "look for newer inputs and pin them in the lock file")
    flag(parser, "--no-cache", "build every layer from nothing")
    flag(parser, "--no-audit", "don't audit the images")
    option(
        parser,
        "--reports",
        "DIR",
        "folder for the audits (default: reports/images of the checkout or, where weir was installed, of its "
        "state directory)",
        Path,
    )
    parser.add_argument(
        "--tag",
        metavar="NAME:TAG",
        action="append",
        default=[],
        help="another name for the finished image; {variant} in it means the variant's name; may be repeated",
    )
    flag(parser, "--push", "push the names of --tag, if no image is over its budget")
    flag(
        parser,
        "--attest",
        "attach bills of materials (CycloneDX, SPDX) and provenance (SLSA) to what --layout and --push write",
    )
    option(parser, "--sign", "KEY", "sign these with a private key in PEM (Ed25519); implies --attest", Path)
    for name, metavar, text in OUTPUTS:
        option(parser, name, metavar, f"{text}; {{variant}} in it means the variant's name", Path)
    slim = parser.add_mutually_exclusive_group()
    option(
        slim,
        "--keep",
        "FILE",
        "write a slim image: the files of this keep-list, which weir observe writes, and their margin; if it "
        "names CUDA code, without the rest of that; {variant} in it means the variant's name",
        Path,
    )
    flag(
        slim,
        "--undo",
        "build the whole image again, and check that it is the one the slim image was made from",
    )
    parser.add_argument(
        "--restore",
        metavar="MODULE|PATH",
        action="append",
        default=[],
        help="with --keep: add a module, file or directory of the image to the keep-list; may be repeated",
    )
    option(
        parser,
        "--workload",
        "PROGRAM",
        "with --keep: program on this host that the slim image has to pass, as with weir observe",
    )
    add_container_arguments(parser, "with --workload: ")
    parser.add_argument(
        "--compression",
        choices=[*COMPRESSIONS],
        default="zstd",
        metavar="KIND",
        help="how layers are compressed: zstd, gzip (for readers without zstd, such as umoci 0.4) or none "
        "(default: zstd)",
    )
    option(parser, "--platform", "OS/ARCH", "refuse to build unless this is the host's platform")
    flag(
        parser,
        "--verbose",
        "print every line of BuildKit, pip, mmdebstrap and apt, not only the important ones",
    )
    flag(parser, "--yes", "install a missing engine without asking")


def run(args: argparse.Namespace) -> int:
    """Build, prove, audit; 1 when an image is over its budget."""
    with ProgressLog() as log:
        return int(_build(args, log))


def _build(args: argparse.Namespace, log: ProgressLog) -> Exit:
    progress = log.line
    # a mistake in the command is reported before an engine is installed
    options = build_options(args, progress)
    extra = _extra_names(args, options)
    outputs = _outputs(args, options)
    key = _signing_key(args, options, progress)
    keeps = _keeps(args, options)
    if args.platform:
        require_platform(args.platform, "")
    reports = args.reports or relative_to_cwd(reports_directory())
    require_writable(reports, "choose another directory for the reports: --reports DIR")
    workplace = default_workplace(progress, args.catalog, verbose=args.verbose, compression=args.compression)
    engine = _engine(args, options, progress)
    if args.platform and engine:
        require_platform(args.platform, engine.info().machine)
    wholes = _wholes(options, workplace) if args.undo else {}
    with ExitStack() as held:
        made = _make(args, options, workplace, engine=engine, held=held, keeps=keeps)
        _require_wholes(made, wholes)
        plan, images = made.plan, made.images
        pairs = list(zip(plan.images, images, strict=True))
        proofs = _proofs(made, workplace, engine)
        _prove_slim(args, images, keeps, workplace, engine)
        for (planned, image), proof in zip(pairs, proofs, strict=True):
            pipeline.record(planned, image, proof, reports)
        rows = (
            []
            if args.no_audit
            else [
                pipeline.audit(workplace, planned, image, made.source(image, workplace, engine), reports)
                for planned, image in pairs
            ]
        )
        over_budget = {row.ref for row in rows if row.verdict == "fail"}
        own_names = [(image, (parse_new_name(image.ref),)) for image in images]
        others = [(image, extra[image.variant]) for image in images if image.ref not in over_budget]
        pipeline.keep(workplace, made.written, dict(zip((i.variant for i in images), proofs, strict=True)))
        if engine:
            pipeline.name_all(workplace, [*own_names, *others], engine)
        echo(pipeline.built_text(plan.images, images, proofs))
        for image, names in others if engine else ():
            for name in names:
                echo(f"{image.ref} is also {name}")
        if rows:
            pages = ", ".join(str(reports / f"{image.variant}.html") for image in images)
            echo(f"\n{pipeline.audited_text(rows)}\nwhere the bytes are, as a map for a browser: {pages}")
        if args.tag and over_budget:
            echo(f"no name of --tag was given to what is over its budget: {', '.join(sorted(over_budget))}")
        attached = _attached(args, made, workplace, key)
        for output in outputs:
            echo(_written(output, made, workplace, attached.get(output.variant, ())))
        if args.push and over_budget:
            echo(f"nothing was pushed: {', '.join(sorted(over_budget))} over budget")
        elif args.push:
            _push(made, extra, workplace, engine=engine, verbose=args.verbose, attached=attached)
    where = "" if args.no_audit else f"reports are in {reports}/, "
    progress(f"{where}inputs are pinned in {relative_to_cwd(workplace.lock)}; done in {log.seconds:.1f} s")
    return Exit.FINDINGS if over_budget else Exit.OK


def _engine(args: argparse.Namespace, options: BuildOptions, progress: Progress) -> Engine | None:
    """The engine; None where none answers, and what is asked for can be made without one."""
    dockerfiles = [variants[0].name for variants in options.candidates if variants[0].dockerfile]
    elsewhere = args.push or any(getattr(args, _attribute(name)) for name, _, _ in OUTPUTS)
    if dockerfiles or not elsewhere:
        return provision.ensure_engine(progress, assume_yes=args.yes, verbose=args.verbose)
    try:
        return Engine()
    except EngineUnavailable as error:
        progress(f"{error.message}; writing images without one")
        return None


def _proofs(made: "Made", workplace: Workplace, engine: Engine | None) -> list[Proof | None]:
    """What each image's proof showed, None where nothing here can run it. Raises ProofFailed."""
    local = LocalRunner(
        {image.digest: image for image in made.written.values()}, workplace.layers, workplace.state
    )
    proofs: list[Proof | None] = []
    for planned, image in zip(made.plan.images, made.images, strict=True):
        try:
            written = made.written.get(image.variant)
            below = written.below if written else ""
            proofs.append(pipeline.prove(workplace, planned, image, engine or local, below=below))
        except ProofFailed:
            pipeline.keep_unproved(workplace, made.written, image.variant)
            raise
        except NoRuntime as error:
            workplace.progress(f"{image.variant}: not proved: {error.message} ({error.hint})")
            proofs.append(None)
    return proofs


def _keeps(args: argparse.Namespace, options: BuildOptions) -> dict[str, tuple[Path, KeepList]]:
    """The keep-lists by variant, with what --restore adds, which is written once it was proved.

    Raises ConfigError, DataError.
    """
    for name in ("restore", "workload") if not args.keep else ():
        if getattr(args, name):
            raise ConfigError(f"--{name} is for slim images", "name the keep-list: --keep FILE")
    if (args.env or args.volume) and not args.workload:
        raise ConfigError("--env and --volume are for a workload", "name it: --workload PROGRAM")
    if args.workload:
        from buildtool.observe.runs import environments, mounts, words_of

        words_of(args.workload)
        environments(args.env)
        mounts(args.volume)
    keeps: dict[str, tuple[Path, KeepList]] = {}
    for candidates in options.candidates if args.keep else ():
        variant = candidates[0]
        path = Path(str(args.keep).replace("{variant}", variant.name))
        if variant.dockerfile:
            raise ConfigError(
                f"{variant.name} is made by a Dockerfile, --keep is for images that are written here",
                "name other variants",
            )
        if any(path == other for other, _ in keeps.values()):
            raise ConfigError(f"{path} would be the keep-list of two variants", "write {variant} in its name")
        for line in args.restore:
            if not is_line(line):
                raise ConfigError(
                    f"--restore {terminal(line)} is neither a path nor a module", "write /opt/... or a.b"
                )
        if args.restore and kind_of_path(path) not in (PathKind.FILE, PathKind.NOTHING):
            raise ConfigError(
                f"{path} is {kind_of_path(path).value}: --restore adds to a file", "name a file"
            )
        keeps[variant.name] = path, read_keep_list(path).restoring(args.restore)
    return keeps


def _wholes(options: BuildOptions, workplace: Workplace) -> dict[str, str]:
    """The digests of the images that slim ones were made from, by variant. Raises DataError."""
    from buildtool.build.slim_image import whole_digest

    names = {candidates[0].name: candidates[0].ref for candidates in options.candidates}
    return {name: whole_digest(workplace.layers.labels(name), ref) for name, ref in names.items()}


def _require_wholes(made: "Made", wholes: Mapping[str, str]) -> None:
    """Raises ProofFailed where an image isn't the one that the slim image was made from."""
    for image in made.images:
        if image.digest != wholes.get(image.variant, image.digest):
            raise ProofFailed(
                f"{image.ref} stays slim: it was made from {wholes[image.variant]}, and its inputs make "
                f"{image.digest} now",
                "to have that instead, leave --undo out",
            )


def _prove_slim(
    args: argparse.Namespace,
    images: Sequence[BuiltImage],
    keeps: Mapping[str, tuple[Path, KeepList]],
    workplace: Workplace,
    engine: Engine | None,
) -> None:
    """Run the whole workload on slim images, if there is one, then keep what --restore adds to their lists.

    Raises as `observe.runs.prove` does.
    """
    from buildtool.observe.runs import Workload, environments, mounts, prove

    if args.workload and engine is None:
        raise ConfigError(
            "a workload needs an engine, and none answers", "start one, or leave --workload out"
        )
    for image in images if args.workload else ():
        assert engine  # which was asked for above
        workplace.progress(f"{image.variant}: proving it with the workload")
        workload = Workload(args.workload, environments=environments(args.env), volumes=mounts(args.volume))
        prove(engine, image.image_id, workload, progress=workplace.progress)
    for path, keep in keeps.values() if args.restore else ():
        merge_into(path, keep.lines)


def _attribute(name: str) -> str:
    return name.removeprefix("--")


@dataclass(frozen=True)
class Output:
    """A file or directory that an option asks for, of one variant."""

    option: str
    variant: str
    path: Path


def _outputs(args: argparse.Namespace, options: BuildOptions) -> list[Output]:
    """What --layout, --sqsh and --conda ask for. Raises ConfigError, DataError, EnvironmentMissing."""
    outputs: list[Output] = []
    for name, metavar, _ in OUTPUTS:
        text = str(getattr(args, _attribute(name)) or "")
        for candidates in options.candidates if text else ():
            variant = candidates[0]
            if variant.dockerfile:
                raise ConfigError(
                    f"{name} can't write {variant.name}, which BuildKit makes by a Dockerfile",
                    f"save it from the engine: {command('docker', 'save', variant.ref)}",
                )
            path = Path(text.replace("{variant}", variant.name))
            if any(path == other.path for other in outputs):
                raise ConfigError(
                    f"two things would be written to {path}",
                    f"write {{variant}} in the name: {name} {text}-{{variant}}",
                )
            outputs.append(Output(name, variant.name, path))
            require_writable(path.absolute().parent, f"name another place: {name} {metavar}")
            sweep_partials(path.absolute().parent)
            if name == "--layout":
                require_layout_or_nothing(path)
    if args.sqsh:
        squashfs.require_program()
    return outputs


def _signing_key(args: argparse.Namespace, options: BuildOptions, progress: Progress) -> "PrivateKey | None":
    """The key of --sign. Raises ConfigError where nothing is written that could have attestations."""
    if not (args.attest or args.sign):
        return None
    name = "--sign" if args.sign else "--attest"
    if not (args.layout or args.push):
        raise ConfigError(
            f"{name} attaches to what leaves this host, and nothing does",
            f"say where to: {name} with --layout DIR, or with --push --tag REGISTRY/NAME:TAG",
        )
    if baked := [variants[0].name for variants in options.candidates if variants[0].dockerfile]:
        raise ConfigError(
            f"{name} can't speak for {', '.join(baked)}, which BuildKit makes by a Dockerfile",
            f"build the others alone; for an inventory of this one: {command('weir', 'sbom', baked[0])}",
        )
    if not args.sign:
        return None
    from buildtool.sbom.keys import PrivateKey

    key = PrivateKey.read(args.sign)
    mode = args.sign.stat().st_mode
    if stat.S_ISREG(mode) and mode & 0o077:
        progress(f"warning: other users can read the key: {command('chmod', '600', str(args.sign))}")
    return key


def _attached(
    args: argparse.Namespace, made: "Made", workplace: Workplace, key: "PrivateKey | None"
) -> dict[str, tuple[Referrer, ...]]:
    """What is attached to each variant's image; nothing unless it was asked for."""
    if not (args.attest or args.sign):
        return {}
    from buildtool.build.attestations import attestations

    return {
        planned.variant.name: attestations(
            workplace, planned, made.written[planned.variant.name], epoch=made.plan.epoch, key=key
        )
        for planned in made.plan.images
    }


def _written(output: Output, made: "Made", workplace: Workplace, attached: Sequence[Referrer] = ()) -> str:
    """Write one output, and what is said of it. Raises as its writer does."""
    image = made.written[output.variant]
    planned = next(each for each in made.plan.images if each.variant.name == output.variant)
    store, place = workplace.layers, terminal(str(output.path))
    match output.option:
        case "--layout":
            store.copy(image, output.variant, output.path, attached)
            said = f", with {counted(len(attached), 'attestation manifest')}" if attached else ""
            return f"{place} is the image {output.variant} as an OCI layout, {image.digest}{said}"
        case "--sqsh":
            squashfs.write_squashfs(
                image, output.path, store=store, epoch=made.plan.epoch, progress=workplace.progress
            )
            stored = decimal_bytes(output.path.stat().st_size)
            return f"{place} is the image {output.variant} as a squashfs file, {stored}"
        case _:
            conda.write_environment(planned.variant, planned.resolved, output.path)
            return f"{place} is {output.variant}'s Python environment, for: conda env create -f FILE"


@dataclass(frozen=True)
class Made:
    """What a build has made: the plan, its images in the plan's order, those that were written here."""

    plan: BuildPlan
    images: list[BuiltImage]
    written: dict[str, WrittenImage]  # by variant

    def source(self, image: BuiltImage, workplace: Workplace, engine: Engine | None) -> "Saver":
        """Where an image's archive can be read."""
        if engine and image.variant not in self.written:
            return engine
        return pipeline.Written(self.written[image.variant], workplace.layers)


def _make(
    args: argparse.Namespace,
    options: BuildOptions,
    workplace: Workplace,
    *,
    engine: Engine | None,
    held: ExitStack,
    keeps: Mapping[str, tuple[Path, KeepList]],
) -> Made:
    """The plan and its images, which an engine has under temporary names for as long as `held`."""
    with workplace.alone():
        plan = pipeline.make_plan(
            workplace,
            options.candidates,
            engine=engine,
            epoch=options.epoch,
            update_lock=args.update_lock,
            every_target=options.targets_given,
        )
        for image in plan.images if args.conda else ():
            conda.require_wheel(image.variant, image.resolved)
        held.enter_context(workplace.layers.in_use())
        written = pipeline.write(workplace, plan, anew=args.no_cache)
        for planned in plan.written:
            name = planned.variant.name
            if name in keeps:
                written[name] = pipeline.write_kept(
                    workplace, planned, written[name], keeps[name], epoch=plan.epoch, anew=args.no_cache
                )
        ids: dict[str, str] = {}
        if engine:
            prefix = held.enter_context(workplace.temporary_names(engine))
            ids = pipeline.load(workplace, written, prefix, engine=engine)
            pipeline.stage(workplace, plan)
            ids |= pipeline.bake(
                plan,
                prefix,
                engine=engine,
                progress=workplace.progress,
                no_cache=args.no_cache,
                verbose=args.verbose,
            )
    images = []
    for planned in plan.images:
        name = planned.variant.name
        digest = written[name].digest if name in written else ids[name]
        images.append(BuiltImage(name, planned.variant.ref, digest, ids.get(name, "")))
    return Made(plan, images, written)


def _extra_names(args: argparse.Namespace, options: BuildOptions) -> dict[str, tuple[Reference, ...]]:
    """The names of --tag by variant. Raises ConfigError for a --push without any."""
    variants = [candidates[0] for candidates in options.candidates]
    if args.push and not args.tag:
        own = parse_new_name(variants[0].ref)
        raise ConfigError(
            f"--push needs a name of yours to push: {own} would be {own.canonical}",
            "say where to: --push --tag REGISTRY/NAME:TAG",
        )
    return extra_names(args.tag, variants, options.all_variants)


def _push(
    made: Made,
    names: Mapping[str, Sequence[Reference]],
    workplace: Workplace,
    *,
    engine: Engine | None,
    verbose: bool,
    attached: Mapping[str, Sequence[Referrer]],
) -> None:
    """Push every name of every image, in order; the first that fails ends it, listed with the rest."""
    progress = workplace.progress
    left = [(image, name) for image in made.images for name in names[image.variant]]
    try:
        while left:
            image, name = left[0]
            progress(f"pushing {name}")
            if written := made.written.get(image.variant):
                pushed = publish.Pushed(workplace.state / "pushed")
                digest = publish.push(
                    written,
                    name,
                    store=workplace.layers,
                    pushed=pushed,
                    progress=progress,
                    referrers=attached.get(image.variant, ()),
                )
            else:
                assert engine  # which has made what wasn't written here
                digest = registry.push(
                    image.image_id, name, engine=engine, progress=progress, verbose=verbose
                )
            echo(f"pushed {name}{f'@{digest}' if digest else ''}")
            del left[0]
    finally:
        if left:
            echo(f"not pushed: {', '.join(str(name) for _, name in left)}")
