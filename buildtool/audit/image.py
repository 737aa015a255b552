"""From blobs to one image: which manifest is meant, its layers in its order, every digest checked."""

import posixpath
from dataclasses import dataclass, replace
from platform import machine

from buildtool.audit.archive import FORMS, Archive, Blob
from buildtool.audit.documents import (
    Descriptor,
    ImageConfig,
    Index,
    Manifest,
    Platform,
    SavedImage,
    parse_config,
    parse_index_or_manifest,
    parse_saved,
)
from buildtool.audit.faults import (
    LimitExceeded,
    MalformedDocument,
    MalformedStream,
    Mismatch,
    MissingContent,
    NoSuchImage,
)
from buildtool.audit.layer import LayerIndex
from buildtool.audit.limits import LIMITS, Limits
from buildtool.audit.unpack import Form

PLAIN_REASON = "the archive holds its layers uncompressed; what a registry would store is not known from it"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True)
class Layer:
    """One layer, bottom first in its image.

    `stored_bytes` is its compressed size, None where it lies uncompressed or is absent. `tar_bytes` is
    the uncompressed tar with headers and padding. `index` is None for content that isn't in the archive.
    """

    digest: str | None
    diff_id: str
    media_type: str
    stored_bytes: int | None
    tar_bytes: int
    command: str | None
    index: LayerIndex | None

    @property
    def unpacked_bytes(self) -> int:
        """Content of the layer's files."""
        return sum(self.index.sizes) if self.index else 0


@dataclass(frozen=True)
class Attestations:
    """Provenance and SBOM manifests beside the image; no part of its size."""

    count: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True)
class ImageContents:
    """One image for one platform. `digest` is of what the reference names: an index or the manifest."""

    ref: str
    digest: str | None
    manifest_digest: str | None
    config_digest: str
    config: ImageConfig
    layers: tuple[Layer, ...]
    attestations: Attestations
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Leaf:
    """A manifest that could be the one that is meant."""

    top: Descriptor  # of index.json
    descriptor: Descriptor
    manifest: Manifest
    config: ImageConfig


def host_platform() -> Platform:
    """The platform whose images run here."""
    return Platform("linux", _MACHINES.get(machine(), machine()))


def read_image(
    archive: Archive,
    *,
    label: str,
    ref: str | None = None,
    platform: Platform | None = None,
    limits: Limits = LIMITS,
) -> ImageContents:
    """The image in an archive: the one that `ref` names, for `platform` (else this host's).

    Raises NoSuchImage where the choice isn't clear, and the faults of what can't be read or trusted.
    """
    paths = archive.paths()
    if "index.json" in paths:
        contents = _from_layout(archive, label, ref, platform, limits)
        if "manifest.json" in paths:
            saved = parse_saved(_text(archive, "manifest.json"), place="manifest.json", limits=limits)
            _check_agreement(contents, saved)
        return contents
    if "manifest.json" in paths:
        return _from_saved(archive, label, ref, limits)
    raise NoSuchImage(f"{label} holds neither index.json nor manifest.json", FORMS)


def _from_layout(
    archive: Archive, label: str, ref: str | None, platform: Platform | None, limits: Limits
) -> ImageContents:
    notes: list[str] = []
    leaves, attestations = _leaves(archive, notes, limits)
    leaf = _chosen(leaves, ref, platform or host_platform(), label, notes)
    manifest, config = leaf.manifest, leaf.config
    if len(manifest.layers) != len(config.diff_ids):
        raise MalformedDocument(
            f"the manifest has {len(manifest.layers)} layers, the config {len(config.diff_ids)}",
            place=leaf.descriptor.digest,
        )
    layers = tuple(
        _described_layer(archive, manifest.layers[at], config, at, notes)
        for at in range(len(manifest.layers))
    )
    return ImageContents(
        ref=ref or next(iter(leaf.top.names), label),
        digest=leaf.top.digest,
        manifest_digest=leaf.descriptor.digest,
        config_digest=manifest.config.digest,
        config=config,
        layers=layers,
        attestations=attestations,
        notes=tuple(notes),
    )


