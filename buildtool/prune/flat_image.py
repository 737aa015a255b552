"""An image of one layer: its documents, and the tar that `docker load` reads.

Also reads an image's config out of an engine's archive, as the one that the new image's config is made from.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from buildtool.core.errors import DataError
from buildtool.core.json_text import joined, with_names
from buildtool.core.model import LABEL
from buildtool.image.documents import Index, Platform, parse_index_or_manifest, parse_json
from buildtool.image.errors import LIMITS, Limits
from buildtool.image.tar import FILE, TarReader

OCI = "application/vnd.oci.image"
_BLOBS = "blobs/sha256"


@dataclass(frozen=True)
class LayerFile:
    """A layer on disk. Digests are `sha256:...`: `diff_id` is that of the tar, `digest` that of the file."""

    diff_id: str
    digest: str
    n_bytes: int
    zstd: bool


@dataclass(frozen=True)
class FlatImage:
    """An image of one layer: its documents by their path in an archive, and the layer's own path there.

    `ids` are the digests of manifest and config: a containerd store identifies an image by the first, the
    classic store by the second.
    """

    documents: Mapping[str, bytes]
    layer_path: str
    layer_bytes: int
    ids: tuple[str, str]


def flat_image(original: bytes, layer: LayerFile, *, name: str, targets: str) -> FlatImage:
    """The image of one layer with the config `original`, called `name` (with host and tag).

    Only rootfs, history and our two labels differ from the original's; everything else, known or
    unknown, is copied. Raises DataError for a config that can't be read.
    """
    document = read_config(original)
    step = {"created_by": f"weir prune --targets {targets}"}
    if document.get("created") is not None:
        step["created"] = document["created"]
    run = dict(document.get("config") or {})
    run["Labels"] = {**(run.get("Labels") or {}), **_labels(targets)}
    config = _packed({
        **document,
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
        "history": [step],
    })  # fmt: skip
    kind = f"{OCI}.layer.v1.tar{'+zstd' if layer.zstd else ''}"
    layer_descriptor = {"mediaType": kind, "digest": layer.digest, "size": layer.n_bytes}
    manifest = _packed({
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": _descriptor("config", config),
        "layers": [layer_descriptor],
    })  # fmt: skip
    return _laid_out(manifest, config, layer, name)


def _labels(targets: str) -> dict[str, str]:
    return {f"{LABEL}.gpu-targets": targets, f"{LABEL}.pruned": "yes"}


def _laid_out(manifest: bytes, config: bytes, layer: LayerFile, name: str) -> FlatImage:
    """The documents with both lists: an OCI index for containerd's store, manifest.json for docker's."""
    config_path, layer_path = (
        f"{_BLOBS}/{digest.removeprefix('sha256:')}" for digest in (_digest(config), layer.digest)
    )
    annotations = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.index.v1+json",
        "manifests": [{**_descriptor("manifest", manifest), "annotations": annotations}],
    }
    saved = [{"Config": config_path, "RepoTags": [name], "Layers": [layer_path]}]
    documents = {
        "oci-layout": _packed({"imageLayoutVersion": "1.0.0"}),
        "index.json": _packed(index),
        "manifest.json": _packed(saved),
        config_path: config,
        f"{_BLOBS}/{_digest(manifest).removeprefix('sha256:')}": manifest,
    }
    return FlatImage(documents, layer_path, layer.n_bytes, (_digest(manifest), _digest(config)))


def _descriptor(kind: str, text: bytes) -> dict[str, object]:
    return {"mediaType": f"{OCI}.{kind}.v1+json", "digest": _digest(text), "size": len(text)}


def _digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def _packed(value: object) -> bytes:
    """JSON in ASCII. Raises DataError for a number that JSON doesn't have."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise DataError(f"the image's config holds a value that JSON doesn't have: {error}") from error


