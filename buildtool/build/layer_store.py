"""The layers and images that builds have written, as one OCI layout: `.weir/layout`.

A layer is made once for its inputs (its key), and found by it afterwards. Every image that was built last is
named in the layout's index, so that other tools read it as it lies: `skopeo copy oci:.weir/layout:cpu ...`.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buildtool.core.errors import DataError
from buildtool.core.files import (
    discard,
    lock_if_free,
    locked,
    open_lock,
    read_cached,
    replacing,
    require_sha256,
    scratch,
    write_text,
)
from buildtool.engine.proof import unproved
from buildtool.image.layer_writer import ZSTD, Compression, LayerWriter, pieces_at
from buildtool.image.written import (
    BLOBS,
    LAYOUT,
    REF_NAME,
    LayerFile,
    Referrer,
    WrittenImage,
    blob_path,
    digest_of,
    index_of,
)
from probes.core.codec import decode, encode, load
from probes.core.quoting import terminal

FORMAT = 3  # part of every key: raise it when the same inputs would give another layer
# of layers that no image has; the service's have 1 MB, torch's 0.1 to 3 GB
KEPT_BYTES, KEPT_LAYERS = 6_000_000_000, 200
Make = Callable[[LayerWriter], LayerFile]
# of a layout; the last two are of `docker save`
_PARTS = ("oci-layout", "index.json", "blobs", "manifest.json", "repositories")


class LayerStore:
    """Layers by what they are made from, and images, below a state directory."""

    def __init__(self, state: Path, compression: Compression = ZSTD) -> None:
        self._compression = compression
        self.layout = state / "layout"
        self._keys = state / "layers"
        self._bases = state / "bases"

    # ---- layers

    def key(self, *inputs: object) -> str:
        """What finds a layer again: all that its bytes depend on, by `repr`."""
        return hashlib.sha256(repr((FORMAT, self._compression.version, *inputs)).encode()).hexdigest()

    def known(self, key: str) -> LayerFile | None:
        """The layer that an earlier build made for a key; None where it isn't there with its full length."""
        layer = read_cached(self._keys / f"{key}.json", _layer)
        if layer is None:
            return None
        path = self.blob(layer.digest)
        if not path.is_file() or path.stat().st_size != layer.n_bytes:
            return None
        with contextlib.suppress(OSError):  # of another user: then it counts as old
            os.utime(self._keys / f"{key}.json")
        return layer

    def bring(self, key: str, make: Make, *, anew: bool = False) -> tuple[LayerFile, bool]:
        """The layer of a key, and whether it was made now: because it wasn't there, or `anew`.

        Raises as `make` and `files.replacing` do.
        """
        layer = None if anew else self.known(key)
        if layer is not None:
            return layer, False
        blobs = self.layout / BLOBS
        with scratch(self.layout) as folder:
            path = folder / "layer"
            with path.open("wb") as out:
                layer = make(LayerWriter(out, self._compression))
                out.flush()
                os.fsync(out.fileno())
            blobs.mkdir(parents=True, exist_ok=True)
            path.replace(self.blob(layer.digest))
        write_text(self._keys / f"{key}.json", json.dumps(encode(layer)))
        return layer, True

    def blob(self, digest: str) -> Path:
        """Where what has a digest is, or would be."""
        return self.layout / BLOBS / digest.removeprefix("sha256:")

    def content(self, layer: LayerFile) -> Iterator[bytes]:
        """A layer's bytes as stored. Raises DataError for one that isn't there."""
        return _content(self.blob(layer.digest))

    # ---- images

    def put(self, image: WrittenImage) -> None:
        """Write an image's documents beside its layers. Raises as `files.replacing` does."""
        for text in (image.config, image.manifest):
            _put(self.blob(digest_of(text)), text)

    def document(self, digest: str, fetch: Callable[[str], bytes]) -> bytes:
        """A document of a base image, fetched where it isn't here yet. Raises as `fetch` does."""
        if not _is_digest(digest):
            raise DataError(f"{digest[:80]!r} is no digest", "resolve the base again: --update-lock")
        path = self._bases / digest.removeprefix("sha256:")
        if not path.is_file() or digest_of(path.read_bytes()) != digest:
            _put(path, fetch(digest))
        return path.read_bytes()

    def name(self, images: Mapping[str, WrittenImage], annotations: Mapping[str, Mapping[str, str]]) -> None:
        """Give images their names in the layout's index, all in one step. Raises as `write_text` does.

        Names of earlier builds stay, unless their blobs are gone.
        """
        replaced = {*images, *map(unproved, images)}
        self.layout.mkdir(parents=True, exist_ok=True)
        with locked(self.layout, lambda: None):  # against another build that ends now
            rows = {name: row for name, row in self._rows().items() if name not in replaced}
            for name, image in images.items():
                rows[name] = image.descriptor({REF_NAME: name, **annotations.get(name, {})})
            write_text(self.layout / "oci-layout", LAYOUT.decode())
            write_text(self.layout / "index.json", index_of([rows[name] for name in sorted(rows)]).decode())

    def held_by(self, has: Callable[[str], bool]) -> frozenset[str]:
        """The layers of named images that an engine `has`, by their ids: of manifest or config."""
        digests: set[str] = set()
        for row in self._rows().values():
            manifest, config, *layers = self._blobs_of(row["digest"])
            if has(manifest) or has(config):
                digests |= {*layers}
        return frozenset(digests)

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the image of a name in the layout's index; none where there is no such image."""
        try:
            config: Any = read_cached(self.blob(self._blobs_of(self._rows()[name]["digest"])[1]), load)
            return {str(key): str(value) for key, value in (config["config"].get("Labels") or {}).items()}
        except (LookupError, TypeError):  # also where another run has just removed it
            return {}

    def copy(self, image: WrittenImage, name: str, target: Path, referrers: Sequence[Referrer] = ()) -> None:
        """Write an image as a layout of its own, whole or not at all; it replaces one that is there.

        The `referrers` are what is said of the image.

        Blobs are hard links where that is possible. Raises DataError for a damaged blob and for a target
        that is something other than a layout, EnvironmentMissing for a full disk.
        """
        require_layout_or_nothing(target)
        if target.resolve() == self.layout.resolve():
            raise DataError(f"{target} holds all images that are built here", "name another directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent) as folder:
            made = folder / "layout"
            (made / BLOBS).mkdir(parents=True)
            for digest in dict.fromkeys([*(layer.digest for layer in image.layers), *image.ids]):
                origin, place = self.blob(digest), made / BLOBS / digest.removeprefix("sha256:")
                require_sha256(
                    origin,
                    place.name,
                    "the cached layer",
                    way_out="run the same command again to make it anew",
                )
                _link(origin, place)
            for referrer in referrers:
                for text in (*referrer.blobs, referrer.manifest):
                    _put(made / blob_path(digest_of(text)), text)
            write_text(made / "oci-layout", LAYOUT.decode())
            row = self._rows().get(name, {})
            if row.get("digest") != image.digest:
                row = image.descriptor({REF_NAME: name})
            rows = [row, *(referrer.descriptor() for referrer in referrers)]
            write_text(made / "index.json", index_of(rows).decode())
            if target.exists():
                target.replace(folder / "old")
            made.replace(target)

    # ---- what is kept

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep what is here from being evicted during the block; before it, evict what nobody uses."""
        lock = self.layout / "lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock_if_free(lock) as ours:
            if ours:
                self._evict()
        descriptor = open_lock(lock)
        try:
            yield
        finally:
            os.close(descriptor)

    def _rows(self) -> dict[str, dict[str, Any]]:
        """The descriptors in the index by name, of images that are whole."""
        index: Any = read_cached(self.layout / "index.json", load)
        rows = index.get("manifests") if isinstance(index, dict) else None
        whole = {}
        for row in rows if isinstance(rows, list) else []:
            with contextlib.suppress(LookupError, TypeError, AttributeError):
                name = row["annotations"][REF_NAME]
                if all(self.blob(digest).is_file() for digest in self._blobs_of(row["digest"])):
                    whole[str(name)] = row
        return whole

    def _blobs_of(self, digest: str) -> list[str]:
        """A manifest's digest, and those of what it names. Raises LookupError, TypeError if damaged."""
        manifest: Any = read_cached(self.blob(digest), load) if _is_digest(digest) else None
        return [digest, manifest["config"]["digest"], *(row["digest"] for row in manifest["layers"])]

    def _evict(self) -> None:
        """Remove the blobs that no named image has, but for the newest layers."""
        keep = {digest for row in self._rows().values() for digest in self._blobs_of(row["digest"])}
        keys = sorted(self._keys.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        n_loose = n_bytes = 0
        for path in keys:
            layer = read_cached(path, _layer)
            if layer and layer.digest not in keep:
                n_loose, n_bytes = n_loose + 1, n_bytes + layer.n_bytes
                keep |= {layer.digest} if n_loose <= KEPT_LAYERS and n_bytes <= KEPT_BYTES else set()
            if not layer or layer.digest not in keep:
                discard(path)
        for path in (self.layout / BLOBS).glob("*"):
            if f"sha256:{path.name}" not in keep:
                discard(path)


def require_layout_or_nothing(target: Path) -> None:
    """Refuse to replace something other than an OCI layout. Raises DataError."""
    if target.is_symlink() or (
        target.exists() and not ((target / "oci-layout").is_file() or _is_empty(target))
    ):
        raise DataError(f"{target} is there, and no OCI layout", "name another directory: --layout DIR")
    others = (
        sorted(path.name for path in target.iterdir() if path.name not in _PARTS) if target.is_dir() else []
    )
    if others:
        raise DataError(
            f"{target} holds more than an OCI layout, which would be lost: {terminal(', '.join(others[:4]))}",
            "name another directory: --layout DIR",
        )
    if target.resolve() == Path.cwd():
        raise DataError(f"{target} is the current directory", "name another one: --layout DIR")
    index: Any = read_cached(target / "index.json", load)
    rows = index.get("manifests") if isinstance(index, dict) else None
    images = (
        [row for row in rows if isinstance(row, dict) and "artifactType" not in row]
        if isinstance(rows, list)
        else []
    )
    if len(images) > 1:
        raise DataError(f"{target} holds {len(images)} images", "name another directory: --layout DIR")


def _put(path: Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _is_digest(text: str) -> bool:
    return re.fullmatch(r"sha256:[0-9a-f]{64}", text) is not None


def _layer(text: str) -> LayerFile:
    """The layer that `bring` wrote down. Raises ValueError."""
    layer = decode(LayerFile, load(text), "layer")
    if not _is_digest(layer.digest):
        raise ValueError("not a digest")
    return layer


def _content(path: Path) -> Iterator[bytes]:
    try:
        yield from pieces_at(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is gone, which this build made", "run the same command again to make it anew"
        ) from error


def _link(origin: Path, target: Path) -> None:
    try:
        os.link(origin, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(origin, target)
