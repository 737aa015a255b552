"""From blobs to one image: chooses the manifest, puts the layers in its order, checks every digest."""

import posixpath
import re
from dataclasses import dataclass, replace
from platform import machine

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
from buildtool.audit.read.openfile import FORMS
from buildtool.audit.read.unindexed import calls, from_config, from_saved
from buildtool.audit.tar.faults import LimitExceeded, MalformedDocument, Mismatch, MissingContent, NoSuchImage
from buildtool.audit.tar.limits import LIMITS, Limits
from buildtool.audit.tar.unpack import Form
from buildtool.errors import ConfigError

_EMPTY_INDEX = (
    "index.json names no image, which is how Docker 25.0 writes an untagged one; manifest.json was read"
)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True)
class _Leaf:
    """A manifest that could be the wanted one."""

    top: Descriptor  # of index.json
    descriptor: Descriptor
    manifest: Manifest
    config: ImageConfig

    @property
    def called(self) -> Called:
        """By what `--image` can choose it."""
        return Called(self.top.names, (self.top.digest, self.descriptor.digest, self.manifest.config.digest))


def host_platform() -> Platform:
    """The platform whose images run here."""
    return Platform("linux", _MACHINES.get(machine(), machine()))


def parse_platform(text: str) -> Platform:
    """A platform as users write it: `linux/arm64`, `linux/arm/v7`. Raises ConfigError."""
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise ConfigError(f"{text!r} is not a platform", "write one such as linux/amd64 or linux/arm/v7")
    return Platform(*parts)


def read_image(
    archive: Archive,
    *,
    label: str,
    ref: str | None = None,
    is_answer: bool = False,
    platform: Platform | None = None,
    limits: Limits = LIMITS,
) -> ImageContents:
    """The image in an archive: the one that `ref` names, for `platform` (else this host's).

    `is_answer`: an engine made the archive for `ref`, so its only image is the wanted one, under any name.
    Raises NoSuchImage where the choice isn't clear, and the faults of what can't be read or trusted.
    """
    contents = _read(archive, Wanted(label, ref, is_answer, platform), limits)
    return replace(contents, notes=(*(f"the archive: {note}" for note in archive.notes), *contents.notes))


def _read(archive: Archive, wanted: Wanted, limits: Limits) -> ImageContents:
    paths = archive.paths()
    if "index.json" not in paths:
        read = from_saved if "manifest.json" in paths else from_config
        return read(archive, wanted, limits)
    root = parse_index_or_manifest(_text(archive, "index.json"), place="index.json", limits=limits)
    if isinstance(root, Manifest):
        raise MalformedDocument("a manifest where an index must be", place="index.json")
    if not root.manifests and "manifest.json" in paths:
        contents = from_saved(archive, wanted, limits)
        return replace(contents, notes=(_EMPTY_INDEX, *contents.notes))
    contents = _from_layout(archive, root, wanted, limits)
    if "manifest.json" in paths:
        saved = parse_saved(_text(archive, "manifest.json"), place="manifest.json", limits=limits)
        _check_agreement(archive, contents, saved)
    return contents


def _from_layout(archive: Archive, root: Index, wanted: Wanted, limits: Limits) -> ImageContents:
    notes: list[str] = []
    leaves, attestations = _leaves(archive, root, notes, limits)
    leaf = _chosen(leaves, wanted, notes)
    manifest = leaf.manifest
    config = with_unlisted_layers(
        leaf.config, len(manifest.layers), "the manifest", place=leaf.descriptor.digest
    )
    layers = tuple(
        _described_layer(archive, manifest.layers[at], config, at, notes)
        for at in range(len(manifest.layers))
    )
    return ImageContents(
        ref=shown_name(wanted, leaf.called),
        digest=leaf.top.digest,
        manifest_digest=leaf.descriptor.digest,
        config_digest=manifest.config.digest,
        config=config,
        layers=layers,
        attestations=attestations,
        notes=(*notes, *config.notes),
    )


