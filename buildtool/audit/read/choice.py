"""What the readers of every dialect share: choosing images by name, documents from blobs, layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from buildtool.audit.read.blob import Blob
from buildtool.audit.read.contents import Layer
from buildtool.audit.read.documents import ImageConfig, Platform
from buildtool.audit.tar.faults import (
    LimitExceeded,
    MalformedDocument,
    MalformedStream,
    Mismatch,
    NoSuchImage,
)
from buildtool.audit.tar.unpack import Form

_OFFERED = 40  # names in a hint


@dataclass(frozen=True)
class Wanted:
    """Which image of an archive is wanted; without a `ref`, the only one.

    `is_answer`: an engine made the archive for `ref`, which the archive may not contain (it may be an id).
    """

    label: str  # what messages call the archive
    ref: str | None = None
    is_answer: bool = False
    platform: Platform | None = None


@dataclass(frozen=True)
class Called:
    """The names of one image in an archive. The first digest distinguishes it from all others."""

    names: tuple[str, ...]
    digests: tuple[str, ...]

    def answers(self, ref: str) -> bool:
        """Does `--image ref` mean this image: by a name, by a digest, or by `name@digest`?"""
        return ref.rpartition("@")[2] in self.digests or any(same_name(ref, name) for name in self.names)


def choose(wanted: Wanted, images: Sequence[Called]) -> tuple[int, ...]:
    """Positions of the wanted images; several only where they are one image for several platforms.

    Raises NoSuchImage, whose hint names what `--image` accepts.
    """
    meant = [at for at, image in enumerate(images) if wanted.ref and image.answers(wanted.ref)]
    if not meant:
        if wanted.ref and not wanted.is_answer:
            raise NoSuchImage(f"{wanted.label} holds no image {wanted.ref}", _offered(images))
        meant = list(range(len(images)))
    if len({images[at].digests[0] for at in meant}) > 1:
        raise NoSuchImage(f"{wanted.label} holds several images", _offered([images[at] for at in meant]))
    return tuple(meant)


def shown_name(wanted: Wanted, image: Called) -> str:
    """The chosen image's name in a report: the name that was asked for, else the archive's."""
    if wanted.ref and (wanted.is_answer or not image.names or "sha256:" not in wanted.ref):
        return wanted.ref
    return next(iter(image.names), wanted.label)


def same_name(wanted: str, name: str) -> bool:
    """Do two references mean the same image? `docker.io/library/` and `:latest` may be left out."""
    return _full_name(wanted) == _full_name(name)


def document(blob: Blob, path: str) -> bytes:
    """A blob's JSON text. Raises LimitExceeded, MalformedDocument."""
    if blob.document is None and blob.form is Form.JSON:
        raise LimitExceeded(f"a JSON document of {blob.stored_bytes:,} bytes", place=path)
    if blob.document is None:
        raise MalformedDocument(f"not a JSON document but {blob.form.value}", place=path)
    return blob.document


def check_readable(media_type: str, at: int, place: str) -> None:
    """Raises MalformedStream for a layer whose media type says that it is encrypted."""
    if media_type.endswith("+encrypted"):
        raise MalformedStream(
            f"layer {at} is encrypted, so its files can't be read",
            place=place,
            hint="decrypt the image first, for example with `skopeo copy --decryption-key`",
        )


def indexed(layer: Layer, blob: Blob, path: str) -> Layer:
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


def with_unlisted_layers(config: ImageConfig, count: int, lister: str, place: str) -> ImageConfig:
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


def _offered(images: Sequence[Called]) -> str:
    """A hint that lists each image: by a name that no other image has, else by its digest."""
    holders: dict[str, set[str]] = {}
    for image in images:
        for name in image.names:
            holders.setdefault(name, set()).add(image.digests[0])
    words = (
        next((name for name in image.names if len(holders[name]) == 1), image.digests[0]) for image in images
    )
    offered = ", ".join(islice(dict.fromkeys(word for word in words if word), _OFFERED))
    return f"choose one with --image: {offered}" if offered else ""


def _full_name(name: str) -> str:
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
