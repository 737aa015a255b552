"""Images in archives that have no index.json: docker's manifest.json, a lone manifest, or a config alone.

Without any list a config is enough: it names its layers by the digest of their content,
in order. An archive that names no config is refused with that reason.
"""

import posixpath
from collections.abc import Iterator, Sequence
from contextlib import suppress

from buildtool.audit.read.archive import Archive
from buildtool.audit.read.blob import Blob
from buildtool.audit.read.choice import (
    Called,
    Wanted,
    check_readable,
    choose,
    document,
    indexed,
    shown_name,
    with_unlisted_layers,
)
from buildtool.audit.read.contents import Attestations, ImageContents, Layer
from buildtool.audit.read.documents import (
    ImageConfig,
    Manifest,
    SavedImage,
    is_saved_list,
    parse_config,
    parse_index_or_manifest,
    parse_saved,
)
from buildtool.audit.read.openfile import FORMS
from buildtool.audit.tar.faults import MalformedDocument, MissingContent
from buildtool.audit.tar.limits import LIMITS, Limits
from buildtool.gpucode.links import normal_path

_NO_LISTS = "index.json and manifest.json are missing: the layers were found by the digests in the config"


def from_saved(archive: Archive, wanted: Wanted, limits: Limits = LIMITS) -> ImageContents:
    """The image of a manifest.json: docker's list of paths, or skopeo's `dir:`, which is one manifest."""
    text = document(archive.blob("manifest.json"), "manifest.json")
    if is_saved_list(text, place="manifest.json", limits=limits):
        rows = parse_saved(text, place="manifest.json", limits=limits)
    else:
        rows = (_as_saved(text, archive.paths(), limits),)
    if not rows:
        raise MissingContent("it names no image", place="manifest.json", hint=FORMS)
    images = calls(archive, rows)
    at = choose(wanted, images)[0]
    row = rows[at]
    blob = _member(archive, row.config)
    config = parse_config(document(blob, row.config), place=row.config, limits=limits)
    config = with_unlisted_layers(config, len(row.layers), "manifest.json", place=row.config)
    layers = tuple(_layer(_member(archive, path), path, config, at) for at, path in enumerate(row.layers))
    notes = (*row.notes, *_name_notes(row.config, blob), *config.notes)
    return _contents(shown_name(wanted, images[at]), config, blob, layers, notes=notes)


def calls(archive: Archive, rows: Sequence[SavedImage]) -> list[Called]:
    """By what `--image` can choose each image of manifest.json: a tag, or its config's digest."""
    digests: dict[str, str] = {}  # rows may share a config, which is read once
    for row in rows:
        if row.config not in digests:
            try:
                digests[row.config] = archive.blob(normal_path(row.config)).digest or row.config
            except KeyError:
                digests[row.config] = row.config
    return [Called(row.tags, (digests[row.config],)) for row in rows]


def from_config(archive: Archive, wanted: Wanted, limits: Limits = LIMITS) -> ImageContents:
    """The image of the archive's only config, or of the config with the wanted digest.

    Raises MissingContent where there is none, NoSuchImage where the choice isn't clear.
    """
    by_diff_id: dict[str, tuple[str, Blob]] = {}
    configs: dict[str, tuple[str, Blob, ImageConfig]] = {}
    for path in sorted(archive.paths()):
        blob = _member(archive, path, trusted=False)
        if blob.diff_id:
            by_diff_id[blob.diff_id] = path, blob
        configs |= {str(blob.digest): (path, blob, config) for config in _configs(path, blob, limits)}
    if not configs:
        message = "neither index.json nor manifest.json, and no image config"
        raise MissingContent(message, place=wanted.label, hint=FORMS)
    images = [Called((), (digest,)) for digest in configs]
    chosen = images[choose(wanted, images)[0]]
    path, config_blob, config = configs[chosen.digests[0]]
    layers = []
    for at, diff_id in enumerate(config.diff_ids):
        if diff_id not in by_diff_id:
            raise MissingContent(f"layer {at} with content {diff_id} is missing or damaged", place=path)
        where, blob = by_diff_id[diff_id]
        layers.append(_layer(blob, where, config, at))
    notes = (_NO_LISTS, *_name_notes(path, config_blob), *config.notes)
    return _contents(shown_name(wanted, chosen), config, config_blob, tuple(layers), notes=notes)


def _configs(path: str, blob: Blob, limits: Limits) -> Iterator[ImageConfig]:
    if blob.document is not None:
        with suppress(MalformedDocument):
            config = parse_config(blob.document, place=path, limits=limits)
            if config.diff_ids and config.platform.os != "unknown":
                yield config


def _name_notes(path: str, blob: Blob) -> tuple[str, ...]:
    """A config's name is its digest where docker wrote it; engines don't check that, but it may be damage."""
    stem = posixpath.basename(path).removesuffix(".json").removeprefix("sha256:")
    if len(stem) != 64 or blob.digest == f"sha256:{stem}":
        return ()
    return (f"{path}: the config's digest is {blob.digest}, not its name; it was renamed or changed",)


def _as_saved(text: bytes, paths: frozenset[str], limits: Limits) -> SavedImage:
    """A lone manifest, whose blobs are named by the hex digits of their digests."""
    manifest = parse_index_or_manifest(text, place="manifest.json", limits=limits)
    if not isinstance(manifest, Manifest):
        raise MalformedDocument("an index where a manifest must be", place="manifest.json")
    for at, layer in enumerate(manifest.layers):
        check_readable(layer.media_type, at, "manifest.json")
    named = [part.digest.removeprefix("sha256:") for part in (manifest.config, *manifest.layers)]
    found = [name if name in paths else f"blobs/sha256/{name}" for name in named]
    return SavedImage(found[0], tuple(found[1:]), ())


def _contents(
    ref: str, config: ImageConfig, blob: Blob, layers: tuple[Layer, ...], *, notes: tuple[str, ...]
) -> ImageContents:
    return ImageContents(
        ref=ref,
        digest=None,
        manifest_digest=None,
        config_digest=str(blob.digest),
        config=config,
        layers=layers,
        attestations=Attestations(),
        notes=notes,
    )


def _layer(blob: Blob, path: str, config: ImageConfig, at: int) -> Layer:
    command = config.commands[at] if config.commands else None
    return indexed(Layer(blob.digest, config.diff_ids[at], None, 0, command, None), blob, path)


def _member(archive: Archive, path: str, *, trusted: bool = True) -> Blob:
    try:
        blob = archive.blob(normal_path(path))
    except KeyError as error:
        raise MissingContent("manifest.json names it, the archive lacks it", place=path) from error
    if blob.fault and trusted:
        raise blob.fault
    return blob
