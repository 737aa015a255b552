"""`weir prune`: take GPU code for other cards out of a directory tree, a file or an image."""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from buildtool.audit.audit import audit_image, progress_lines
from buildtool.audit.claims import FOREIGN_CODE, FOREIGN_FILES
from buildtool.audit.options import AuditOptions
from buildtool.build.workplace import default_workplace
from buildtool.core.errors import ConfigError, DataError, Exit
from buildtool.core.files import ARCHIVE_NAME, PathKind, kind_of_path, looks_like_file, path_or_name
from buildtool.core.progress import ProgressLog
from buildtool.engine.client import Engine
from buildtool.gpucode.plan import PrunePlan
from buildtool.gpucode.source import prefix_errors
from buildtool.gpucode.target import (
    TargetId,
    known_targets,
    parse_targets,
    served_targets,
    target_of_override,
)
from buildtool.gpucode.used import Used
from buildtool.keep.keep_list import KeepList, read_keep_list
from buildtool.prune import images
from buildtool.prune.manifest import FILE_NAME, TreeResult, journal
from buildtool.prune.trees import keys_below, prune_file, prune_tree, sizes_text
from probes.core.output import echo, flag, option, progress
from probes.core.quoting import command, terminal
from probes.core.units import counted, decimal_bytes

_NOTHING_FOREIGN = "there is no code for other cards in it"
COMPRESS_VERSION = 2  # the oldest that carries its own length; HIP runtimes of ROCm 6.2 and later read it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "path",
        type=path_or_name,
        metavar="TREE|FILE|IMAGE",
        help="directory, library or bundle, or an image's name",
    )
    option(parser, "--targets", "GFX[,GFX...]", "cards to keep code for, e.g. gfx906,gfx1100")
    option(
        parser,
        "--hsa-override",
        "X.Y.Z",
        "keep the code that this HSA_OVERRIDE_GFX_VERSION needs, e.g. 10.3.0",
    )
    option(
        parser, "--out", "PATH", "for a file: write the result here, and leave the original unchanged", Path
    )
    parser.add_argument(
        "--compress",
        action="store_const",
        const=COMPRESS_VERSION,
        help=f"write bundles compressed (CCOB {COMPRESS_VERSION}), for runtimes that can read them",
    )
    parser.add_argument(
        "--compress-version",
        dest="compress",
        type=int,
        choices=(1, 2, 3),
        metavar="VERSION",
        help="compress in another version of CCOB: 1, 2 or 3",
    )
    option(
        parser,
        "--manifest",
        "FILE",
        f"for a tree: list here what was removed (default: TREE/{FILE_NAME})",
        Path,
    )
    option(
        parser,
        "--tag",
        "REF",
        "for an image: the pruned copy's name (default: the image's own, with the targets as tag)",
    )
    flag(
        parser,
        "--strip",
        "remove what no running program loads, too: symbol tables, debug information, gaps between segments; "
        "of a tree static libraries and second builds of libraries that no file names",
    )
    option(
        parser,
        "--keep",
        "FILE",
        "for a tree: also remove CUDA code that no run of this keep-list loaded: weir observe --gpu-code "
        "(default: none)",
        Path,
    )
    flag(parser, "--dry-run", "show what would be removed and change nothing")


def run(args: argparse.Namespace) -> int:
    """Prune; 1 when libraries of a tree or an image were refused and left whole."""
    override = str(target_of_override(args.hsa_override)) if args.hsa_override else ""
    targets = parse_targets(f"{args.targets or ''},{override}")
    path = Path(args.path)
    kind = kind_of_path(path)
    if kind is PathKind.DIRECTORY:
        return int(_run_tree(path, args, targets))
    if kind is PathKind.FILE:
        return int(_run_file(path, args, targets))
    if kind is not PathKind.NOTHING:
        raise DataError(
            f"{path} is {kind.value}",
            "give a regular file, a directory or the name of an image: only those are pruned",
        )
    if looks_like_file(args.path):
        raise DataError(
            f"there is no file or directory {args.path}",
            "check the path; images that there are: docker images",
        )
    return int(_run_image(args, targets))


def _refuse_options(args: argparse.Namespace, kind: str, *names: str) -> None:
    """Raise ConfigError for an option that doesn't apply to this kind of input."""
    for name in names:
        if getattr(args, name):
            raise ConfigError(
                f"--{name} isn't for {kind}", "leave it out; prune --help lists which option is for what"
            )


def _run_file(path: Path, args: argparse.Namespace, targets: tuple[TargetId, ...]) -> Exit:
    _refuse_options(args, "a file", "manifest", "tag", "keep")
    if ARCHIVE_NAME.search(path.name):
        raise ConfigError(f"{path} is an archive", "unpack or install it, and prune the resulting directory")
    with prefix_errors(path):
        plan = prune_file(
            path, targets, out=args.out, compress=args.compress, strip=args.strip, dry_run=args.dry_run
        )
    echo(_describe(path, plan, dry_run=args.dry_run))
    if args.out and not plan.changed and not args.dry_run:
        echo(f"{args.out}: a copy of it")
    return Exit.OK


def _describe(path: Path, plan: PrunePlan, *, dry_run: bool) -> str:
    name = terminal(str(path))
    if not plan.changed:
        held = ", ".join(sorted(plan.kept_bytes))
        return f"{name}: nothing to cut; {f'it holds code for {held}' if held else _NOTHING_FOREIGN}"
    verb = "would shrink from" if dry_run else "shrank from"
    return (
        f"{name}: {verb} {sizes_text(plan)} ({plan.bytes_after / plan.bytes_before:.1%});"
        f" kept {', '.join(sorted(plan.kept_bytes))};"
        f" cut {', '.join(sorted(plan.removed_bytes)) or 'nothing'}"
    )


