"""Pushes images from the layout to registries; what a registry has is never sent again.

A blob that another repository of the registry has is taken from there (a cross-repository mount). The
manifest comes last: a push that ends halfway leaves no tag behind that names half an image.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from buildtool.build.layer_store import LayerStore
from buildtool.core.command import stop_children
from buildtool.core.errors import BuildFailed, DataError, EnvironmentMissing
from buildtool.core.files import locked, read_cached, require_sha256, write_text
from buildtool.core.parallel import run_parallel
from buildtool.core.progress import Progress
from buildtool.engine.reference import Reference
from buildtool.engine.registry_api import Registry, RegistryBroken
from buildtool.image.written import OCI, Referrer, WrittenImage
from probes.core.units import counted, decimal_bytes

_AT_ONCE = 3
_REMEMBERED = 1000  # blobs of a registry


@dataclass(frozen=True)
class Pushed:
    """Which repository of each registry has which blob, as far as pushes from here know."""

    folder: Path

    def repository_with(self, host: str, digest: str) -> str:
        """A repository that had the blob once; empty for none."""
        return self._known(host).get(digest, "")

    def remember(self, host: str, digests: Mapping[str, str]) -> None:
        """Write down what a registry has now. Raises as `write_text` does."""
        path = self._path(host)
        with locked(path.with_suffix(".lock"), lambda: None):
            known = [*{**self._known(host), **digests}.items()][-_REMEMBERED:]
            write_text(path, json.dumps(dict(known)))

    def _known(self, host: str) -> dict[str, str]:
        return read_cached(self._path(host), _repositories) or {}

    def _path(self, host: str) -> Path:
        return self.folder / f"{hashlib.sha256(host.encode()).hexdigest()}.json"


def _repositories(text: str) -> dict[str, str]:
    data = json.loads(text)
    return {str(digest): str(repository) for digest, repository in data.items()}


def push(
    image: WrittenImage,
    name: Reference,
    *,
    store: LayerStore,
    pushed: Pushed,
    progress: Progress,
    referrers: Sequence[Referrer] = (),
) -> str:
    """Push an image under a name; returns the digest that the registry has for it.

    What is said of it, `referrers`, is there before its tag is.

    Raises as the methods of `Registry` do, and BuildFailed where another push moved the tag meanwhile.
    """
    sizes = {layer.digest: layer.n_bytes for layer in image.layers} | {image.config_digest: len(image.config)}
    tasks = [partial(_send, name, digest, store, pushed) for digest in sizes]
    ways = dict(zip(sizes, run_parallel(tasks, workers=_AT_ONCE, stop=stop_children), strict=True))
    sent = [sizes[digest] for digest, way in ways.items() if way == "sent"]
    there = [way for way in ways.values() if way != "sent"]
    with closing(Registry(name)) as registry:
        for referrer in referrers:
            registry.refer(referrer, image.digest)
        digest = registry.put_manifest(name.tag or "latest", image.manifest, f"{OCI}.manifest.v1+json")
        pushed.remember(name.host, dict.fromkeys(sizes, registry.repository))
    if digest != image.digest:
        raise BuildFailed(
            f"{name} was pushed as another image, {digest}: somebody moved that tag meanwhile",
            "run the same command again when no other build pushes that name",
        )
    mounted = there.count("mounted")
    elsewhere = f", {mounted} of them in another repository" if mounted else ""
    progress(
        f"{name}: sent {decimal_bytes(sum(sent))} in {counted(len(sent), 'blob')}, "
        f"{len(there)} were there{elsewhere}"
    )
    return digest


def _send(name: Reference, digest: str, store: LayerStore, pushed: Pushed) -> str:
    """Bring one blob to a registry: `there`, `mounted` or `sent`."""
    with closing(Registry(name)) as registry:
        with suppress(RegistryBroken):  # one whose disk was full can't read what it has of a blob
            if registry.has_blob(digest):
                return "there"
        origin = pushed.repository_with(name.host, digest)
        try:
            place = registry.mount(digest, origin if origin != registry.repository else "")
        except (EnvironmentMissing, DataError, BuildFailed):  # what is refused may be the mount alone
            place = registry.mount(digest, "")
        if place is None:
            return "mounted"
        blob, way_out = store.blob(digest), "run the same command again to make it anew"
        require_sha256(blob, digest.removeprefix("sha256:"), "the cached layer", way_out=way_out)
        registry.upload(place, blob, digest)
        return "sent"
