"""A base image that a registry has: its layers, brought into the store of layers as they are."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from buildtool.build.layer_store import LayerStore
from buildtool.core.errors import DataError
from buildtool.core.files import replacing
from buildtool.core.model import PinnedBase
from buildtool.core.progress import Progress
from buildtool.engine.host import require_free_space
from buildtool.engine.reference import Reference, parse_reference
from buildtool.engine.registry_api import Registry
from buildtool.image.documents import Descriptor, Manifest, parse_config, parse_index_or_manifest
from buildtool.image.errors import LIMITS
from buildtool.image.reader import host_platform
from buildtool.image.written import LayerFile
from buildtool.prune.flat_image import chosen_manifest, read_config
from probes.core.units import decimal_bytes

_INDEXES = 4  # one within another, at most


@dataclass(frozen=True)
class RegistryBase:
    """A base image: its layers from the bottom up, its config and the steps of its history."""

    layers: tuple[LayerFile, ...]
    config: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...] = field(default=())


def registry_digest(ref: str) -> str:
    """The digest of the manifest (or index) that a registry has for a reference now.

    Raises as the methods of `Registry` do.
    """
    name = parse_reference(ref)
    with closing(Registry(name)) as registry:
        return registry.digest(name.digest or name.tag or "latest")


def fetch_base(base: PinnedBase, store: LayerStore, progress: Progress) -> RegistryBase:
    """The pinned image for this host's platform, with every layer in the store.

    Raises as the methods of `Registry` do, and DataError for documents that can't be read.
    """
    name = parse_reference(base.name)
    with closing(Registry(name)) as registry:
        manifest = _manifest(base.pin, lambda digest: store.document(digest, registry.manifest))
        most = min(manifest.config.stored_bytes, LIMITS.document_bytes)
        text = store.document(manifest.config.digest, lambda digest: b"".join(registry.blob(digest, most)))
        config = read_config(text)
        diff_ids = parse_config(text, place=base.name).diff_ids
        if len(diff_ids) != len(manifest.layers):
            raise DataError(f"{base.name}: its config names another number of layers than its manifest")
        for row in manifest.layers:
            _bring(row, name, registry, store=store, progress=progress)
    layers = tuple(
        LayerFile(diff_id, row.digest, row.stored_bytes, _compression(row))
        for diff_id, row in zip(diff_ids, manifest.layers, strict=True)
    )
    steps = config.get("history")
    history = tuple(step for step in steps if isinstance(step, Mapping)) if isinstance(steps, list) else ()
    return RegistryBase(layers, config, history)


def _manifest(pin: str, document: Callable[[str], bytes]) -> Manifest:
    """The manifest for this host's platform."""
    for _ in range(_INDEXES):
        parsed = parse_index_or_manifest(document(pin), place=pin)
        if isinstance(parsed, Manifest):
            return parsed
        pin = chosen_manifest(parsed, host_platform(), pin)
    raise DataError(f"{pin}: indexes within indexes without end")


def _bring(
    row: Descriptor, name: Reference, registry: Registry, *, store: LayerStore, progress: Progress
) -> None:
    path = store.blob(row.digest)
    if path.is_file() and path.stat().st_size == row.stored_bytes:
        return
    progress(f"{name}: fetching a layer of {decimal_bytes(row.stored_bytes)}")
    require_free_space(store.layout, row.stored_bytes, f"fetching {name}")
    with replacing(path) as part, part.open("wb") as file:
        for piece in registry.blob(row.digest, row.stored_bytes):
            file.write(piece)


def _compression(row: Descriptor) -> str:
    """How a layer is compressed, by its media type. Raises DataError for a form that isn't known."""
    for ending, name in ((("gzip",), "gzip"), (("zstd",), "zstd"), ((".tar",), "")):
        if row.media_type.endswith(ending):
            return name
    raise DataError(f"a layer of the type {row.media_type[:80]!r} can't be a base", "take another base")