def _leaves(archive: Archive, notes: list[str], limits: Limits) -> tuple[list[_Leaf], Attestations]:
    """Every image manifest that index.json leads to and the archive holds; attestations are counted apart."""
    root = parse_index_or_manifest(_text(archive, "index.json"), place="index.json", limits=limits)
    if isinstance(root, Manifest):
        raise MalformedDocument("a manifest where an index must be", place="index.json")
    leaves: list[_Leaf] = []
    attested: dict[str, int] = {}
    waiting = [(child, child, 1) for child in root.manifests]
    seen: set[str] = set()
    while waiting:
        top, descriptor, depth = waiting.pop(0)
        if descriptor.digest in seen and not descriptor.names:
            continue
        seen.add(descriptor.digest)
        if depth > limits.index_depth or len(seen) > limits.manifests:
            raise LimitExceeded("indexes nested without end", place=descriptor.digest)
        if _path(descriptor) not in archive.paths():
            if descriptor.platform and not descriptor.is_attestation:
                notes.append(f"the manifest for {descriptor.platform} is not in the archive")
            continue
        document = parse_index_or_manifest(
            _described_text(archive, descriptor), place=descriptor.digest, limits=limits
        )
        if isinstance(document, Index):
            waiting += [(top, child, depth + 1) for child in document.manifests]
        elif descriptor.is_attestation or document.is_attestation:
            parts = (document.config, *document.layers)
            attested[descriptor.digest] = descriptor.stored_bytes + sum(part.stored_bytes for part in parts)
        elif _path(document.config) in archive.paths():
            place = f"config {document.config.digest}"
            config = parse_config(_described_text(archive, document.config), place=place, limits=limits)
            leaves.append(_Leaf(top, descriptor, document, config))
        else:
            notes.append(f"the config of manifest {descriptor.digest} is not in the archive")
    return leaves, Attestations(len(attested), sum(attested.values()))


def _chosen(leaves: list[_Leaf], ref: str | None, platform: Platform, label: str, notes: list[str]) -> _Leaf:
    """The manifest that is meant. Raises NoSuchImage when that can't be told."""
    if not leaves:
        raise NoSuchImage(f"{label} holds no image manifest with its config", "; ".join(notes))
    named = [leaf for leaf in leaves if ref and any(same_name(ref, name) for name in leaf.top.names)]
    meant = named or leaves
    if len({leaf.top.digest for leaf in meant}) > 1:
        names = sorted(
            {name for leaf in meant for name in leaf.top.names} or {leaf.top.digest for leaf in meant}
        )
        raise NoSuchImage(f"{label} holds several images", f"choose one with --image: {', '.join(names)}")
    fitting = [
        leaf
        for leaf in meant
        if (leaf.config.platform.os, leaf.config.platform.architecture)
        == (platform.os, platform.architecture)
    ]
    exact = [leaf for leaf in fitting if leaf.config.platform.variant == platform.variant] or fitting
    if not exact and len(meant) > 1:
        there = ", ".join(str(leaf.config.platform) for leaf in meant)
        raise NoSuchImage(f"{label} has no image for {platform}", f"choose with --platform: {there}")
    choice = (exact or meant)[0]
    if len(meant) > 1:
        notes.append(f"of {len(meant)} platforms, {choice.config.platform} was read")
    elif not exact:
        notes.append(f"the image is for {choice.config.platform}, not for this host's {platform}")
    return choice


def same_name(wanted: str, name: str) -> bool:
    """Do two references mean the same image? `docker.io/library/` and `:latest` may be left out."""
    return _full_name(wanted) == _full_name(name)


def _full_name(name: str) -> str:
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rsplit("/", 1)[-1] or "@" in name else f"{name}:latest"


def _described_layer(
    archive: Archive, descriptor: Descriptor, config: ImageConfig, at: int, notes: list[str]
) -> Layer:
    command = config.commands[at] if config.commands else None
    layer = Layer(
        digest=descriptor.digest,
        diff_id=config.diff_ids[at],
        media_type=descriptor.media_type,
        stored_bytes=descriptor.stored_bytes,
        tar_bytes=0,
        command=command,
        index=None,
    )
    path = _path(descriptor)
    if path not in archive.paths():
        if (
            descriptor.urls
            or "foreign" in descriptor.media_type
            or "nondistributable" in descriptor.media_type
        ):
            notes.append(f"layer {at} ({descriptor.digest}) is foreign and not in the archive")
            return layer
        raise MissingContent(f"layer {at}, {descriptor.digest}, is missing", place=path)
    blob = _verified(archive.blob(path), descriptor, path)
    told = next((form for form in (Form.GZIP, Form.ZSTD) if f"+{form.value}" in descriptor.media_type), None)
    if told and blob.form is not told:
        notes.append(f"layer {at} is {blob.form.value} although its media type says {told.value}")
    return _indexed(layer, blob, path)


