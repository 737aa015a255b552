"""Reads one image out of an archive: chooses its manifest, puts the layers in order, checks every digest.

The lists that an archive may have, in the order of preference: index.json (an OCI layout), manifest.json
(`docker save`), none but a config.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from platform import machine

from buildtool.core.errors import ConfigError
from buildtool.image.archive import FORMS, Archive, Blob
from buildtool.image.documents import (
    Descriptor,
    ImageConfig,
    Index,
    Manifest,
    Platform,
    SavedImage,
    is_saved_list,
    parse_config,
    parse_index_or_manifest,
    parse_saved,
)
from buildtool.image.errors import (
    LIMITS,
    LimitExceeded,
    Limits,
    MalformedDocument,
    MalformedStream,
    Mismatch,
    MissingContent,
    NoSuchImage,
)
from buildtool.image.layer import LayerIndex
from buildtool.image.streams import Form
from buildtool.image.tar import normal_path

PLAIN_REASON = "the archive holds its layers uncompressed; what a registry would store is not known from it"


@dataclass(frozen=True)
class Layer:
    """One layer, bottom first in its image.

    `stored_bytes` is its compressed size, None where it is stored uncompressed or is absent. `tar_bytes` is
    the uncompressed tar with headers and padding. `index` is None for content that isn't in the archive.
    """

    digest: str | None
    diff_id: str
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
    """Provenance and SBOM manifests of the image; not part of its size."""

    count: int = 0
    stored_bytes: int = 0
    documents: tuple[bytes, ...] = ()  # those that the archive holds


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

    def layer_notes(self) -> tuple[str, ...]:
        """Oddities that were read nevertheless, each with the layers (0 is the lowest) that have it."""
        layers_by_note: dict[str, list[int]] = {}
        for at, layer in enumerate(self.layers):
            for note in layer.index.notes if layer.index else ():
                layers_by_note.setdefault(note, []).append(at)
        return tuple(
            f"layer{'s' * (len(positions) > 1)} {', '.join(map(str, positions[:5]))}"
            f"{' and more' * (len(positions) > 5)}: {note}"
            for note, positions in layers_by_note.items()
        )


@dataclass(frozen=True)
class ImageRequest:
    """Which image of an archive is wanted; without a `ref`, the only one.

    `from_engine`: an engine made the archive for `ref`, which the archive needn't contain (it may be an id).
    """

    label: str  # what messages call the archive
    ref: str | None = None
    from_engine: bool = False
    platform: Platform | None = None


_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


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
    from_engine: bool = False,
    platform: Platform | None = None,
    limits: Limits = LIMITS,
) -> ImageContents:
    """The image in an archive: the one that `ref` names, for `platform` (else this host's).

    `from_engine`: an engine made the archive for `ref`, so its only image is the wanted one, under any name.
    Raises NoSuchImage where the choice isn't clear, ImageError for what can't be read or trusted.
    """
    contents = _read(archive, ImageRequest(label, ref, from_engine, platform), limits)
    return replace(contents, notes=(*(f"the archive: {note}" for note in archive.notes), *contents.notes))


def _read(archive: Archive, request: ImageRequest, limits: Limits) -> ImageContents:
    paths = archive.paths()
    if "index.json" not in paths:
        read = read_saved if "manifest.json" in paths else read_by_config
        return read(archive, request, limits)
    root = parse_index_or_manifest(_json_text(archive, "index.json"), place="index.json", limits=limits)
    if isinstance(root, Manifest):
        raise MalformedDocument("a manifest where an index must be", place="index.json")
    if not root.manifests and "manifest.json" in paths:
        contents = read_saved(archive, request, limits)
        return replace(contents, notes=(_EMPTY_INDEX, *contents.notes))
    contents = _read_layout(archive, root, request, limits)
    if "manifest.json" in paths:
        saved = parse_saved(_json_text(archive, "manifest.json"), place="manifest.json", limits=limits)
        _check_agreement(archive, contents, saved)
    return contents


# Choosing among the images of an archive.

_NAMES_IN_HINT = 40


@dataclass(frozen=True)
class ImageNames:
    """The names of one image in an archive. The first digest distinguishes it from all others."""

    names: tuple[str, ...]
    digests: tuple[str, ...]

    def matches(self, ref: str) -> bool:
        """Whether `--image ref` means this image: by a name, by a digest, or by `name@digest`."""
        return ref.rpartition("@")[2] in self.digests or any(same_name(ref, name) for name in self.names)


def choose_images(request: ImageRequest, images: Sequence[ImageNames]) -> tuple[int, ...]:
    """Positions of the wanted images; several only where they are one image for several platforms.

    Raises NoSuchImage, whose hint names what `--image` accepts.
    """
    matching = [at for at, image in enumerate(images) if request.ref and image.matches(request.ref)]
    if not matching:
        if request.ref and not request.from_engine:
            raise NoSuchImage(f"{request.label} holds no image {request.ref}", _hint_of_names(images))
        matching = list(range(len(images)))
    if len({images[at].digests[0] for at in matching}) > 1:
        raise NoSuchImage(
            f"{request.label} holds several images", _hint_of_names([images[at] for at in matching])
        )
    return tuple(matching)


def display_name(request: ImageRequest, image: ImageNames) -> str:
    """The chosen image's name in a report: the name that was asked for, else the archive's."""
    if request.ref and (request.from_engine or not image.names or "sha256:" not in request.ref):
        return request.ref
    return next(iter(image.names), request.label)


def same_name(ref: str, name: str) -> bool:
    """Whether two references mean the same image; `docker.io/library/` and `:latest` may be left out."""
    return _full_name(ref) == _full_name(name)


def _full_name(name: str) -> str:
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _hint_of_names(images: Sequence[ImageNames]) -> str:
    """A hint that lists each image: by a name that no other image has, else by its digest."""
    digests_by_name: dict[str, set[str]] = {}
    for image in images:
        for name in image.names:
            digests_by_name.setdefault(name, set()).add(image.digests[0])
    hints = (
        next((name for name in image.names if len(digests_by_name[name]) == 1), image.digests[0])
        for image in images
    )
    listed = ", ".join(islice(dict.fromkeys(word for word in hints if word), _NAMES_IN_HINT))
    return f"choose one with --image: {listed}" if listed else ""


# OCI layouts: index.json leads to manifests.

_EMPTY_INDEX = (
    "index.json names no image, which is how Docker 25.0 writes an untagged one; manifest.json was read"
)


@dataclass(frozen=True)
class _Candidate:
    """A manifest that could be the wanted one."""

    top: Descriptor  # of index.json
    descriptor: Descriptor
    manifest: Manifest
    config: ImageConfig

    @property
    def names(self) -> ImageNames:
        """What `--image` can choose it by."""
        return ImageNames(
            self.top.names, (self.top.digest, self.descriptor.digest, self.manifest.config.digest)
        )


def _read_layout(archive: Archive, root: Index, request: ImageRequest, limits: Limits) -> ImageContents:
    notes: list[str] = []
    candidates, attestations = _candidates(archive, root, notes, limits)
    chosen = _chosen(candidates, request, notes)
    manifest = chosen.manifest
    config = allow_unlisted_layers(
        chosen.config, len(manifest.layers), "the manifest", place=chosen.descriptor.digest
    )
    layers = tuple(
        _described_layer(archive, manifest.layers[at], config, at, notes)
        for at in range(len(manifest.layers))
    )
    return ImageContents(
        ref=display_name(request, chosen.names),
        digest=chosen.top.digest,
        manifest_digest=chosen.descriptor.digest,
        config_digest=manifest.config.digest,
        config=config,
        layers=layers,
        attestations=attestations,
        notes=(*notes, *config.notes),
    )


def _candidates(
    archive: Archive, root: Index, notes: list[str], limits: Limits
) -> tuple[list[_Candidate], Attestations]:
    """Every image manifest below index.json that the archive holds; attestations are counted apart."""
    candidates: list[_Candidate] = []
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
        parsed = parse_index_or_manifest(
            _verified_text(archive, descriptor), place=descriptor.digest, limits=limits
        )
        if isinstance(parsed, Index):
            waiting += [(top, child, depth + 1) for child in parsed.manifests]
        elif descriptor.is_attestation or parsed.is_attestation:
            parts = (parsed.config, *parsed.layers)
            attested[descriptor.digest] = descriptor.stored_bytes + sum(part.stored_bytes for part in parts)
            blobs = [archive.blob(_path(part)) for part in parsed.layers if _path(part) in archive.paths()]
            attestations += [blob.document for blob in blobs if blob.document is not None]
        elif _path(parsed.config) in archive.paths():
            place = f"config {parsed.config.digest}"
            config = parse_config(_verified_text(archive, parsed.config), place=place, limits=limits)
            candidates.append(_Candidate(top, descriptor, parsed, config))
        else:
            notes.append(f"the config of manifest {descriptor.digest} is not in the archive")
    return candidates, Attestations(len(attested), sum(attested.values()), tuple(attestations))


def _chosen(candidates: list[_Candidate], request: ImageRequest, notes: list[str]) -> _Candidate:
    """The requested manifest, for the requested platform, else this host's.

    Raises NoSuchImage when the choice isn't clear, MissingContent when there is none.
    """
    if not candidates:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise MissingContent(f"no image manifest with its config{why}", place=request.label, hint=FORMS)
    platform = request.platform or host_platform()
    if request.platform and not request.ref and len({row.top.digest for row in candidates}) > 1:
        # the rows of one index.json may be one image for several platforms
        candidates = [row for row in candidates if platform.resembles(row.config.platform)] or candidates
    matching = [candidates[at] for at in choose_images(request, [row.names for row in candidates])]
    fitting = [row for row in matching if platform.resembles(row.config.platform)]
    exact = [row for row in fitting if row.config.platform.variant == platform.variant] or fitting
    if not exact and (request.platform or len(matching) > 1):
        there = ", ".join(str(row.config.platform) for row in matching)
        raise NoSuchImage(f"{request.label} has no image for {platform}", f"choose with --platform: {there}")
    chosen = (exact or matching)[0]
    if len(matching) > 1:
        notes.append(f"of {len(matching)} platforms, {chosen.config.platform} was read")
    elif not exact:
        notes.append(f"the image is for {chosen.config.platform}, not for this host's {platform}")
    return chosen


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
    refuse_encrypted(descriptor.media_type, at, path)
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
    return with_index(layer, blob, path)


def _verified(blob: Blob, descriptor: Descriptor, path: str) -> Blob:
    """The blob, if it has the size and digest of its descriptor. Raises Mismatch, or the blob's error."""
    if blob.error:
        raise blob.error
    if blob.stored_bytes != descriptor.stored_bytes:
        raise Mismatch(f"{blob.stored_bytes:,} bytes, announced {descriptor.stored_bytes:,}", place=path)
    if blob.digest != descriptor.digest:
        raise Mismatch(f"content is {blob.digest}, announced {descriptor.digest}", place=path)
    return blob


def _verified_text(archive: Archive, descriptor: Descriptor) -> bytes:
    path = _path(descriptor)
    return json_document(_verified(archive.blob(path), descriptor, path), path)


def _json_text(archive: Archive, path: str) -> bytes:
    return json_document(archive.blob(path), path)


def _path(descriptor: Descriptor) -> str:
    return "blobs/" + descriptor.digest.replace(":", "/")


def _check_agreement(archive: Archive, contents: ImageContents, saved: tuple[SavedImage, ...]) -> None:
    """Raises Mismatch unless index.json and manifest.json name the same config and the same layers."""
    for row, names in zip(saved, names_of_saved(archive, saved), strict=True):
        if contents.config_digest in names.digests:
            declared = [posixpath.basename(path) for path in row.layers]
            own = [str(layer.digest).removeprefix("sha256:") for layer in contents.layers]
            if declared == own or not all(path.startswith("blobs/") for path in row.layers):
                return
    raise Mismatch("index.json and manifest.json don't mean the same image", place="manifest.json")


# manifest.json: docker's list of paths, or a lone manifest.


def read_saved(archive: Archive, request: ImageRequest, limits: Limits = LIMITS) -> ImageContents:
    """The image of a manifest.json: docker's list of paths, or skopeo's `dir:`, which is one manifest."""
    text = json_document(archive.blob("manifest.json"), "manifest.json")
    if is_saved_list(text, place="manifest.json", limits=limits):
        rows = parse_saved(text, place="manifest.json", limits=limits)
    else:
        rows = (_as_saved(text, archive.paths(), limits),)
    if not rows:
        raise MissingContent("it names no image", place="manifest.json", hint=FORMS)
    images = names_of_saved(archive, rows)
    at = choose_images(request, images)[0]
    row = rows[at]
    blob = _member(archive, row.config)
    config = parse_config(json_document(blob, row.config), place=row.config, limits=limits)
    config = allow_unlisted_layers(config, len(row.layers), "manifest.json", place=row.config)
    layers = tuple(_layer(_member(archive, path), path, config, at) for at, path in enumerate(row.layers))
    notes = (*row.notes, *_name_notes(row.config, blob), *config.notes)
    return _contents(display_name(request, images[at]), config, blob, layers, notes=notes)


def names_of_saved(archive: Archive, rows: Sequence[SavedImage]) -> list[ImageNames]:
    """What `--image` can choose each image of manifest.json by: a tag, or its config's digest."""
    digests: dict[str, str] = {}  # rows may share a config, which is read once
    for row in rows:
        if row.config not in digests:
            try:
                digests[row.config] = archive.blob(normal_path(row.config)).digest or row.config
            except KeyError:
                digests[row.config] = row.config
    return [ImageNames(row.tags, (digests[row.config],)) for row in rows]


def _as_saved(text: bytes, paths: frozenset[str], limits: Limits) -> SavedImage:
    """A lone manifest, whose blobs are named by the hex digits of their digests."""
    manifest = parse_index_or_manifest(text, place="manifest.json", limits=limits)
    if not isinstance(manifest, Manifest):
        raise MalformedDocument("an index where a manifest must be", place="manifest.json")
    for at, layer in enumerate(manifest.layers):
        refuse_encrypted(layer.media_type, at, "manifest.json")
    named = [part.digest.removeprefix("sha256:") for part in (manifest.config, *manifest.layers)]
    paths_of_parts = [name if name in paths else f"blobs/sha256/{name}" for name in named]
    return SavedImage(paths_of_parts[0], tuple(paths_of_parts[1:]), ())


# Neither: the archive's only config names its layers by their content.

_LISTS_MISSING = (
    "index.json and manifest.json are missing: the layers were found by the digests in the config"
)


def read_by_config(archive: Archive, request: ImageRequest, limits: Limits = LIMITS) -> ImageContents:
    """The image of the archive's only config, or of the config with the wanted digest.

    Raises MissingContent where there is none, NoSuchImage where the choice isn't clear.
    """
    by_diff_id: dict[str, tuple[str, Blob]] = {}
    configs: dict[str, tuple[str, Blob, ImageConfig]] = {}
    for path in sorted(archive.paths()):
        try:
            blob = archive.blob(path)
        except KeyError:
            continue  # a link that leads to no blob, as in the root file system that `docker export` writes
        if blob.diff_id:
            by_diff_id[blob.diff_id] = path, blob
        configs |= {str(blob.digest): (path, blob, config) for config in _configs(path, blob, limits)}
    if not configs:
        message = "neither index.json nor manifest.json, and no image config"
        raise MissingContent(message, place=request.label, hint=FORMS)
    images = [ImageNames((), (digest,)) for digest in configs]
    chosen = images[choose_images(request, images)[0]]
    path, config_blob, config = configs[chosen.digests[0]]
    layers = []
    for at, diff_id in enumerate(config.diff_ids):
        if diff_id not in by_diff_id:
            raise MissingContent(f"layer {at} with content {diff_id} is missing or damaged", place=path)
        layer_path, blob = by_diff_id[diff_id]
        layers.append(_layer(blob, layer_path, config, at))
    notes = (_LISTS_MISSING, *_name_notes(path, config_blob), *config.notes)
    return _contents(display_name(request, chosen), config, config_blob, tuple(layers), notes=notes)


def _configs(path: str, blob: Blob, limits: Limits) -> Iterator[ImageConfig]:
    if blob.document is not None:
        with suppress(MalformedDocument):
            config = parse_config(blob.document, place=path, limits=limits)
            if config.diff_ids and config.platform.os != "unknown":
                yield config


# What all three have in common.


def json_document(blob: Blob, path: str) -> bytes:
    """A blob's JSON text. Raises LimitExceeded, MalformedDocument."""
    if blob.document is None and blob.form is Form.JSON:
        raise LimitExceeded(f"a JSON document of {blob.stored_bytes:,} bytes", place=path)
    if blob.document is None:
        raise MalformedDocument(f"not a JSON document but {blob.form.value}", place=path)
    return blob.document


def allow_unlisted_layers(config: ImageConfig, count: int, lister: str, place: str) -> ImageConfig:
    """The config, with a note and without diff_ids where it lists no layers and its manifest some.

    Raises MalformedDocument for two lists that don't agree.
    """
    if len(config.diff_ids) == count:
        return config
    if config.diff_ids:
        message = f"{lister} has {count} layers, the config {len(config.diff_ids)}"
        raise MalformedDocument(message, place=place)
    note = (
        f"{place}: the config lists no layers, and {lister} {count}: their content is checked by nothing else"
    )
    return replace(config, diff_ids=("",) * count, commands=None, notes=(*config.notes, note))


def refuse_encrypted(media_type: str, at: int, place: str) -> None:
    """Raises MalformedStream for a layer whose media type says that it is encrypted."""
    if media_type.endswith("+encrypted"):
        raise MalformedStream(
            f"layer {at} is encrypted, so its files can't be read",
            place=place,
            hint="decrypt the image first, for example with `skopeo copy --decryption-key`",
        )


def with_index(layer: Layer, blob: Blob, path: str) -> Layer:
    """The layer with its blob's index, after its diff_id was checked, if the config has one.

    Raises MalformedStream, Mismatch.
    """
    if blob.index is None:
        raise MalformedStream(f"a layer that is neither tar, gzip nor zstd but {blob.form.value}", place=path)
    if layer.diff_id and blob.diff_id != layer.diff_id:
        raise Mismatch(f"uncompressed content is {blob.diff_id}, the config says {layer.diff_id}", place=path)
    stored = None if blob.form in (Form.TAR, Form.EMPTY) else blob.stored_bytes
    diff_id = blob.diff_id or layer.diff_id
    return replace(layer, diff_id=diff_id, stored_bytes=stored, tar_bytes=blob.tar_bytes, index=blob.index)


def _layer(blob: Blob, path: str, config: ImageConfig, at: int) -> Layer:
    command = config.commands[at] if config.commands else None
    return with_index(Layer(blob.digest, config.diff_ids[at], None, 0, command, None), blob, path)


def _member(archive: Archive, path: str) -> Blob:
    """The blob at a path of manifest.json. Raises MissingContent, and the blob's error."""
    try:
        blob = archive.blob(normal_path(path))
    except KeyError as error:
        raise MissingContent("manifest.json names it, the archive lacks it", place=path) from error
    if blob.error:
        raise blob.error
    return blob


def _contents(
    ref: str, config: ImageConfig, blob: Blob, layers: tuple[Layer, ...], *, notes: tuple[str, ...]
) -> ImageContents:
    """An image without manifest: only its config (`blob`) has a digest."""
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


def _name_notes(path: str, blob: Blob) -> tuple[str, ...]:
    """A config's name is its digest where docker wrote it; engines don't check that, but it may be damage."""
    stem = posixpath.basename(path).removesuffix(".json").removeprefix("sha256:")
    if len(stem) != 64 or blob.digest == f"sha256:{stem}":
        return ()
    return (f"{path}: the config's digest is {blob.digest}, not its name; it was renamed or changed",)
