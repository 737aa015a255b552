"""The order of pruning an image: files as one tar, prune, remake, prove, tag. The original isn't touched."""

import contextlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildtool import buildx, proof
from buildtool.context import REPOSITORY
from buildtool.engine import Engine
from buildtool.errors import DataError, EnvironmentMissing, ProofFailed, ToolError
from buildtool.files import free_bytes, replacing
from buildtool.flat import created, flat_plan
from buildtool.gpucode.archive import ArchiveResult, prune_tar
from buildtool.gpucode.manifest import IMAGE_PATH, image_manifest
from buildtool.gpucode.target import TargetId
from buildtool.pruned import run_of, served_targets
from probes.units import decimal_bytes

Say = Callable[[str], None]

_ENGINES_OWN = (".dockerenv",)  # put into every container, part of no image
_ROOM = 1.5  # of the image's size, for its tar and the pruned one


@dataclass(frozen=True)
class PrunedImage:
    """A pruned copy. `proof` says what it was seen doing, or why nothing could be seen."""

    ref: str
    digest: str
    result: ArchiveResult
    proof: str


def prune_image(
    ref: str, targets: Sequence[TargetId], tag: str, *, engine: Engine, state: Path, say: Say
) -> PrunedImage | None:
    """Make a pruned copy of an image under `tag`; None when there is nothing to cut.

    The copy has one layer and the same configuration. It gets its tag once it is seen doing what the
    original does. Raises DataError, ConfigError for a target that the image has no code for,
    BuildFailed, ProofFailed, EnvironmentMissing.
    """
    buildx.require_buildx()
    record = engine.inspect(ref)
    if record is None:
        raise DataError(f"{ref} is no directory, no file and no image of the engine", "docker images")
    state.mkdir(parents=True, exist_ok=True)
    _require_room(record, state)
    temporary = f"weir-pruning:{os.getpid()}"
    with _scratch(state) as scratch:
        result = _prune_files(ref, record, targets, engine=engine, scratch=scratch, say=say)
        served_targets(ref, targets, sorted(result.had), asked=True, say=say)
        if not result.done.changed:
            return None
        say("making the pruned image")
        names = ",".join(map(str, targets))
        zstd = engine.info().containerd_store
        baked = flat_plan(record, str(scratch), temporary, targets=names, zstd=zstd)
        digest = buildx.bake_plan(baked, engine=engine, say=say)["pruned"]
    try:
        proved = _prove(ref, temporary, engine=engine, say=say)
        engine.rename(temporary, tag)
    except BaseException:
        engine.forget(temporary)
        raise
    return PrunedImage(tag, digest, result, proved)


def default_tag(ref: str, targets: Sequence[TargetId]) -> str:
    """The copy's name where none is given: `weir/rocm:gfx906` for `weir/rocm:latest`."""
    name = ref.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    name = head if colon and "/" not in tag else name
    return f"{name}:{'-'.join(str(target).replace(':', '') for target in targets)}".replace("+", "-on")


def _prune_files(
    ref: str,
    record: Mapping[str, Any],
    targets: Sequence[TargetId],
    *,
    engine: Engine,
    scratch: Path,
    say: Say,
) -> ArchiveResult:
    whole = scratch / "whole.tar"
    say(f"taking the files out of {ref}")
    with replacing(whole) as partial, partial.open("wb") as file:
        for chunk in engine.export(ref):
            file.write(chunk)
    say(f"pruning {decimal_bytes(whole.stat().st_size)} to {', '.join(map(str, targets))}")
    earlier = _earlier_runs(whole)

    def manifest(result: ArchiveResult) -> dict[str, bytes]:
        return {IMAGE_PATH: image_manifest(targets, [*earlier, run_of(ref, result)]).encode()}

    with replacing(scratch / "rootfs.tar") as partial:
        result = prune_tar(
            whole,
            partial,
            targets,
            latest=created(record),
            dropped=(*_ENGINES_OWN, IMAGE_PATH),
            added=manifest,
            say=say,
        )
    whole.unlink()
    return result


def _earlier_runs(whole: Path) -> list[Any]:
    """What prunes before this one took out, as the image's own manifest says."""
    with tarfile.open(whole, "r:") as tar:
        for name in (IMAGE_PATH, f"./{IMAGE_PATH}"):
            with contextlib.suppress(KeyError, ValueError, TypeError, RecursionError):
                file = tar.extractfile(name)
                return list(json.loads(file.read())["runs"]) if file else []
    return []


def _prove(ref: str, copy: str, *, engine: Engine, say: Say) -> str:
    """Let both images say what they are and do (images/smoke.py); they must say the same."""
    say("proving the pruned image in a fresh container")
    script = (REPOSITORY / "images" / "smoke.py").read_text()
    command = ["python3", "-B", "-c", script]
    try:
        before = engine.run(ref, command)
    except ToolError as error:
        return f"not proved: {ref} can't run python3 ({error.message})"
    facts = proof.facts_of(before.stdout)
    if before.exit_code or facts is None:
        return f"not proved: {ref} itself fails the smoke test (exit {before.exit_code})"
    after = engine.run(copy, command)
    if after.exit_code or proof.facts_of(after.stdout) != facts:
        said = "\n".join((after.stdout + after.stderr).strip().splitlines()[-8:])
        raise ProofFailed(f"pruned, {ref} says something else than before:\n{said}\nbefore:\n{before.stdout}")
    return proof.told(facts)


def _require_room(record: Mapping[str, Any], state: Path) -> None:
    needed = int(int(record.get("Size") or 0) * _ROOM)
    if free_bytes(state) < needed:
        raise EnvironmentMissing(
            f"{state} has {decimal_bytes(free_bytes(state))} free; pruning the image may take "
            f"{decimal_bytes(needed)}",
            "free some space (docker builder prune), or work elsewhere: WEIR_STATE=DIR",
        )


@contextlib.contextmanager
def _scratch(state: Path) -> Iterator[Path]:
    scratch = state / f".prune.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
