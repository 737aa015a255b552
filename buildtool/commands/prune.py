"""`buildtool prune`: take GPU code for other cards out of a directory tree, a file or an image."""

import argparse
import sys
from pathlib import Path

from buildtool.commands.build import workplace
from buildtool.errors import ConfigError, DataError, Exit
from buildtool.gpucode.manifest import FILE_NAME, write_manifest
from buildtool.gpucode.prune import PrunePlan
from buildtool.gpucode.rewrite import prune_file
from buildtool.gpucode.target import TargetId, parse_targets, target_of_override
from buildtool.gpucode.tree import TreeResult, prune_tree
from buildtool.progress import Progress
from probes.units import decimal_bytes

COMPRESS_VERSION = 2  # the oldest that carries its own length; HIP runtimes of ROCm 6.2 and later read it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "path",
        type=Path,
        metavar="TREE|FILE|IMAGE",
        help="a directory, a library or bundle, or an image's name",
    )
    parser.add_argument(
        "--targets", required=True, metavar="GFX[,GFX...]", help="cards to keep code for: gfx906,gfx1100"
    )
    parser.add_argument(
        "--hsa-override", metavar="X.Y.Z", help="also keep what this HSA_OVERRIDE_GFX_VERSION needs"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="for a file: write here, leave it as it is")
    parser.add_argument(
        "--compress",
        nargs="?",
        type=int,
        choices=(1, 2, 3),
        const=COMPRESS_VERSION,
        metavar="VERSION",
        help=f"write bundles compressed (CCOB 1 to 3, {COMPRESS_VERSION} if not said), for runtimes that can",
    )
    parser.add_argument(
        "--manifest", type=Path, metavar="FILE", help=f"for a tree: list what went (TREE/{FILE_NAME})"
    )
    parser.add_argument(
        "--tag", metavar="REF", help="for an image: the pruned copy's name (its own, with the targets as tag)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go and change nothing")


def run(args: argparse.Namespace) -> int:
    """Prune; 1 when libraries of a tree were refused and left whole."""
    targets = parse_targets(args.targets)
    if args.hsa_override:
        targets = tuple(sorted({*targets, target_of_override(args.hsa_override)}))
    if args.path.is_dir():
        return int(_run_tree(args, targets))
    if not args.path.exists() and not str(args.path).startswith((".", "/", "~")):
        return int(_run_image(args, targets))
    if not args.path.is_file():
        raise DataError(f"{args.path} is neither a directory nor a file")
    if args.manifest:
        raise ConfigError("--manifest is for a tree", "leave it out")
    plan = prune_file(args.path, targets, out=args.out, compress=args.compress, dry_run=args.dry_run)
    print(_describe(args.path, plan, dry_run=args.dry_run))
    return int(Exit.OK)


def _describe(path: Path, plan: PrunePlan, *, dry_run: bool) -> str:
    if not plan.changed:
        return f"{path}: nothing to cut"
    verb = "would go from" if dry_run else "went from"
    return (
        f"{path}: {verb} {decimal_bytes(plan.bytes_before)} to {decimal_bytes(plan.bytes_after)}"
        f" ({plan.bytes_after / plan.bytes_before:.1%});"
        f" kept {', '.join(sorted(plan.kept_bytes))};"
        f" cut {', '.join(sorted(plan.removed_bytes)) or 'nothing'}"
    )


def _run_tree(args: argparse.Namespace, targets: tuple[TargetId, ...]) -> Exit:
    if args.out:
        raise ConfigError("--out is for one file", f"copy the tree first: cp -a {args.path} {args.out}")
    result = prune_tree(
        args.path,
        targets,
        compress=args.compress,
        dry_run=args.dry_run,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if result.changed and not args.dry_run:
        write_manifest(args.manifest or args.path / FILE_NAME, result)
    print(_summary(args.path, result, dry_run=args.dry_run))
    return Exit.FINDINGS if result.refused else Exit.OK


def _run_image(args: argparse.Namespace, targets: tuple[TargetId, ...]) -> Exit:
    from buildtool import imageprune, provision

    if args.out or args.manifest or args.dry_run or args.compress:
        raise ConfigError(
            "--out, --manifest, --compress and --dry-run are for trees and files",
            f"say what a prune would save: python -m buildtool audit {args.path} --targets {args.targets}",
        )
    ref = str(args.path)
    tag = args.tag or imageprune.default_tag(ref, targets)
    with Progress() as progress:
        say = progress.say
        engine, state = provision.ensure_engine(say), workplace(say).state
        made = imageprune.prune_image(ref, targets, tag, engine=engine, state=state, say=say)
    if made is None:
        print(f"{ref}: nothing to cut")
        return Exit.OK
    done = made.result.done
    print(
        f"{made.ref} ({made.digest[:19]}): {decimal_bytes(done.saved_bytes)} less than {ref};"
        f" {len(done.deleted)} files for other cards, {len(done.pruned)} libraries cut,"
        f" {len(done.refused)} refused; {made.proof}"
    )
    return Exit.FINDINGS if done.refused else Exit.OK


def _summary(root: Path, result: TreeResult, *, dry_run: bool) -> str:
    verb = "would save" if dry_run else "saved"
    lines = [f"refused {item.path}: {item.reason}" for item in result.refused]
    lines.append(
        f"{root}: {verb} {decimal_bytes(result.saved_bytes)}; {len(result.deleted)} files for other cards,"
        f" {len(result.pruned)} libraries cut, {len(result.refused)} refused;"
        f" kept for {', '.join(result.targets)}"
    )
    return "\n".join(lines)
