"""Finds an image's config, as its maker wrote it, in what `docker save` gives. Pure."""

import hashlib
from collections.abc import Iterator, Mapping

from buildtool.audit.read.documents import Index, Platform, parse_index_or_manifest, parse_json
from buildtool.audit.tar.limits import LIMITS, Limits
from buildtool.audit.tar.tarwalk import FILE, TarReader
from buildtool.errors import DataError


def config_of(
    chunks: Iterator[bytes], image_id: str, *, platform: Platform, limits: Limits = LIMITS
) -> bytes:
    """The config of the image `image_id` (`sha256:...`) in an engine's archive, which is read to its end.

    The id may be that of an index, of a manifest (containerd's store) or of the config (the classic store).
    `platform` chooses the image of an index. Raises DataError, ImageFault.
    """
    documents = _documents(chunks, image_id, limits)
    wanted = image_id
    for _ in range(limits.index_depth + 1):
        text = _document(documents, wanted)
        if not _names_others(text, wanted, limits):
            return text
        found = parse_index_or_manifest(text, place=wanted, limits=limits)
        wanted = _chosen(found, platform, wanted) if isinstance(found, Index) else found.config.digest
    raise DataError(f"{image_id}: indexes within indexes without end")


def _documents(chunks: Iterator[bytes], label: str, limits: Limits) -> dict[str, bytes]:
    """Everything in the archive that is small enough for a document, by its path there."""
    found: dict[str, bytes] = {}
    left = limits.documents_bytes
    reader = TarReader(chunks, place=label, limits=limits)
    for name, kind, size, _ in reader:
        if kind == FILE and size <= min(limits.document_bytes, left):
            content = b"".join(reader.content())
            if content[:1] == b"{":
                found[name.decode("utf-8", "surrogateescape")] = content
                left -= size
    reader.drain()
    return found


def _document(documents: Mapping[str, bytes], digest: str) -> bytes:
    name = digest.removeprefix("sha256:")
    for path in (f"blobs/sha256/{name}", f"{name}.json"):  # the second: engines before 25
        text = documents.get(path)
        if text is not None and hashlib.sha256(text).hexdigest() == name:
            return text
    raise DataError(f"the engine's archive lacks {digest}, or holds something else under its name")


def _names_others(text: bytes, place: str, limits: Limits) -> bool:
    """Is it an index or a manifest, and not a config?"""
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