def _leaves(
    archive: Archive, root: Index, notes: list[str], limits: Limits
) -> tuple[list[_Leaf], Attestations]:
    """Every image manifest that index.json leads to and the archive holds; attestations are counted apart."""
    leaves: list[_Leaf] = []
    attested: dict[str, int] = {}
    attestations: list[bytes] = []
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
        found = parse_index_or_manifest(
            _described_text(archive, descriptor), place=descriptor.digest, limits=limits
        )
        if isinstance(found, Index):
            waiting += [(top, child, depth + 1) for child in found.manifests]
        elif descriptor.is_attestation or found.is_attestation:
            parts = (found.config, *found.layers)
            attested[descriptor.digest] = descriptor.stored_bytes + sum(part.stored_bytes for part in parts)
            blobs = [archive.blob(_path(part)) for part in found.layers if _path(part) in archive.paths()]
            attestations += [blob.document for blob in blobs if blob.document is not None]
        elif _path(found.config) in archive.paths():
            place = f"config {found.config.digest}"
            config = parse_config(_described_text(archive, found.config), place=place, limits=limits)
            leaves.append(_Leaf(top, descriptor, found, config))
        else:
            notes.append(f"the config of manifest {descriptor.digest} is not in the archive")
    return leaves, Attestations(len(attested), sum(attested.values()), tuple(attestations))


def _chosen(leaves: list[_Leaf], wanted: Wanted, notes: list[str]) -> _Leaf:
    """The wanted manifest.

    Raises NoSuchImage when the choice isn't clear, MissingContent when there is none.
    """
    if not leaves:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise MissingContent(f"no image manifest with its config{why}", place=wanted.label, hint=FORMS)
    meant = [leaves[at] for at in choose(wanted, [leaf.called for leaf in leaves])]
    platform = wanted.platform or host_platform()
    fitting = [leaf for leaf in meant if platform.resembles(leaf.config.platform)]
    exact = [leaf for leaf in fitting if leaf.config.platform.variant == platform.variant] or fitting
    if not exact and (wanted.platform or len(meant) > 1):
        there = ", ".join(str(leaf.config.platform) for leaf in meant)
        raise NoSuchImage(f"{wanted.label} has no image for {platform}", f"choose with --platform: {there}")
    choice = (exact or meant)[0]
    if len(meant) > 1:
        notes.append(f"of {len(meant)} platforms, {choice.config.platform} was read")
    elif not exact:
        notes.append(f"the image is for {choice.config.platform}, not for this host's {platform}")
    return choice


def _described_layer(
    archive: Archive, descriptor: Descriptor, config: ImageConfig, at: int, notes: list[str]
) -> Layer:
    command = config.commands[at] if config.commands else None
    layer = Layer(
        digest=descriptor.digest,
        diff_id=config.diff_ids[at],
        stored_bytes=descriptor.stored_bytes,
        tar_bytes=0,
        command=command,
        index=None,
    )
    path = _path(descriptor)
    check_readable(descriptor.media_type, at, path)
    if path not in archive.paths():
        if descriptor.urls or re.search("foreign|nondistributable", descriptor.media_type):
            notes.append(f"layer {at} ({descriptor.digest}) is foreign and not in the archive")
            return layer
        raise MissingContent(f"layer {at}, {descriptor.digest}, is missing", place=path)
    blob = _verified(archive.blob(path), descriptor, path)
    declared = next(
        (form for form in (Form.GZIP, Form.ZSTD) if f"+{form.value}" in descriptor.media_type), None
    )
    if declared and blob.form is not declared:
        notes.append(f"layer {at} is {blob.form.value} although its media type says {declared.value}")
    return indexed(layer, blob, path)


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
    return document(_verified(archive.blob(path), descriptor, path), path)


def _text(archive: Archive, path: str) -> bytes:
    return document(archive.blob(path), path)


def _path(descriptor: Descriptor) -> str:
    return "blobs/" + descriptor.digest.replace(":", "/")


def _check_agreement(archive: Archive, contents: ImageContents, saved: tuple[SavedImage, ...]) -> None:
    """index.json and manifest.json in one archive must mean the same config and the same layers."""
    for row, called in zip(saved, calls(archive, saved), strict=True):
        if contents.config_digest in called.digests:
            declared = [posixpath.basename(path) for path in row.layers]
            ours = [str(layer.digest).removeprefix("sha256:") for layer in contents.layers]
            if declared == ours or not all(path.startswith("blobs/") for path in row.layers):
                return
    raise Mismatch("index.json and manifest.json don't mean the same image", place="manifest.json")
