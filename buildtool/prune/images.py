"""Prunes an image: takes its files out as one tar, prunes it, makes a one-layer copy, proves it, tags it.

The original isn't touched.
"""

import contextlib
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from buildtool.core.errors import ConfigError, DataError, EnvironmentMissing, ProofFailed, ToolError
from buildtool.core.files import replacing, require_writable, scratch
from buildtool.core.progress import Progress
from buildtool.core.shipped import IMAGES
from buildtool.engine import proof
from buildtool.engine.client import Engine
from buildtool.engine.host import require_engine_space, require_free_space
from buildtool.engine.reference import Reference, parse_new_name, parse_reference
from buildtool.engine.tags import temporary_names
from buildtool.gpucode.source import prefix_errors
from buildtool.gpucode.target import TargetId, served_targets
from buildtool.image.documents import Platform
from buildtool.image.layer_writer import LayerWriter, pieces_of
from buildtool.image.written import LayerFile, archive_chunks
from buildtool.prune.archives import archive_targets, prune_tar
from buildtool.prune.flat_image import config_of, flat_image, read_config
from buildtool.prune.manifest import (
    IMAGE_PATH,
    MAX_BYTES,
    TreeResult,
    image_manifest,
    manifest_entry,
    runs_in,
)
from probes.core.quoting import command
from probes.core.units import decimal_bytes

_ENGINES_OWN = (".dockerenv",)  # put into every container, not part of an image
_TARS = 2  # copies of an image's files are on disk at once: all of them, and the pruned ones
_TEMPORARY = "weir-pruning"  # the name of a copy until it is proved


@dataclass(frozen=True)
class PrunedImage:
    """A pruned copy. `proof` is what was observed of it, or why nothing could be observed."""

    name: Reference
    image_id: str
    result: TreeResult
    proof: str


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
        image_id = job.load_copy(config, temporary)
        proof_text = job.prove(image_id)
        engine.tag(image_id, name)
    return PrunedImage(name, image_id, result, proof_text)


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
    """Whether `ref` is the image's id, or its first digits."""
    names = {parse_reference(str(name)).repository for name in record.get("RepoTags") or ()}
    given = ref.removeprefix("sha256:")
    return ref not in names and str(record["Id"]).removeprefix("sha256:").startswith(given)


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
        """The image's config, byte for byte. Raises DataError before anything is written."""
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
        with prefix_errors(self.ref):
            served_targets(archive_targets(whole, folder=self.folder), self.targets, strict=True)
        self.progress(f"pruning {decimal_bytes(whole.stat().st_size)} to {', '.join(map(str, self.targets))}")

        def manifest(result: TreeResult) -> dict[str, bytes]:
            runs = [*_earlier_runs(whole), manifest_entry(self.ref, result)]
            return {IMAGE_PATH: image_manifest(self.targets, runs).encode()}

        with replacing(self.folder / "rootfs.tar") as part:
            result = prune_tar(
                whole,
                part,
                self.targets,
                latest=created_at(self.record),
                dropped=(*_ENGINES_OWN, IMAGE_PATH),
                added=manifest,
                progress=self.progress,
            )
        whole.unlink()
        return result

    def load_copy(self, config: bytes, temporary: str) -> str:
        """Put the pruned image into the engine, under a temporary name, and return its id."""
        self.progress("making the pruned image")
        path, tar = self.folder / "layer", self.folder / "rootfs.tar"
        n_bytes = tar.stat().st_size
        layer = pack_layer(tar, path)
        # the engine keeps the layer, or a copy of it for as long as it loads it, and its files
        require_engine_space(
            self.engine, layer.n_bytes + n_bytes, "loading the pruned image", progress=self.progress
        )
        name = f"docker.io/library/{temporary}"
        image = flat_image(config, layer, targets=",".join(map(str, self.targets)))
        self.progress(f"loading it into the engine, {decimal_bytes(layer.n_bytes)}")
        with path.open("rb") as file:
            self.engine.load(archive_chunks(image, name, lambda _layer: pieces_of(file)))
        path.unlink()
        record = self.engine.inspect(temporary)
        if record is None or record["Id"] not in image.ids:
            raise ProofFailed(f"the engine holds another image as {temporary} than the one it was given")
        return str(record["Id"])

    def prove(self, copy_id: str) -> str:
        """Run both images' self-test (images/smoke.py); both must report the same."""
        self.progress("proving the pruned image in a fresh container")
        script = (IMAGES / "smoke.py").read_text(encoding="utf-8")
        smoke_test = ["python3", "-B", "-c", script]
        try:
            before = self.engine.run(self.image_id, smoke_test)
            facts = proof.facts_of(before.stdout)
        except ToolError as error:
            return f"not proved: {self.ref} itself fails the smoke test ({error.message})"
        if before.exit_code or facts is None or not facts.product_ok:
            return f"not proved: {self.ref} itself fails the smoke test (exit {before.exit_code})"
        after = self.engine.run(copy_id, smoke_test)
        if after.exit_code or proof.facts_of(after.stdout) != facts:
            raise ProofFailed(
                f"pruned, {self.ref} prints something other than before:\n"
                f"{proof.output_tail(after.stdout + after.stderr)}\nbefore:\n"
                f"{proof.output_tail(before.stdout)}"
            )
        return proof.facts_text(facts)


def created_at(record: Mapping[str, Any]) -> int:
    """When an image was made, seconds since 1970; 0 where the config doesn't record it."""
    text = str(record.get("Created") or "1970-01-01T00:00:00")
    return max(0, int(datetime.fromisoformat(text[:19] + "+00:00").timestamp()))


def _earlier_runs(whole: Path) -> list[Any]:
    """What earlier prunes removed, by the image's own manifest."""
    with tarfile.open(whole, "r:") as tar:
        for name in (IMAGE_PATH, f"./{IMAGE_PATH}"):
            with contextlib.suppress(KeyError, ValueError):
                info = tar.getmember(name)
                file = tar.extractfile(info) if info.isreg() and info.size <= MAX_BYTES else None
                return runs_in(file.read()) if file else []
    return []


def pack_layer(tar: Path, packed: Path) -> LayerFile:
    """Write `tar` to `packed` as a layer, and remove it. Raises as `files.replacing` does."""
    with tar.open("rb") as file, replacing(packed) as part, part.open("wb") as out:
        writer = LayerWriter(out)
        for piece in pieces_of(file):
            writer.write(piece)
        layer = writer.finish()
    tar.unlink()
    return layer
