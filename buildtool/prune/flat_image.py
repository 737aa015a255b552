"""An image of one layer, and the config that it is made from, out of an engine's archive."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from buildtool.core.errors import DataError
from buildtool.core.json_text import joined, with_names
from buildtool.core.model import LABEL
from buildtool.image.documents import Index, Platform, parse_index_or_manifest, parse_json
from buildtool.image.errors import LIMITS, Limits
from buildtool.image.tar import FILE, TarReader
from buildtool.image.written import LayerFile, WrittenImage, written_image


def flat_image(original: bytes, layer: LayerFile, *, targets: str) -> WrittenImage:
    """The image of one layer with the config `original`.

    Only rootfs, history and our two labels differ from the original's; everything else, known or
    unknown, is copied. Raises DataError for a config that can't be read.
    """
    document = read_config(original)
    step = {"created_by": f"weir prune --targets {targets}"}
    if document.get("created") is not None:
        step["created"] = document["created"]
    run = dict(document.get("config") or {})
    run["Labels"] = {**(run.get("Labels") or {}), **_labels(targets)}
    return written_image({**document, "config": run}, [layer], [step])


def _labels(targets: str) -> dict[str, str]:
    return {f"{LABEL}.gpu-targets": targets, f"{LABEL}.pruned": "yes"}


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
        wanted = (
            chosen_manifest(parsed, platform, wanted) if isinstance(parsed, Index) else parsed.config.digest
        )
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


def chosen_manifest(index: Index, platform: Platform, place: str) -> str:
    """The digest for the platform in an index; a variant counts only where several differ in it."""
    rows = [row for row in index.manifests if not row.is_attestation]
    same = [row for row in rows if platform.resembles(row.platform)]
    exact = [row for row in same if row.platform == platform]
    for row in (*exact, *same, *(rows if len(rows) == 1 else ())):
        return str(row.digest)
    raise DataError(f"{place} has no image for {platform}")