def archive_chunks(image: FlatImage, layer: Iterator[bytes]) -> Iterator[bytes]:
    """The image as a tar in chunks, for `docker load`; `layer` gives the layer's bytes."""
    for path, text in image.documents.items():
        yield _header(path, len(text))
        yield text
        yield bytes(-len(text) % tarfile.BLOCKSIZE)
    yield _header(image.layer_path, image.layer_bytes)
    yield from layer
    yield bytes(-image.layer_bytes % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


def _header(path: str, n_bytes: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.size, info.mode = n_bytes, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


# The original's config.


def read_config(text: bytes) -> dict[str, Any]:
    """A config as a value, as the engine reads it: what isn't UTF-8 becomes U+FFFD.

    The fields that a pruned image's config replaces or extends have their right names. Raises DataError.
    """
    try:
        document = json.loads(text.decode("utf-8", "replace"), object_pairs_hook=joined)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the image's config is not JSON: {error}") from error
    document = with_names(document, {"config": ("Labels",), "rootfs": (), "history": (), "created": ()})
    run = document.get("config") if isinstance(document, dict) else None
    labels = run.get("Labels") if isinstance(run, dict) else None
    if not isinstance(document, dict) or not all(isinstance(part, dict | None) for part in (run, labels)):
        raise DataError("the image's config doesn't have the form that engines write")
    return document


def config_of(
    chunks: Iterator[bytes], image_id: str, *, platform: Platform, limits: Limits = LIMITS
) -> bytes:
    """The config of the image `image_id` (`sha256:...`) in an engine's archive, which is read to its end.

    The id may be that of an index, of a manifest (containerd's store) or of the config (the classic store).
    `platform` chooses the image of an index. Raises DataError, ImageError.
    """
    documents = _documents(chunks, image_id, limits)
    wanted = image_id
    for _ in range(limits.index_depth + 1):
        text = _document(documents, wanted)
        if not _names_others(text, wanted, limits):
            return text
        parsed = parse_index_or_manifest(text, place=wanted, limits=limits)
        wanted = _chosen(parsed, platform, wanted) if isinstance(parsed, Index) else parsed.config.digest
    raise DataError(f"{image_id}: indexes within indexes without end")


def _documents(chunks: Iterator[bytes], label: str, limits: Limits) -> dict[str, bytes]:
    """Everything in the archive that is small enough for a document, by its path there."""
    documents: dict[str, bytes] = {}
    left = limits.documents_bytes
    reader = TarReader(chunks, place=label, limits=limits)
    for name, kind, size, _ in reader:
        if kind == FILE and size <= min(limits.document_bytes, left):
            content = b"".join(reader.content())
            if content[:1] == b"{":
                documents[name.decode("utf-8", "surrogateescape")] = content
                left -= size
    reader.drain()
    return documents


def _document(documents: Mapping[str, bytes], digest: str) -> bytes:
    name = digest.removeprefix("sha256:")
    for path in (f"blobs/sha256/{name}", f"{name}.json"):  # the second: engines before 25
        text = documents.get(path)
        if text is not None and hashlib.sha256(text).hexdigest() == name:
            return text
    raise DataError(f"the engine's archive lacks {digest}, or holds something else under its name")


def _names_others(text: bytes, place: str, limits: Limits) -> bool:
    """Whether a document is an index or a manifest, and not a config."""
    top = parse_json(text, place=place, limits=limits)
    return isinstance(top, Mapping) and ("manifests" in top or "layers" in top)


def _chosen(index: Index, platform: Platform, place: str) -> str:
    """The digest for the platform in an index; a variant counts only where several differ in it."""
    rows = [row for row in index.manifests if not row.is_attestation]
    same = [row for row in rows if platform.resembles(row.platform)]
    exact = [row for row in same if row.platform == platform]
    for row in (*exact, *same, *(rows if len(rows) == 1 else ())):
        return str(row.digest)
    raise DataError(f"{place} has no image for {platform}")
