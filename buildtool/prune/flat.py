"""Remakes an image from one root file system: config, manifest, and the archive that engines load. Pure.

The original's config is JSON and stays JSON: none of it ever becomes text of a Dockerfile or a shell.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from buildtool.errors import DataError
from buildtool.jsontext import joined, with_names
from buildtool.model import LABEL

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
    described = {"mediaType": kind, "digest": layer.digest, "size": layer.n_bytes}
    manifest = _packed({
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": _descriptor("config", config),
        "layers": [described],
    })  # fmt: skip
    return _laid_out(manifest, config, layer, name)


def archive(image: FlatImage, layer: Iterator[bytes]) -> Iterator[bytes]:
    """The image as a tar in chunks, for `docker load`; `layer` gives the layer's bytes."""
    for path, text in image.documents.items():
        yield _header(path, len(text))
        yield text
        yield bytes(-len(text) % tarfile.BLOCKSIZE)
    yield _header(image.layer_path, image.layer_bytes)
    yield from layer
    yield bytes(-image.layer_bytes % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


def created(record: Mapping[str, Any]) -> int:
    """When an image was made, seconds since 1970; 0 where the config doesn't record it."""
    text = str(record.get("Created") or "1970-01-01T00:00:00")
    return max(0, int(datetime.fromisoformat(text[:19] + "+00:00").timestamp()))


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


def _labels(targets: str) -> dict[str, str]:
    return {f"{LABEL}.gpu-targets": targets, f"{LABEL}.pruned": "yes"}


def _laid_out(manifest: bytes, config: bytes, layer: LayerFile, name: str) -> FlatImage:
    """With both lists: an OCI index for containerd's store, manifest.json for the classic one."""
    config_path, layer_path = (
        f"{_BLOBS}/{digest.removeprefix('sha256:')}" for digest in (_digest(config), layer.digest)
    )
    named = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    index = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.index.v1+json",
        "manifests": [{**_descriptor("manifest", manifest), "annotations": named}],
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


def _header(path: str, n_bytes: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.size, info.mode = n_bytes, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)
