"""What the readers of every dialect share: names compared, documents taken from blobs, layers checked."""

from dataclasses import replace

from buildtool.audit.archive import Blob
from buildtool.audit.contents import Layer
from buildtool.audit.faults import LimitExceeded, MalformedDocument, MalformedStream, Mismatch
from buildtool.audit.unpack import Form


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
    """The layer with its blob's index, after its diff_id was checked. Raises MalformedStream, Mismatch."""
    if blob.index is None:
        raise MalformedStream(f"a layer that is neither tar, gzip nor zstd but {blob.form.value}", place=path)
    if blob.diff_id != layer.diff_id:
        raise Mismatch(f"uncompressed content is {blob.diff_id}, the config says {layer.diff_id}", place=path)
    stored = None if blob.form in (Form.TAR, Form.EMPTY) else blob.stored_bytes
    return replace(layer, stored_bytes=stored, tar_bytes=blob.tar_bytes, index=blob.index)


def _full_name(name: str) -> str:
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rsplit("/", 1)[-1] or "@" in name else f"{name}:latest"
