"""`weir sbom IMAGE|ARCHIVE|LAYOUT`: what an image is made of, as CycloneDX or SPDX."""

import argparse
from pathlib import Path

from buildtool.audit.audit import read_source
from buildtool.audit.options import AuditOptions
from buildtool.build.lockfile import Lock
from buildtool.cli.arguments import add_source_arguments
from buildtool.core.errors import ConfigError, DataError, Exit
from buildtool.core.files import path_or_name, refuse_overwriting, write_text
from buildtool.core.model import LABEL
from buildtool.image.reader import parse_platform
from buildtool.sbom.binaries import inspect
from buildtool.sbom.documents import DOCUMENTS, render
from buildtool.sbom.inventory import image_name, take_inventory
from probes.core.output import error, option, write
from probes.core.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "source",
        type=path_or_name,
        metavar="IMAGE|ARCHIVE|LAYOUT-DIR",
        help="image by name, docker save archive, or OCI layout directory",
    )
    parser.add_argument(
        "--format",
        choices=tuple(DOCUMENTS),
        default="cyclonedx",
        help="what to print: CycloneDX 1.6 or SPDX 2.3, in JSON (default: %(default)s)",
    )
    option(parser, "--output", "FILE", "write the document to a file instead of printing it", Path)
    option(
        parser,
        "--lock",
        "FILE",
        "lock file of the build that made the image: adds the digests of its wheels (default: none)",
        Path,
    )
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print or write one document."""
    if args.output:
        inputs = [args.source, args.lock] if args.lock else [args.source]
        refuse_overwriting([args.output], inputs=inputs)
    if args.lock and not args.lock.is_file():
        raise DataError(f"there is no lock file {args.lock}", "name the one that `weir build` wrote")
    options = AuditOptions(
        image=args.image, platform=parse_platform(args.platform) if args.platform else None
    )
    locked = _lock(args.lock).entries if args.lock else {}
    contents = read_source(args.source, options, pull=not args.no_pull, inspect=inspect)
    entry = locked.get(contents.config.labels.get(f"{LABEL}.variant", ""))
    inventory = take_inventory(
        contents,
        name=image_name(contents, args.source),
        created=contents.config.created,
        wheels=entry.wheels if entry else (),
    )
    text = render(inventory, args.format)
    if args.output:
        write_text(args.output, text)
    else:
        write(text)
    for note in inventory.notes:
        error(f"note: {note}")
    libraries = sum(len(each.parts) for each in inventory.components)
    error(
        f"{counted(len(inventory.components), 'component')}, {counted(libraries, 'library')} inside wheels; "
        f"{counted(inventory.n_files, 'file')}, of which no package owns {len(inventory.unowned)}"
    )
    return int(Exit.OK)


def _lock(path: Path) -> Lock:
    """The lock file. Raises DataError for another file, which nobody is told to remove."""
    try:
        return Lock.load(path)
    except ConfigError as error:
        raise DataError(error.message, "name the one that `weir build` wrote, or leave out --lock") from error
