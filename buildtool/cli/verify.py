"""`weir verify REF|DIR --key FILE`: whether a key signed what is attached to an image, about this image."""

import argparse
from pathlib import Path

from buildtool.audit.audit import file_bytes, reading_shown
from buildtool.core.errors import Exit
from buildtool.core.files import PathKind, kind_of_path, looks_like_file, path_or_name
from buildtool.engine.reference import parse_reference
from buildtool.image.reader import parse_platform
from buildtool.sbom.keys import PublicKey
from buildtool.sbom.verify import verify_archive, verify_registry
from probes.core.output import echo, error, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "source",
        type=path_or_name,
        metavar="REF|LAYOUT-DIR",
        help="name in a registry, which is asked for it; or OCI layout, a directory or an archive of it",
    )
    parser.add_argument(
        "--key",
        metavar="FILE",
        type=Path,
        required=True,
        help="public key in PEM (Ed25519) of whom the image has to be from",
    )
    option(parser, "--image", "NAME", "which image of a layout that holds several")
    option(parser, "--platform", "OS/ARCH", "which platform of a layout for several (default: this host's)")


def run(args: argparse.Namespace) -> int:
    """Verify one image; raises where it isn't what the key says."""
    key = PublicKey.read(args.key)
    path = Path(args.source)
    place = kind_of_path(path)
    with reading_shown(args.source, "verify") as tick_of:
        if place is not PathKind.NOTHING or looks_like_file(args.source):
            platform = parse_platform(args.platform) if args.platform else None
            tick = tick_of(file_bytes(path, place))
            verified = verify_archive(path, key, image=args.image, platform=platform, tick=tick)
        else:
            verified = verify_registry(parse_reference(args.source), key, tick=tick_of(None))
    for note in verified.notes:
        error(f"note: {note}")
    echo(f"{verified.digest} is verified: every layer is whole, and the key {key.key_id[:16]} signed")
    for kind, digest in verified.statements.items():
        echo(f"  {kind:12} {digest}")
    echo(f"about {', '.join(verified.names)}")
    return int(Exit.OK)
