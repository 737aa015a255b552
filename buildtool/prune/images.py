"""The order of pruning an image: files as one tar, prune, remake, prove, tag. The original isn't touched."""

import contextlib
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from buildtool.core.compression import zstd
from buildtool.core.errors import ConfigError, DataError, EnvironmentMissing, ProofFailed, ToolError
from buildtool.core.files import replacing, require_writable, scratch
from buildtool.core.json_text import joined, with_names
from buildtool.core.model import LABEL, ZSTD_LEVEL
from buildtool.core.progress import Progress
from buildtool.core.shipped import IMAGES
from buildtool.engine import proof
from buildtool.engine.client import Engine
from buildtool.engine.host import require_engine_space, require_free_space
from buildtool.engine.reference import Reference, parse_new_name, parse_reference
from buildtool.engine.tags import temporary_names
from buildtool.gpucode.source import naming
from buildtool.gpucode.target import TargetId, served
from buildtool.image.documents import Index, Platform, parse_index_or_manifest, parse_json
from buildtool.image.faults import LIMITS, Limits
from buildtool.image.tar import FILE, TarReader
from buildtool.image.unpack import Meter
from buildtool.prune.archives import archive_targets, prune_tar
from buildtool.prune.inputs import run_of
from buildtool.prune.manifest import IMAGE_PATH, MAX_BYTES, TreeResult, image_manifest, runs_in
from probes.core.quoting import command
from probes.core.units import decimal_bytes

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


def pack_layer(tar: Path, packed: Path, *, compress: bool) -> LayerFile:
    """Write `tar` to `packed` as a layer, and remove it. Without `compress` only its place changes.

    Raises as `files.replacing` does.
    """
    plain, stored = Meter(), Meter()
    with tar.open("rb") as file:
        chunks = plain.through(iter(partial(file.read, _CHUNK), b""))
        if not compress:
            for _ in chunks:
                pass
            tar.rename(packed)
            return LayerFile(plain.digest, plain.digest, plain.n_bytes, zstd=False)
        with replacing(packed) as part, part.open("wb") as out:
            for piece in stored.through(_compressed(chunks)):
                out.write(piece)
    tar.unlink()
    return LayerFile(plain.digest, stored.digest, stored.n_bytes, zstd=True)


def _compressed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """A zstd frame, compressed by all cores: how many doesn't change its bytes."""
    most = zstd.CompressionParameter.nb_workers.bounds()[1]
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: ZSTD_LEVEL,
        zstd.CompressionParameter.nb_workers: min(os.cpu_count() or 1, most),
        zstd.CompressionParameter.checksum_flag: 1,
    }
    packer = zstd.ZstdCompressor(options=options)
    for chunk in chunks:
        if piece := packer.compress(chunk):
            yield piece
    yield packer.flush()


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


_ENGINES_OWN = (".dockerenv",)  # put into every container, not part of an image
_TARS = 2  # copies of an image's files are on disk at once: all of them, and the pruned ones
_TEMPORARY = "weir-pruning"  # the name of a copy until it is proved
_CHUNK = 1 << 20


@dataclass(frozen=True)
class PrunedImage:
    """A pruned copy. `proof` is what was observed of it, or why nothing could be observed."""

    name: Reference
    image_id: str
    result: TreeResult
    proof: str


@dataclass(frozen=True)
class _Job:
    """The image as the engine knew it when the prune began; from then on only its id is used."""

    ref: str
    record: Mapping[str, Any]
    targets: tuple[TargetId, ...]
    engine: Engine
    folder: Path  # on disk for this prune alone
    progress: Progress

    @property
    def image_id(self) -> str:
        return str(self.record["Id"])

    def config(self) -> bytes:
        """As its maker wrote it. What can't be read is reported before anything is written."""
        self.progress(f"reading the configuration of {self.ref}")
        platform = Platform(*(str(self.record.get(key) or "") for key in ("Os", "Architecture", "Variant")))
        config = config_of(self.engine.save(self.image_id), self.image_id, platform=platform)
        read_config(config)
        return config

    def prune_files(self, room: int) -> TreeResult:
        """Write the pruned files to `rootfs.tar`; what is on disk at once may take `room` bytes."""
        whole = self.folder / "whole.tar"
        self.progress(f"taking the files out of {self.ref}")
        with replacing(whole) as part, part.open("wb") as file:
            for chunk in self.engine.export(self.image_id):
                file.write(chunk)
                if file.tell() * _TARS > room:
                    raise EnvironmentMissing(
                        f"{self.ref} has more files than the engine reports, and {decimal_bytes(room)} of "
                        "disk isn't enough for two copies",
                        "free some space (docker builder prune), or work elsewhere: WEIR_STATE=DIR",
                    )
        with naming(self.ref):
            served(archive_targets(whole, folder=self.folder), self.targets, strict=True)
        self.progress(f"pruning {decimal_bytes(whole.stat().st_size)} to {', '.join(map(str, self.targets))}")

        def manifest(result: TreeResult) -> dict[str, bytes]:
            runs = [*_earlier_runs(whole), run_of(self.ref, result)]
            return {IMAGE_PATH: image_manifest(self.targets, runs).encode()}

        with replacing(self.folder / "rootfs.tar") as part:
            result = prune_tar(
                whole,
                part,
                self.targets,
                latest=created(self.record),
                dropped=(*_ENGINES_OWN, IMAGE_PATH),
                added=manifest,
                progress=self.progress,
            )
        whole.unlink()
        return result

    def made(self, config: bytes, temporary: str) -> str:
        """Put the pruned image into the engine, under a temporary name, and return its id."""
        self.progress("making the pruned image")
        path, tar = self.folder / "layer", self.folder / "rootfs.tar"
        n_bytes = tar.stat().st_size
        layer = pack_layer(tar, path, compress=self.engine.info().containerd_store)
        # the engine keeps the layer, or a copy of it for as long as it loads it, and its files
        require_engine_space(
            self.engine, layer.n_bytes + n_bytes, "loading the pruned image", progress=self.progress
        )
        name = f"docker.io/library/{temporary}"
        image = flat_image(config, layer, name=name, targets=",".join(map(str, self.targets)))
        self.progress(f"loading it into the engine, {decimal_bytes(layer.n_bytes)}")
        with path.open("rb") as file:
            self.engine.load(archive(image, iter(partial(file.read, _CHUNK), b"")))
        path.unlink()
        record = self.engine.inspect(temporary)
        if record is None or record["Id"] not in image.ids:
            raise ProofFailed(f"the engine holds another image as {temporary} than the one it was given")
        return str(record["Id"])

    def proved(self, copy_id: str) -> str:
        """Run both images' self-test (images/smoke.py); both must report the same."""
        self.progress("proving the pruned image in a fresh container")
        script = (IMAGES / "smoke.py").read_text(encoding="utf-8")
        command = ["python3", "-B", "-c", script]
        try:
            before = self.engine.run(self.image_id, command)
            facts = proof.facts_of(before.stdout)
        except ToolError as error:
            return f"not proved: {self.ref} itself fails the smoke test ({error.message})"
        if before.exit_code or facts is None or not facts.product_ok:
            return f"not proved: {self.ref} itself fails the smoke test (exit {before.exit_code})"
        after = self.engine.run(copy_id, command)
        if after.exit_code or proof.facts_of(after.stdout) != facts:
            raise ProofFailed(
                f"pruned, {self.ref} prints something other than before:\n"
                f"{proof.output_tail(after.stdout + after.stderr)}\nbefore:\n"
                f"{proof.output_tail(before.stdout)}"
            )
        return proof.facts_text(facts)


