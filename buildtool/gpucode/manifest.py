"""The list of what prunes took out of a tree, kept beside it as JSON; each run adds an entry."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buildtool.errors import DataError, EnvironmentMissing
from buildtool.gpucode.target import TargetId
from buildtool.gpucode.tree import TreeResult
from buildtool.places import Place, place_at

SCHEMA_VERSION = 1
MAX_BYTES = 64 << 20  # of a manifest; one of a whole ROCm tree has 1 MB
FILE_NAME = "weir-prune.json"
IMAGE_PATH = f"opt/weir/{FILE_NAME}"  # in a pruned image


def require_manifest(path: Path) -> None:
    """Raises, before a prune, the DataError or EnvironmentMissing that `write_manifest` would after it."""
    _runs(path)
    if not os.access(path.parent, os.W_OK):
        raise EnvironmentMissing(f"{path.parent} can't be written", "say where else: --manifest FILE")


def write_manifest(path: Path, result: TreeResult) -> None:
    """Add a run to the manifest. Raises DataError for a file that is none, EnvironmentMissing."""
    run = asdict(result) | {"saved_bytes": result.saved_bytes}
    document = {"schema_version": SCHEMA_VERSION, "runs": [*_runs(path), run]}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w") as handle:
            handle.write(json.dumps(document, indent=1, sort_keys=True) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvironmentMissing(f"{path} can't be written: {error.strerror}") from error


def image_manifest(targets: Sequence[TargetId], runs: Sequence[Any]) -> str:
    """The manifest of an image: the targets that it holds code for, and what each prune took out."""
    document = {"schema_version": SCHEMA_VERSION, "targets": [str(t) for t in targets], "runs": list(runs)}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _runs(path: Path) -> list[object]:
    if place_at(path) is Place.NOTHING:
        return []
    try:
        document = json.loads(path.read_text())
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {document['schema_version']}")
        return list(document["runs"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is no manifest of a prune ({error})", "move it away") from error