def _run_tree(path: Path, args: argparse.Namespace, targets: tuple[TargetId, ...]) -> Exit:
    _refuse_options(args, "a directory", "tag")
    if args.out:
        copy = command("cp", "-a", "--", str(path), str(args.out))
        raise ConfigError("--out is for one file", f"copy the tree first: {copy}")
    manifest = args.manifest or path / FILE_NAME
    keep = _loaded(args.keep) if args.keep else None
    with ExitStack() as stack:
        stack.enter_context(prefix_errors(path))
        written = None if args.dry_run else stack.enter_context(journal(manifest, path, targets))
        result = prune_tree(
            path,
            targets,
            compress=args.compress,
            used=Used.of(keep.gpu_code, keys_below(path), keep.generated_code) if keep else None,
            strip=args.strip,
            dry_run=args.dry_run,
            progress=progress,
            announce=written.announce if written else lambda _changes: None,
        )
        if written:
            written.finish(result)
    echo(_summary(path, result, dry_run=args.dry_run))
    return Exit.FINDINGS if result.refused else Exit.OK


def _loaded(path: Path) -> KeepList:
    """A keep-list with keys of GPU code. Raises DataError for one without any."""
    keep = read_keep_list(path)
    if not keep.gpu_code:
        raise DataError(
            f"{terminal(str(path))} has no GPU code that a run loaded",
            "add it: weir observe IMAGE --gpu-code --gpus --keep FILE",
        )
    return keep


def _run_image(args: argparse.Namespace, targets: tuple[TargetId, ...]) -> Exit:
    _refuse_options(args, "an image", "out", "manifest", "compress", "strip", "keep")
    if args.dry_run:
        return _preview_image(args.path, targets)
    ref = args.path
    with ProgressLog() as log:
        state = default_workplace(log.line).state
        made = images.prune_image(ref, targets, args.tag, engine=Engine(), state=state, progress=log.line)
    if made is None:
        echo(f"{ref}: nothing to cut; beside what is listed above, {_NOTHING_FOREIGN}")
        return Exit.OK
    done = made.result
    echo("\n".join(_by_target(done)))
    echo(
        f"{made.name} ({made.image_id[:19]}): {decimal_bytes(done.saved_bytes)} less than {ref}"
        f"{_zeros_text(done)};"
        f" {_counts(done)}; {made.proof}"
    )
    return Exit.FINDINGS if done.refused else Exit.OK


def _preview_image(ref: str, targets: tuple[TargetId, ...]) -> Exit:
    """Print what would be removed, by the audit's figures; nothing is made."""
    with ProgressLog() as log:
        names = tuple(map(str, targets))
        tick = progress_lines(log.line, ref)
        report = audit_image(ref, engine=Engine(), options=AuditOptions(targets=names), tick=tick)
    had = known_targets(name for key in report.gpu_code.by_target for name in key.split("+"))
    with prefix_errors(ref):
        served_targets(had, targets, strict=True)
    before = report.totals.unpacked_bytes
    saved = sum(row.bytes for row in report.findings if row.id in (FOREIGN_FILES, FOREIGN_CODE))
    there = ", ".join(map(str, sorted(had)))
    echo(
        f"{ref}: would save {decimal_bytes(saved)} of {decimal_bytes(before)} unpacked;"
        f" kept for {', '.join(names)}; it has GPU code for {there}"
    )
    return Exit.OK


def _summary(root: Path, result: TreeResult, *, dry_run: bool) -> str:
    name = terminal(str(root))
    if not (result.changed or result.refused or result.untouched):
        return f"{name}: nothing to cut; {_NOTHING_FOREIGN}"
    verb = "would save" if dry_run else "saved"
    totals = (
        f"{name}: {verb} {decimal_bytes(result.saved_bytes)}{_zeros_text(result)}; {_counts(result)};"
        f" kept for {', '.join(result.targets)}"
    )
    return "\n".join([*_by_target(result), totals])


def _zeros_text(result: TreeResult) -> str:
    """The bytes that became zeros where they are; empty without any."""
    return f", and {decimal_bytes(result.zeroed_bytes)} are zeros now" if result.zeroed_bytes else ""


def _by_target(result: TreeResult) -> Iterator[str]:
    """A line for each card: bytes of files removed, and unpacked bytes of code."""
    in_files: Counter[str] = Counter()
    in_libraries: Counter[str] = Counter()
    for file in result.deleted:
        in_files[", ".join(file.targets)] += file.freed_bytes
    for library in result.pruned:
        in_libraries.update(library.removed_bytes)
    for target in sorted({*in_files, *in_libraries}):
        files, code = (decimal_bytes(totals[target]) for totals in (in_files, in_libraries))
        yield f"  {target or 'no card'}: {files} in files, {code} of code in libraries"


def _counts(result: TreeResult) -> str:
    """How many files and libraries were deleted, cut, left whole or untouched."""
    return (
        f"{counted(len(result.deleted), 'file')} for other cards,"
        f" {counted(len(result.pruned), 'library')} cut, {len(result.refused)} left whole,"
        f" {len(result.untouched)} untouched with code for other cards"
    )
