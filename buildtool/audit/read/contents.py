"""One image as it was read: its config and its layers with their indexes."""

from dataclasses import dataclass

from buildtool.audit.read.documents import ImageConfig
from buildtool.audit.read.layer import LayerIndex

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
        found: dict[str, list[int]] = {}
        for at, layer in enumerate(self.layers):
            for note in layer.index.notes if layer.index else ():
                found.setdefault(note, []).append(at)
        return tuple(
            f"layer{'s' * (len(where) > 1)} {', '.join(map(str, where[:5]))}"
            f"{' and more' * (len(where) > 5)}: {note}"
            for note, where in found.items()
        )
