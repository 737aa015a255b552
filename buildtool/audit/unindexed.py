"""Images in archives that have no index.json: docker's manifest.json, a lone manifest, or a config alone.

Without any list a config is enough: it names its layers by the digest of their content, in order, so
that nothing is left to guess. What names no config can't be read, and is told so.
"""

import posixpath
from collections.abc import Iterator
from dataclasses import replace

from buildtool.audit.archive import FORMS, Archive, Blob
from buildtool.audit.choice import check_readable, document, indexed, same_name
from buildtool.audit.contents import Attestations, ImageContents, Layer
from buildtool.audit.documents import (
    ImageConfig,
    Manifest,
    SavedImage,
    is_saved_list,
    parse_config,
    parse_index_or_manifest,
    parse_saved,
)
from buildtool.audit.faults import MalformedDocument, Mismatch, MissingContent, NoSuchImage
from buildtool.audit.limits import LIMITS, Limits
from buildtool.audit.unpack import Form

_NO_LISTS = "index.json and manifest.json are missing: the layers were found by the digests in the config"


def from_saved(archive: Archive, label: str, ref: str | None, limits: Limits = LIMITS) -> ImageContents:
    """The image of a manifest.json: docker's list of paths, or skopeo's `dir:`, which is one manifest."""
    text = document(archive.blob("manifest.json"), "manifest.json")
    if is_saved_list(text, place="manifest.json", limits=limits):
        row = _meant(parse_saved(text, place="manifest.json", limits=limits), ref, label)
    else:
        row = _as_saved(text, archive.paths(), limits)
    blob = _member(archive, row.config)
    _check_name(row.config, blob)
    config = parse_config(document(blob, row.config), place=row.config, limits=limits)
    if len(row.layers) != len(config.diff_ids):
        message = f"manifest.json has {len(row.layers)} layers, the config {len(config.diff_ids)}"
        raise MalformedDocument(message, place=row.config)
    layers = tuple(_layer(_member(archive, path), path, config, at) for at, path in enumerate(row.layers))
    return _contents(ref or next(iter(row.tags), label), config, blob, layers)


def from_config(archive: Archive, label: str, limits: Limits = LIMITS) -> ImageContents:
    """The image of the archive's only config. Raises NoSuchImage for none and for several."""
    by_diff_id: dict[str, tuple[str, Blob]] = {}
    configs: list[tuple[str, Blob, ImageConfig]] = []
    for path in sorted(archive.paths()):
        blob = _member(archive, path, trusted=False)
        if blob.diff_id:
            by_diff_id[blob.diff_id] = path, blob
        configs += [(path, blob, config) for config in _configs(path, blob, limits)]
    if len({blob.digest for _, blob, _ in configs}) != 1:
        raise NoSuchImage(
            f"{label} has neither index.json nor manifest.json, and {len(configs) or 'no'} image configs",
            FORMS,
        )
    path, config_blob, config = configs[0]
    _check_name(path, config_blob)
    layers = []
    for at, diff_id in enumerate(config.diff_ids):
        if diff_id not in by_diff_id:
            raise MissingContent(f"layer {at} with content {diff_id} is missing or damaged", place=path)
        where, blob = by_diff_id[diff_id]
        layers.append(_layer(blob, where, config, at))
    return replace(_contents(label, config, config_blob, tuple(layers)), notes=(_NO_LISTS,))


def _configs(path: str, blob: Blob, limits: Limits) -> Iterator[ImageConfig]:
    if blob.form is Form.JSON and blob.document is not None:
        try:
            config = parse_config(blob.document, place=path, limits=limits)
        except MalformedDocument:
            return
        if config.diff_ids and config.platform.os != "unknown":
            yield config


def _check_name(path: str, blob: Blob) -> None:
    """A config's name is its digest, in all dialects but hand-made ones."""
    stem = posixpath.basename(path).removesuffix(".json").removeprefix("sha256:")
    if len(stem) == 64 and blob.digest != f"sha256:{stem}":
        raise Mismatch(f"content is {blob.digest}, its name says {stem}", place=path)


def _meant(rows: tuple[SavedImage, ...], ref: str | None, label: str) -> SavedImage:
    named = [row for row in rows if ref and any(same_name(ref, tag) for tag in row.tags)]
    meant = named or rows
    if len(meant) != 1:
        tags = sorted(tag for row in meant for tag in row.tags)
        raise NoSuchImage(f"{label} holds {len(meant)} images", f"choose one with --image: {', '.join(tags)}")
    return meant[0]


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


def _contents(ref: str, config: ImageConfig, blob: Blob, layers: tuple[Layer, ...]) -> ImageContents:
    return ImageContents(
        ref=ref,
        digest=None,
        manifest_digest=None,
        config_digest=str(blob.digest),
        config=config,
        layers=layers,
        attestations=Attestations(),
        notes=(),
    )


def _layer(blob: Blob, path: str, config: ImageConfig, at: int) -> Layer:
    command = config.commands[at] if config.commands else None
    return indexed(Layer(blob.digest, config.diff_ids[at], "", None, 0, command, None), blob, path)


def _member(archive: Archive, path: str, *, trusted: bool = True) -> Blob:
    try:
        blob = archive.blob(posixpath.normpath("/" + path).lstrip("/"))
    except KeyError as error:
        raise MissingContent("manifest.json names it, the archive lacks it", place=path) from error
    if blob.fault and trusted:
        raise blob.fault
    return blob
