"""An image as it is written: its config and manifest, and the archive of it that `docker load` reads.

Builds and prunes make their images with this. The same values give the same bytes, on every host.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buildtool.core.errors import DataError

OCI = "application/vnd.oci.image"
BLOBS = "blobs/sha256"
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class LayerFile:
    """A layer on disk. Digests are `sha256:...`: `diff_id` is that of the tar, `digest` that of the file.

    `compression` is that of the file: `zstd`, `gzip`, or empty for a plain tar.
    """

    diff_id: str
    digest: str
    n_bytes: int
    compression: str = "zstd"

    def descriptor(self) -> dict[str, object]:
        """The layer in a manifest."""
        kind = f"{OCI}.layer.v1.tar{'+' if self.compression else ''}{self.compression}"
        return {"mediaType": kind, "digest": self.digest, "size": self.n_bytes}


@dataclass(frozen=True)
class WrittenImage:
    """An image: its documents as bytes, and its layers from the bottom up.

    A containerd store identifies it by `digest`, that of the manifest, the classic store by `config_digest`.
    """

    manifest: bytes
    config: bytes
    layers: tuple[LayerFile, ...]

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return digest_of(self.manifest)

    @property
    def config_digest(self) -> str:
        """The config's digest."""
        return digest_of(self.config)

    @property
    def below(self) -> str:
        """The digest of all but the last layer: of the other layers, and of how the image is run."""
        config = json.loads(self.config)
        run = {key: config[key] for key in sorted(config) if key not in ("rootfs", "history")}
        return digest_of(packed([run, [layer.digest for layer in self.layers[:-1]]]))

    @property
    def ids(self) -> tuple[str, str]:
        """By which engines know it."""
        return self.digest, self.config_digest

    def descriptor(self, annotations: Mapping[str, str]) -> dict[str, object]:
        """The image in an index."""
        row: dict[str, object] = {**_descriptor("manifest", self.manifest)}
        return {**row, "annotations": dict(annotations)} if annotations else row


@dataclass(frozen=True)
class Referrer:
    """A manifest about an image, which its `subject` names, and the blobs that it names itself.

    `row` are further members of its descriptor in an index.
    """

    manifest: bytes
    blobs: tuple[bytes, ...]
    row: Mapping[str, object]

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return digest_of(self.manifest)

    def descriptor(self) -> dict[str, object]:
        """The manifest in an index."""
        return {**_descriptor("manifest", self.manifest), **self.row}


EMPTY = b"{}"  # the config of a manifest that is no image's


def referrer(
    subject: Mapping[str, object],
    artifact_type: str,
    layers: Sequence[tuple[bytes, str, Mapping[str, str]]],
    *,
    annotations: Mapping[str, str] | None = None,
    row: Mapping[str, object] | None = None,
) -> Referrer:
    """A manifest about the image of a descriptor; layers are content, media type and annotations."""
    rows: list[dict[str, object]] = []
    for content, kind, own in layers:
        layer: dict[str, object] = {"mediaType": kind, "digest": digest_of(content), "size": len(content)}
        rows.append({**layer, **({"annotations": dict(own)} if own else {})})
    noted = {"annotations": dict(annotations)} if annotations else {}
    manifest = packed({
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "artifactType": artifact_type,
        "config": {
            "mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(EMPTY), "size": len(EMPTY),
        },
        "layers": rows,
        "subject": {key: subject[key] for key in ("mediaType", "digest", "size")},
        **noted,
    })  # fmt: skip
    contents = (EMPTY, *(content for content, _, _ in layers))
    return Referrer(manifest, contents, {"artifactType": artifact_type, **noted, **(row or {})})


def written_image(
    config: Mapping[str, Any], layers: Sequence[LayerFile], history: Sequence[Mapping[str, Any]]
) -> WrittenImage:
    """The image with this config and these layers; `rootfs` and `history` of the config are replaced.

    Raises DataError for a number that JSON doesn't have.
    """
    rootfs = {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]}
    text = packed({**config, "rootfs": rootfs, "history": [dict(step) for step in history]})
    manifest = packed({
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": _descriptor("config", text),
        "layers": [layer.descriptor() for layer in layers],
    })  # fmt: skip
    return WrittenImage(manifest, text, tuple(layers))


def index_of(rows: Sequence[Mapping[str, object]]) -> bytes:
    """An index of images, by their descriptors."""
    return packed({
        "schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [dict(row) for row in rows],
    })  # fmt: skip


def archive_chunks(
    image: WrittenImage,
    name: str,
    content: Callable[[LayerFile], Iterator[bytes]],
    *,
    without: Collection[str] = (),
) -> Iterator[bytes]:
    """The image as a tar in chunks, for `docker load`, called `name` (with host and tag).

    `content` gives a layer's bytes; layers whose digests are in `without` stay out, because the engine has
    them. Both kinds of image store read it: it has an OCI index, and docker's manifest.json.
    """
    for path, text in _documents(image, name).items():
        yield _header(path, len(text))
        yield text
        yield bytes(-len(text) % tarfile.BLOCKSIZE)
    sent: set[str] = {*without}
    for layer in image.layers:
        if layer.digest not in sent:
            sent.add(layer.digest)
            yield _header(blob_path(layer.digest), layer.n_bytes)
            yield from content(layer)
            yield bytes(-layer.n_bytes % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _documents(image: WrittenImage, name: str) -> dict[str, bytes]:
    annotations = {"io.containerd.image.name": name, REF_NAME: name.rpartition(":")[2]}
    config = blob_path(image.config_digest)
    layers = [blob_path(layer.digest) for layer in image.layers]
    return {
        "oci-layout": LAYOUT,
        "index.json": index_of([image.descriptor(annotations)]),
        "manifest.json": packed([{"Config": config, "RepoTags": [name], "Layers": layers}]),
        config: image.config,
        blob_path(image.digest): image.manifest,
    }


def blob_path(digest: str) -> str:
    """Where a layout has what has this digest."""
    return f"{BLOBS}/{digest.removeprefix('sha256:')}"


def digest_of(text: bytes) -> str:
    """`sha256:` and the hex digest."""
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def packed(value: object) -> bytes:
    """JSON in ASCII. Raises DataError for a number that JSON doesn't have."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise DataError(f"the image's config holds a value that JSON doesn't have: {error}") from error


def _descriptor(kind: str, text: bytes) -> dict[str, object]:
    return {"mediaType": f"{OCI}.{kind}.v1+json", "digest": digest_of(text), "size": len(text)}


def _header(path: str, n_bytes: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.size, info.mode = n_bytes, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)