def prune_image(
    ref: str,
    targets: Sequence[TargetId],
    tag: str | None,
    *,
    engine: Engine,
    state: Path,
    progress: Progress,
) -> PrunedImage | None:
    """Make a pruned copy of an image under the name `tag`; None when there is nothing to cut.

    Without a `tag` the copy gets the original's name with the targets as tag. It has one layer and the same
    configuration, and gets its name once it does what the original does. Raises ConfigError for an
    impossible name of an image and for a target that the image has no code for, DataError, BuildFailed,
    ProofFailed, EnvironmentMissing.
    """
    name = parse_new_name(tag) if tag is not None else None
    record = engine.inspect(ref)
    if record is None:
        raise DataError(
            f"{ref} is neither a directory, nor a file, nor an image in the engine",
            f"list the engine's images: docker images; or pull one first: {command('docker', 'pull', ref)}",
        )
    name = name or name_of_copy(ref, record, targets)
    if name.canonical in {parse_reference(old).canonical for old in record.get("RepoTags") or ()}:
        raise ConfigError(
            f"{name} is the image to prune itself, which stays", "give the copy another name: --tag"
        )
    require_writable(state, "name a directory for caches: WEIR_STATE=DIR")
    with scratch(state) as folder, temporary_names(engine, _TEMPORARY, folder) as temporary:
        room = require_free_space(state, engine.unpacked_bytes(record["Id"]) * _TARS, "pruning the image")
        job = _Job(ref, record, tuple(targets), engine, folder, progress)
        config = job.config()
        result = job.prune_files(room)
        if not result.changed:
            return None
        image_id = job.made(config, temporary)
        proved = job.proved(image_id)
        engine.tag(image_id, name)
    return PrunedImage(name, image_id, result, proved)


def tag_of(targets: Sequence[TargetId]) -> str:
    """Targets as a tag, which can't contain `:` and `+`. Raises ConfigError for more than a tag can hold."""
    text = "-".join(str(target).replace(":", "") for target in targets).replace("+", "-on")
    return str(parse_new_name(f"x:{text}").tag)


def name_of_copy(ref: str, record: Mapping[str, Any], targets: Sequence[TargetId]) -> Reference:
    """The copy's name where none is given: `weir/rocm:gfx906` for `weir/rocm:latest` and for its id.

    Raises ConfigError for an image that is given by its id and has no name.
    """
    names = [str(name) for name in record.get("RepoTags") or ()]
    if _is_id(ref, record):
        if not names:
            raise ConfigError(
                "the image has no name to derive the copy's name from", "give one: --tag NAME:TAG"
            )
        ref = names[0]
    return Reference(parse_reference(ref).repository, tag_of(targets))


def _is_id(ref: str, record: Mapping[str, Any]) -> bool:
    """Did the user give the image's id, or its first digits?"""
    names = {parse_reference(str(name)).repository for name in record.get("RepoTags") or ()}
    given = ref.removeprefix("sha256:")
    return ref not in names and str(record["Id"]).removeprefix("sha256:").startswith(given)


def _earlier_runs(whole: Path) -> list[Any]:
    """What earlier prunes removed, by the image's own manifest."""
    with tarfile.open(whole, "r:") as tar:
        for name in (IMAGE_PATH, f"./{IMAGE_PATH}"):
            with contextlib.suppress(KeyError, ValueError):
                info = tar.getmember(name)
                file = tar.extractfile(info) if info.isreg() and info.size <= MAX_BYTES else None
                return runs_in(file.read()) if file else []
    return []