def _indexed(layer: Layer, blob: Blob, path: str) -> Layer:
    """The layer with its blob's index, after its diff_id was checked."""
    if blob.index is None:
        raise MalformedStream(f"a layer that is neither tar, gzip nor zstd but {blob.form.value}", place=path)
    if blob.diff_id != layer.diff_id:
        raise Mismatch(f"uncompressed content is {blob.diff_id}, the config says {layer.diff_id}", place=path)
    stored = None if blob.form is Form.TAR else blob.stored_bytes
    return replace(layer, stored_bytes=stored, tar_bytes=blob.tar_bytes, index=blob.index)


def _verified(blob: Blob, descriptor: Descriptor, path: str) -> Blob:
    if blob.fault:
        raise blob.fault
    if blob.stored_bytes != descriptor.stored_bytes:
        raise Mismatch(f"{blob.stored_bytes:,} bytes, announced {descriptor.stored_bytes:,}", place=path)
    if blob.digest != descriptor.digest:
        raise Mismatch(f"content is {blob.digest}, announced {descriptor.digest}", place=path)
    return blob


def _described_text(archive: Archive, descriptor: Descriptor) -> bytes:
    path = _path(descriptor)
    return _document(_verified(archive.blob(path), descriptor, path), path)


def _text(archive: Archive, path: str) -> bytes:
    return _document(archive.blob(path), path)


def _document(blob: Blob, path: str) -> bytes:
    if blob.document is None and blob.form is Form.JSON:
        raise LimitExceeded(f"a JSON document of {blob.stored_bytes:,} bytes", place=path)
    if blob.document is None:
        raise MalformedDocument(f"not a JSON document but {blob.form.value}", place=path)
    return blob.document


def _path(descriptor: Descriptor) -> str:
    return "blobs/" + descriptor.digest.replace(":", "/", 1)


def _from_saved(archive: Archive, label: str, ref: str | None, limits: Limits) -> ImageContents:
    """The image in an archive from before Docker 25: manifest.json alone, told by paths."""
    rows = parse_saved(_text(archive, "manifest.json"), place="manifest.json", limits=limits)
    named = [row for row in rows if ref and any(same_name(ref, tag) for tag in row.tags)]
    meant = named or rows
    if len(meant) != 1:
        tags = sorted(tag for row in meant for tag in row.tags)
        raise NoSuchImage(f"{label} holds {len(meant)} images", f"choose one with --image: {', '.join(tags)}")
    row = meant[0]
    blob = _member(archive, row.config)
    stem = posixpath.basename(row.config).removesuffix(".json")
    if len(stem) == 64 and blob.digest != f"sha256:{stem}":
        raise Mismatch(f"content is {blob.digest}, its name says {stem}", place=row.config)
    config = parse_config(_document(blob, row.config), place=row.config, limits=limits)
    if len(row.layers) != len(config.diff_ids):
        message = f"manifest.json has {len(row.layers)} layers, the config {len(config.diff_ids)}"
        raise MalformedDocument(message, place=row.config)
    layers = tuple(_saved_layer(archive, path, config, at) for at, path in enumerate(row.layers))
    return ImageContents(
        ref=ref or next(iter(row.tags), label),
        digest=None,
        manifest_digest=None,
        config_digest=str(blob.digest),
        config=config,
        layers=layers,
        attestations=Attestations(),
        notes=(),
    )


def _saved_layer(archive: Archive, path: str, config: ImageConfig, at: int) -> Layer:
    command = config.commands[at] if config.commands else None
    layer = Layer(None, config.diff_ids[at], "", stored_bytes=None, tar_bytes=0, command=command, index=None)
    blob = _member(archive, path)
    return _indexed(replace(layer, digest=blob.digest), blob, path)


def _member(archive: Archive, path: str) -> Blob:
    try:
        blob = archive.blob(posixpath.normpath("/" + path).lstrip("/"))
    except KeyError as error:
        raise MissingContent("manifest.json names it, the archive lacks it", place=path) from error
    if blob.fault:
        raise blob.fault
    return blob


def _check_agreement(contents: ImageContents, saved: tuple[SavedImage, ...]) -> None:
    """index.json and manifest.json in one archive must mean the same config and the same layers."""
    for row in saved:
        if row.config.endswith(contents.config_digest.removeprefix("sha256:")):
            told = [posixpath.basename(path) for path in row.layers]
            ours = [str(layer.digest).removeprefix("sha256:") for layer in contents.layers]
            if told == ours or not all(path.startswith("blobs/") for path in row.layers):
                return
    raise Mismatch("index.json and manifest.json don't mean the same image", place="manifest.json")
